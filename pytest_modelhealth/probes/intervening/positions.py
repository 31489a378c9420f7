"""The steps of a sequence in another order, and whether positions tell a model that."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pytest_modelhealth.capture.observing.flow.rows import line_of, place_of
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.bare import converted_batch, copied
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.errors import in_one_line
from pytest_modelhealth.operations import having
from pytest_modelhealth.probes.conventions import Effects, NotApplicableError, UntellableError
from pytest_modelhealth.probes.intervening.running import SEED, Runs
from pytest_modelhealth.report import Parting
from pytest_modelhealth.report.flow import near

_EQUAL = 1e-11
"""By the root mean square: fresh attention is nearly uniform, and float32 would not tell."""
_SHORTEST = 4
_AT = 1  # the dimension of steps
_TEXT = "steps permuted, in float64"


def what_positions_do(runs: Runs) -> Effects:
    """Permute the steps of a copy in float64; an output that only follows knows no positions.

    Parameters of zeros get random numbers in it: gates and tables that open by training. Where
    features are as many as steps, the last are left out, so that their table is not taken for one.
    """
    given = [tensor for tensor in runs.tensors if tensor.ndim > 1]
    if len(given) != 1 or runs.has_others or given[0].shape[_AT] < _SHORTEST:
        raise NotApplicableError("the batch is not one sequence of four steps or more")
    model = copied(runs.model).double().eval()
    length = _length(model, given[0])
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    order = torch.randperm(length, generator=generator)
    order = order.roll(1) if torch.equal(order, torch.arange(length)) else order

    def taken(index: Tensor) -> Inputs:
        return runs.changed(
            lambda _, t: t.index_select(_AT, index.to(t.device)) if t.ndim > 1 else None
        )

    ran, tables = list[list[Tensor]](), _Tables(length)
    for batch in map(taken, (torch.arange(length), order)):
        args, kwargs = converted_batch((batch.args, batch.kwargs), torch.float64)
        with runs.kept((args, kwargs)), torch.no_grad(), tables:
            try:
                runs.count["forwards"] += 1
                output = find_tensors(Inputs(*args, **kwargs).call(model))
            except Exception as error:  # the user's, in another dtype
                raise UntellableError(f"in float64 it raises {in_one_line(error)}") from error
        ran.append([tensor.clone() for tensor in output if tensor.is_floating_point()])
        tables.begin_again()
    if not tables.lines:
        raise NotApplicableError("nothing that differs by step is added to or multiplied with it")
    if not ran[0] or any(tensor.dtype is not torch.float64 for tensor in ran[0]):
        raise UntellableError("it computes in another dtype whatever it is given")
    if not all(_follows(*pair, order) for pair in zip(ran[0], ran[1], strict=True)):
        return Effects(_TEXT)
    line = tables.lines[0]
    return Effects(_TEXT, [Parting("order", 0.0, line=line, detail=f" at {line}" if line else "")])


def _length(model: nn.Module, sequence: Tensor) -> int:
    """Return how many steps are run: not as many as there are features."""
    length = sequence.shape[_AT]
    widths = [size for parameter in model.parameters() for size in set(parameter.shape)]
    if widths.count(length) > 1 or length in sequence.shape[_AT + 1 :]:
        length = next(n for n in range(length - 1, -1, -1) if n not in widths)
    if length < _SHORTEST:
        raise NotApplicableError("nothing tells its steps from its features")
    return length


def _follows(before: Tensor, after: Tensor, order: Tensor) -> bool:
    """Whether a tensor is unchanged, or its steps are only in the other order."""
    if before.shape != after.shape:
        return False
    size = _EQUAL * max(float(before.square().mean().sqrt()), 1e-30)
    axes = [axis for axis in range(1, before.ndim) if before.shape[axis] == len(order)]
    ways = [before, *(before.index_select(axis, order.to(before.device)) for axis in axes)]
    return any(bool(((after - way).abs() <= size).all()) for way in ways)


class _Tables(TorchFunctionMode):
    """While on, sees what is added to or multiplied with values step by step.

    A table holds the same in both runs, and other numbers at each step.

    Attributes:
        lines: of the code that does so, where the other value is of the batch.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length, self._number = length, 0
        self._seen: dict[int, list[Any]] = {}
        self.lines: list[str] = []

    def begin_again(self) -> None:
        """Hold the calls that follow against those before."""
        self._number = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, and take down what a sum or product takes."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        pair = [one for one in args[:2] if isinstance(one, Tensor) and one.is_floating_point()]
        if len(pair) == 2 and name in having("sum", "product"):
            with torch._C.DisableTorchFunction(), suppress(RuntimeError):
                sums = [_sum(one) for one in pair]
                before = self._seen.setdefault(self._number, sums)
                self._number += 1
                same = [a == b for a, b in zip(before, sums, strict=True)]
                if before is not sums and same.count(True) == 1:
                    table, other = pair[same.index(True)], pair[same.index(False)]
                    if self._is_along(table, other):
                        self.lines.append(near(line_of(place_of(sys._getframe(1), None))))
        return result

    def _is_along(self, table: Tensor, other: Tensor) -> bool:
        """Whether a table has another row for each step of the other value."""
        return any(
            table.shape[-axis] == self._length == other.shape[-axis]
            and not torch.equal(table, table.narrow(-axis, 0, 1).expand_as(table))
            for axis in range(1, min(table.ndim, other.ndim - 1) + 1)
        )


def _sum(tensor: Tensor) -> float:
    """Return a sum of numbers that depends on their order."""
    flat = tensor.detach().double().reshape(-1)
    return float(flat @ torch.arange(1, len(flat) + 1, device=flat.device).double())
