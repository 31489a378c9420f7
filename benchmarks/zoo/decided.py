"""What was found out about each alarm of the sweep, by looking at the model."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Decision:
    """Whether an alarm is right.

    Args:
        models: shell patterns of the models' names.
        check: the name of the check, ``crash`` or ``differs``.
        kind: ``right`` where a fresh model of this kind does not train as it stands, ``false``
            where its authors mean it so: a design is not failed, what is true of it warns.
        why: what was seen.
        setting: shell pattern of the settings.
    """

    models: tuple[str, ...]
    check: str
    kind: str
    why: str
    setting: str = "*"


_DRAWN_AT_ONE = (
    "its default draws weights of 1 at a fan-in of 256, and attention is one-hot at once"
)
_DRAWN_AT_ZERO = "its default, shrunk, draws weights of 1e-10, which pass no signal"
_NO_AUDIO = "the batch has no audio in it: nothing of what embeds it is read"

DECISIONS: tuple[Decision, ...] = (
    Decision(
        ("csatv2*",), "normalization", "right",
        "two layer norms of each attention run over a single value, and give out a constant",
    ),
    Decision(("CpmAnt*", "XCLIP*"), "initial_weights", "right", _DRAWN_AT_ONE),
    Decision(("CpmAnt*", "XCLIP*"), "saturation", "right", _DRAWN_AT_ONE),
    Decision(("Blip*", "Sam*"), "grad_norm", "right", _DRAWN_AT_ZERO),
    Decision(("PPFormulaNet*",), "activation_scale", "right", _DRAWN_AT_ZERO),
    Decision(
        ("Mra*",), "missing_gradients", "right",
        "without its CUDA kernel its attention returns zeros",
    ),
    Decision(
        ("EncodecModel", "VitsModel"), "missing_gradients", "right",
        "codes and durations are rounded with no gradient; transformers does not train them",
    ),
    Decision(
        ("SwitchTransformers*",), "differs", "right",
        "its forward casts its router's weight to float32, as it does without the inspector",
        "*bfloat16",
    ),
    Decision(("PocketTTS*", "GradiumPhononTTS*"), "missing_gradients", "right", _NO_AUDIO),
    Decision(
        ("contrastive, batch of 1",), "loss", "right",
        "a batch of one has nothing to contrast: its loss is zero whatever the output",
    ),
    Decision(
        ("FeaStConv",), "missing_gradients", "right",
        "a softmax over one head, its default, is 1 whatever it is given",
    ),
    Decision(
        ("PointTransformerConv",), "grad_norm", "right",
        "its softmax takes away what is equal for all neighbours, which is all that `lin_dst` adds",
    ),
)  # fmt: skip


def decision(model: str, setting: str, check: str) -> Decision | None:
    """Return the first decision about this alarm."""
    for one in DECISIONS:
        is_about = any(fnmatchcase(model, pattern) for pattern in one.models)
        if is_about and one.check == check and fnmatchcase(setting, one.setting):
            return one
    return None
