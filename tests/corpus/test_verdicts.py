"""A sample of the measurement: what inspections, probes and comparisons make of the corpus.

Of each list some cases are judged in every run, the others by ``scripts/test -m corpus``; all of
all kinds are by ``python -m benchmarks.detection`` and ``benchmarks.drift``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from benchmarks.tools import COMPARERS, DETECTORS, modelhealth, probed
from corpus import Case, cases
from corpus.gradient import blind_own_backwards
from corpus.scoring import Judged, judge

CAUGHT = [
    "weights of a hidden layer all zero",
    "ReLU module dead by its bias",
    "channels dead by a batch norm's shift",
    "detach in mid-net",
    "argmax where a softmax was meant",
    "comparison makes the features",
    "log of a ReLU",
    "torch.where hides a log from forward only",
    "a NaN in a convolution's weight",
    "running mean is NaN",
    "twenty sigmoid layers",
    "twenty layers with three times the gain",
    "dead units behind clamp",
    "a state that grows instead of decaying",
    "binary targets of 0 and 255",
    "loss weight of zero",
]
WARNED_OF = [
    "no_grad around the encoder",
    "time embedded under no_grad",
    "made images detached in the generator's step",
]
LEFT_ALONE = [
    "mlp, trained",
    "resnet, initialised",
    "gpt, trained, batch of 1",
    "cnn, initialised, eval",
    "24 convolutions of deviation 0.05, initialised, eval",
    "scales drawn around 0.1, shifts by 0.1, eval",
    "teacher under no_grad, not frozen",
    "regression, trained, bfloat16",
    "transformers mixtral",
    "transformers t5",
    "resnet, last norm of each branch zero",
    "gpt with fresh LoRA adapters",
    "deep plain ReLU of 40 layers",
    "embedding of 5000 rows, 17 of them used",
    "loss on one output of two",
    "padding masked with -inf",
    "hinge that every sample satisfies",
    "SimSiam",
    "compressed attention, shorter than a window",
    "states of a tower without its summary",
    "a scale for each channel of a convolution",
    "content queries that start at zero",
    "attention over one token",
    "an indexer with a loss of its own",
    "an adapter without its context",
    "a gate that starts at zero",
    "clipped policy gradient, first step",
    "noise prediction, last convolution zero",
]
PAIRS = [
    "attributes into a Sequential",
    "layer norm written out",
    "q, k and v fused",
    "batch norms folded",
    "channels last",
    "one layer scaled by 1.001",
    "eps of a batch norm 1e-3 for 1e-5",
    "causal mask shifted by one",
    "residual dropped",
    "embedding and head untied",
    "mask as finite numbers that are added",
    "adapters merged without their scale",
]
# those that take seconds to train are judged with the others of the corpus
STARTS = [
    "standardised convolutions, gains of one and zero",
    "last norm of each branch zero, around an activation",
    "standardised convolution of tiny raw weights",
    "ArcFace",
    "CosFace",
    "ArcFace as the loss",
    "cosines times 64",
    "classifier of the faults beside them",
    "wide convolutions of std 0.3 before batch norms",
    "wide convolutions of std 0.3 before norms of one's own",
    "LayerScale of 1e-6, class token, relative positions",
    "LayerScale of 1e-4, pooled queries, class token",
    "head that starts at 1e-8",
    "factors of one in a trunk",
]
BY_SNAPSHOT = ["layer norm written out", "batch first into time first", *PAIRS[-5:]]

UNPLACED = {
    "exported to ONNX in training mode",
    "queries and keys swapped in an ONNX file of the exporter over TorchScript",
    "layer norm as before training, in a session",
    "Add bypassed in an ONNX file of the exporter over TorchScript",
    "frozen with the statistics of an earlier batch norm",
    "traced in training mode, set to evaluation and frozen",
    "optimised with one layer of an earlier checkpoint",
    "dropout baked in by a trace in training mode, then frozen",
    "frozen with queries and keys taken for each other",
    "residual sum bypassed, saved and loaded",
    "one adapter not merged",
}
"""Changes that are found, but not placed: of most, no layer inside has its name."""

FALSE_ALARM = "ONNX file", "bert"  # of one layer, whose attention is computed in another order

MISSED = {
    "decoder given its labels as they are",
    "last sample read for the last step, eight sequences of eight",
    "observations by running figures that move in every mode",
    "scale and shift computed under no_grad",
    "summary of the first batch kept for all that follow",
}
"""Faults that no probe names with its place and cause."""
TELLING = {
    "graphs of a batch joined to one, edges not moved on",  # every second sample
    "hourglass that merges each word with the next",  # later words, from an odd one on
}
"""Cases that alone show how a probe changes a batch; they run in every run."""


def named(names: Sequence[str], *roles: str) -> list[Case]:
    """Return the cases of these names, of which there is one each."""
    found = []
    for name in names:
        (case,) = (case for role in roles for case in cases(role=role) if case.name == name)
        found.append(case)
    return found


def is_placed(judged: Judged) -> bool:
    """Whether what changed is named first where it begins, and nothing is where nothing changed."""
    case = judged.case
    return judged.is_caught is case.is_sick and (
        judged.is_located or not case.is_sick or case.name in UNPLACED
    )


def is_told(judged: Judged) -> bool:
    """Whether it is right; a fault that may be a design is warned of, which is no false alarm."""
    return judged.is_right or judged.is_only_warned_of


BESIDE_STARTS = [c for c in cases(role="fault") if c.healthy.__module__ == "corpus.models.starts"]
DEPLOYED = [c for c in cases(kind="deployed") if (c.name, c.architecture) != FALSE_ALARM]
LEAKS = [*cases(kind="leak"), *blind_own_backwards.SHELF.cases]
INSPECT, COMPARE, SNAPSHOT = DETECTORS["modelhealth"], COMPARERS["compare"], COMPARERS["snapshot"]
FIRST: Callable[[int], bool] = lambda number: number < 2  # noqa: E731

# what judges, the cases, what must hold of the judgement, and which are judged in every run
LISTS: dict[str, tuple[Any, list[Case], Callable[[Judged], bool], Callable[[int], bool]]] = {
    # one inspection with default settings names the layer at fault and says why
    "caught": (INSPECT.judge, named(CAUGHT, "fault"), lambda j: j.has_right_cause, FIRST),
    # nothing fails, and a warning names the layer and says why
    "warned of": (INSPECT.judge, named(WARNED_OF, "fault"), lambda j: j.is_only_warned_of, FIRST),
    # no check objects
    "left alone": (INSPECT.judge, named(LEFT_ALONE, "control"), lambda j: j.is_right, FIRST),
    # what a paper or library starts with is no fault, and the nearest fault is caught
    "starts": (INSPECT.judge, named(STARTS, "control"), lambda j: j.is_right, lambda _: True),
    "beside starts": (INSPECT.judge, BESIDE_STARTS, lambda j: j.has_right_cause, lambda _: True),
    # a refactor passes; a harmful change is flagged at its layer, also by a snapshot
    "side by side": (
        COMPARE.judge, named(PAIRS, "refactor", "change"), lambda j: j.is_right, FIRST
    ),
    "by a snapshot": (
        SNAPSHOT.judge, named(BY_SNAPSHOT, "refactor", "change"), lambda j: j.is_right, FIRST
    ),
    "deployed": (modelhealth, DEPLOYED[::3], is_placed, lambda number: number % 10 == 0),
    "probed": (
        probed, [case for case in LEAKS if case.name not in MISSED], is_told,
        lambda number: number % 5 == 0,
    ),
}  # fmt: skip


def sampled() -> Iterator[Any]:
    """Yield each case of each list, of which most are marked."""
    for what, (tool, listed, holds, is_sampled) in LISTS.items():
        for number, case in enumerate(listed):
            always = is_sampled(number) or case.name in TELLING
            marks = [] if always else [pytest.mark.corpus]
            if what == "deployed":
                marks.append(pytest.mark.filterwarnings("ignore"))  # exporters warn
            yield pytest.param(tool, case, holds, id=f"{what}-{case.name}", marks=marks)


@pytest.mark.parametrize(("tool", "case", "holds"), list(sampled()))
def test_a_case_is_judged_rightly(tool: Any, case: Case, holds: Callable[[Judged], bool]) -> None:
    """Faults are named with place and cause, healthy models and refactors pass."""
    judged = judge(tool, case)
    assert judged is not None
    assert judged.error == ""
    assert holds(judged), (judged.objections, judged.warnings)
