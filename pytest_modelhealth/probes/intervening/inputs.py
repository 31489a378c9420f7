"""The inputs of a model: what people call them, and whether each has an effect."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.probes.conventions import Effects, NotApplicableError, UntellableError
from pytest_modelhealth.probes.intervening.running import Runs, changeable
from pytest_modelhealth.probes.intervening.samples import samples_in

NO_EFFECT = "has no effect on the output"


def what_inputs_do(runs: Runs) -> Effects:
    """Replace one input after the other by that of other samples.

    Some samples come twice: a mean over the batch would not see them change places.

    Raises:
        NotApplicableError: there is nothing to replace, or nothing that would show it.
    """
    base, notes, is_judged = runs.base, list[str](), False
    try:
        samples = samples_in(runs)
    except UntellableError as error:
        raise NotApplicableError(f"no input can be replaced: {error}") from error
    if not base.outputs:
        raise NotApplicableError("the model returns no tensor on which an input could show")
    rows = torch.arange(samples.number)
    indices = rows - rows % 2, torch.zeros_like(rows), torch.full_like(rows, samples.number - 1)
    names = names_of(runs)
    for number, (tensor, axis) in enumerate(zip(runs.tensors, samples.axes, strict=True)):
        others = [
            tensor.index_select(axis, i.to(tensor.device)) for i in indices if axis is not None
        ]
        others = [other.detach() for other in others if not _are_equal([tensor], [other])]
        if not others:
            continue
        ran = runs.forward(runs.changed(lambda n, _: others[0] if n == number else None))  # noqa: B023
        is_judged = is_judged or not ran.error
        if ran.error:
            notes.append(
                f"with input {names[number]!r} of other samples the model raises {ran.error}"
            )
        elif _are_equal(base.outputs, ran.outputs):
            notes.append(f"input {names[number]!r} {NO_EFFECT}")
    if not is_judged:
        raise NotApplicableError(
            f"no input could be replaced: {'; '.join(notes)}", notes=tuple(notes)
        )
    return Effects("each input by itself, by that of other samples", notes=tuple(notes))


def _are_equal(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Whether tensors are the same bit for bit, NaN among them; sparse ones are not looked into."""

    def is_equal(a: Tensor, b: Tensor) -> bool:
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.layout is not torch.strided or a.is_quantized or a.is_nested:
            return False
        pair = (t.detach().resolve_conj().contiguous().reshape(-1) for t in (a, b))
        return torch.equal(*(t.view(torch.uint8) for t in pair))

    return len(before) == len(after) and all(map(is_equal, before, after))


def names_of(runs: Runs) -> list[str]:
    """Return what people call the tensors of the batch, in the order of `Runs.tensors`."""
    batch, names = runs.batch(), list[str]()
    with runs.kept(()), suppress(TypeError, ValueError):  # a script keeps what is looked up in it
        declared = inspect.signature(runs.model.forward).parameters.values()
        names = [p.name for p in declared if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names += map(str, range(len(names), len(batch.args)))
    known: dict[int, str] = {}
    for name, value in [*zip(names, batch.args, strict=False), *batch.kwargs.items()]:
        for tensor, path in _paths(value, name):
            known.setdefault(id(tensor), path)
    return [known.get(id(tensor), str(n)) for n, tensor in enumerate(changeable(batch))]


def _paths(value: Any, name: str) -> Iterator[tuple[Tensor, str]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _paths(part, f"{name}[{key!r}]")
        return
    tensors = find_tensors(value)
    for n, tensor in enumerate(tensors):
        yield tensor, name if len(tensors) == 1 else f"{name}[{n}]"
