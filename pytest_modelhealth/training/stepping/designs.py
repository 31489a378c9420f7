"""What a model is meant to be: weights that are tied, parts that follow others."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from pytest_modelhealth.training.stepping.session import Session
from pytest_modelhealth.training.stepping.watching import Watched

_FOLLOWERS = ("target", "teacher", "ema", "momentum", "shadow", "slow", "average")


def untied_weights(model: nn.Module) -> tuple[str, ...]:
    """Return weights that a configuration of transformers ties, and the model does not."""
    names = {id(parameter): name for name, parameter in _every_name(model)}
    found = []
    for module in model.modules():
        if not getattr(getattr(module, "config", None), "tie_word_embeddings", False):
            continue
        given, taken = _embedding(module, "input"), _embedding(module, "output")
        if given is None or taken is None or given.shape != taken.shape:
            continue
        if given.data_ptr() != taken.data_ptr():
            found += [names.get(id(taken), ""), names.get(id(given), "")]
            break
    return tuple(found)


def frozen_in_vain(model: nn.Module) -> Iterator[str]:
    """Yield modules that were given an attribute ``requires_grad``, which freezes nothing."""
    for name, module in model.named_modules():
        wanted = vars(module).get("requires_grad")
        if isinstance(wanted, bool) and any(p.requires_grad != wanted for p in module.parameters()):
            yield name or type(module).__name__


def _every_name(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)


def _embedding(module: nn.Module, which: str) -> Tensor | None:
    try:
        layer = getattr(module, f"get_{which}_embeddings")()
    except Exception:  # noqa: BLE001 - a method of the user's, or none
        return None
    weight = getattr(layer, "weight", None)
    return weight if isinstance(weight, Tensor) else None


def copies_that_learn(session: Session, seen: list[Watched]) -> tuple[tuple[str, str], ...]:
    """Return parts that are called followers, started as copies, and are moved by an optimizer.

    Each with the part that it was equal to.
    """
    moved = {key for one in seen for key, size in one.updated.items() if size > 0.0}
    parts = session.first_parts
    found = []
    for name in parts:
        own = name.rpartition(".")[2].lower()
        other = next((o for o in parts if _is_copied(session, name, o)), None)
        if other is None or not any(word in own.split("_") for word in _FOLLOWERS):
            continue
        part = session.model.get_submodule(name)
        if any(id(p) in moved for p in part.parameters()):
            found.append((name, other))
    return tuple(found)


def _is_copied(session: Session, name: str, other: str) -> bool:
    if name == other or other.rpartition(".")[2].lower().split("_")[0] in _FOLLOWERS:
        return False
    return bool(session.first_parts[name] == session.first_parts[other])
