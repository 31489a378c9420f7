"""What a model is meant to be: weights that are tied, parts that follow others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor, nn

from pytest_modelhealth.training.stepping.watching import Watched

_FOLLOWERS = frozenset({"target", "teacher", "ema", "momentum", "shadow", "slow", "average"})


def untied_weights(model: nn.Module) -> tuple[str, ...]:
    """Return weights that a configuration of transformers ties, and the model does not."""
    every = model.named_parameters(remove_duplicate=False)
    names = {id(parameter): name for name, parameter in every}
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


def _embedding(module: nn.Module, which: str) -> Tensor | None:
    try:
        layer = getattr(module, f"get_{which}_embeddings")()
    except Exception:  # noqa: BLE001 - a method of the user's, or none
        return None
    weight = getattr(layer, "weight", None)
    return weight if isinstance(weight, Tensor) else None


def copies(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return parts that are called followers and are copies now, each with what it is equal to."""
    parts = {name: part for name, part in model.named_modules() if name}
    followers = [name for name in parts if not _FOLLOWERS.isdisjoint(_words(name))]
    leaders = [name for name in parts if _words(name)[0] not in _FOLLOWERS]
    found = []
    for name in followers:
        equal = (o for o in leaders if o != name and _are_equal(parts[name], parts[o]))
        found += [(name, other) for other in islice(equal, 1)]
    return tuple(found)


def _words(name: str) -> list[str]:
    return name.rpartition(".")[2].lower().split("_")


def _are_equal(part: nn.Module, other: nn.Module) -> bool:
    """Whether both have the same parameters, by name and value, and some at all."""
    own, others = dict(part.named_parameters()), dict(other.named_parameters())
    is_alike = bool(own) and own.keys() == others.keys()
    return is_alike and all(torch.equal(own[name], others[name]) for name in own)


def moved_copies(
    found: tuple[tuple[str, str], ...], model: nn.Module, seen: list[Watched]
) -> tuple[tuple[str, str], ...]:
    """Return those of `copies` that an optimizer moved since."""
    moved = {key for one in seen for key, size in one.updated.items() if size > 0.0}
    return tuple(
        (name, other)
        for name, other in found
        if any(id(p) in moved for p in model.get_submodule(name).parameters())
    )
