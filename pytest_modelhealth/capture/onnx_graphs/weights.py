"""What torch's layers compute with in an ONNX graph: read where their operators take it.

Names do not tell: an exporter turns a matrix and calls it ``val_3``, a quantiser puts integers and
scales in its place, and whoever edits the file changes what is done with them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.capture.onnx_graphs.nodes import VALUES, Read
from pytest_modelhealth.capture.onnx_graphs.operators import KINDS, kind_of
from pytest_modelhealth.statistics.dense import quantised

_BY_BITS = {
    name: (bits, getattr(torch, name))
    for name, bits in (("bfloat16", "int16"), ("float8_e4m3fn", "int8"), ("float8_e5m2", "int8"))
}
"""Dtypes that NumPy has from another library, and those it has itself of the same width."""


def tensor_of(initializer: Any, folder: Path | None) -> Tensor:
    """Return a copy of an initializer, whose values may lie in another file of a folder."""
    from onnx import numpy_helper

    return from_array(numpy_helper.to_array(initializer, base_dir=str(folder or "")))


def from_array(array: Any) -> Tensor:
    """Return a copy of an array.

    Raises:
        TypeError: torch has no such dtype.
    """
    if array.dtype.name in _BY_BITS:
        bits, dtype = _BY_BITS[array.dtype.name]
        return torch.from_numpy(array.view(bits).copy()).view(dtype)
    return torch.from_numpy(array.copy())


_TURNED = frozenset({"MatMul", "MatMulInteger"})
"""Operators that take a weight as (inputs, outputs), which torch has as (outputs, inputs)."""

_PARTS = (VALUES, "_scale", "_zero_point")
"""How onnxruntime's quantiser names the integers that a weight became, and what is beside them."""

_PASSING = frozenset({"DequantizeLinear", "Identity", "Transpose"})

_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""Where the gates of torch stand among those of ONNX."""

_ANY = " ".join((*_GATES, *(kind.layer for kind in KINDS.values() if kind.places)))
"""The class of a layer that does not say its own."""


def _attribute(node: Any, name: str, default: Any = None) -> Any:
    """Return an attribute of a node, or what stands for one that is left out."""
    from onnx import helper

    values = (helper.get_attribute_value(one) for one in node.attribute if one.name == name)
    return next(values, default)


class _Constant(NamedTuple):
    """A tensor of the graph, or integers with their scale and zero point, by slices of an axis."""

    values: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None
    axis: int = 0

    def turned(self) -> _Constant:
        """Return a matrix the other way round."""
        return self._replace(values=self.values.t().contiguous(), axis=1 - self.axis)

    def times(self, factor: float) -> _Constant:
        """Return a multiple."""
        if self.scale is None:
            return self._replace(values=self.values * factor) if factor != 1 else self
        return self._replace(scale=self.scale * factor)

    def tensor(self) -> Tensor | None:
        """Return it as one tensor; ``None`` where its steps are of another form."""
        values, scale, zero = self.values, self.scale, self.zero
        if scale is None:  # integers alone are scaled somewhere behind
            return values if values.is_floating_point() else None
        zero = torch.zeros_like(scale, dtype=torch.int64) if zero is None else zero
        if scale.numel() == 1:
            scale, zero = scale.reshape(()), zero.reshape(())
        elif scale.ndim != 1 or scale.numel() != values.shape[self.axis]:
            return None
        is_known = values.dtype in (torch.int8, torch.uint8, torch.int32)
        return (
            quantised(values, scale, zero, self.axis if scale.ndim else None) if is_known else None
        )


class Constants:
    """What stands in a graph, by name, and what nodes make of nothing else.

    Args:
        nodes: the nodes.
        state: the initializers by name.
        folder: where their external data lies.
    """

    def __init__(self, nodes: Iterable[Any], state: Mapping[str, Any], folder: Path | None) -> None:
        self._state, self._folder = state, folder
        self._makers = {name: node for node in nodes for name in node.output}

    def number(self, name: str) -> float | None:
        """Return the number of a name; ``None`` where it is none."""
        found = self.constant(name)
        is_one = found is not None and found.values.numel() == 1
        return float(found.values) if found is not None and is_one else None

    def constant(self, name: str) -> _Constant | None:
        """Return the constant of a name, if it is one that torch has a dtype for."""
        node = self._makers.get(name)
        kind = "" if node is None else node.op_type
        stored = _attribute(node, "value") if kind == "Constant" else self._state.get(name)
        if stored is not None:
            try:
                return _Constant(tensor_of(stored, self._folder))
            except TypeError:
                return None
        given = self.constant(node.input[0]) if node is not None and kind in _PASSING else None
        if node is None or given is None or given.scale is not None:
            return None
        if kind == "DequantizeLinear":
            return self._rounded(node.input, _attribute(node, "axis", 1))
        is_turned = kind == "Transpose" and given.values.ndim == 2
        return given.turned() if is_turned else given if kind == "Identity" else None

    def parameters(
        self, nodes: Sequence[Any], path: str, kind: str
    ) -> Iterator[tuple[str, _Constant]]:
        """Yield the parameters of a layer of torch that is computed by these nodes, by its names.

        Nothing where several operators take weights: nobody knows which of them the layer's is.
        An exporter folds other layers into one, and leaves it the name of either.
        """
        found = {
            node.input[kind_of(node.op_type).places["weight"]]: node
            for node in nodes
            if kind_of(node.op_type).places
            and kind_of(node.op_type).layer.removesuffix("2d") in kind
            and self._weight(node) is not None
        }
        recurrent = [node for node in nodes if node.op_type in _GATES and node.op_type in kind]
        if len(found) == 1:
            ((_, node),) = found.items()
            if node.op_type != "MatMul" or node.input[1].rpartition(".")[0] != path:
                yield from self._of_operator(node)
        for level, node in enumerate(recurrent):
            yield from self._of_recurrence(node, level)

    def _weight(self, node: Any) -> _Constant | None:
        place = kind_of(node.op_type).places["weight"]
        name = node.input[place] if place < len(node.input) else ""
        if not name.endswith(VALUES):
            return self.constant(name)
        own = name.removesuffix(VALUES)  # scaled behind
        return self._rounded([own + end for end in _PARTS], node.op_type in _TURNED)

    def _of_operator(self, node: Any) -> Iterator[tuple[str, _Constant]]:
        is_product = node.op_type.endswith("Gemm")
        for name, place in kind_of(node.op_type).places.items():
            is_weight = name == "weight"
            given = node.input[place] if place < len(node.input) else ""
            value = self._weight(node) if is_weight else self.constant(given)
            if value is None:
                continue
            if is_weight and value.values.ndim == 2:
                is_turned = is_product and not _attribute(node, "transB", 0)
                value = value.turned() if is_turned or node.op_type in _TURNED else value
            factor = _attribute(node, "alpha" if is_weight else "beta", 1.0) if is_product else 1.0
            yield name, value.times(factor)

    def _of_recurrence(self, node: Any, level: int) -> Iterator[tuple[str, _Constant]]:
        order = list(_GATES[node.op_type])
        for place, stems in ((1, ("weight_ih",)), (2, ("weight_hh",)), (3, ("bias_ih", "bias_hh"))):
            value = self.constant(node.input[place]) if place < len(node.input) else None
            if value is None or value.scale is not None:
                continue
            for direction, own in enumerate(value.values):
                end = f"_l{level}{'_reverse' if direction else ''}"
                for stem, part in zip(stems, own.chunk(len(stems)), strict=True):
                    gates = part.reshape(len(order), -1, *part.shape[1:])[order]
                    yield stem + end, _Constant(gates.flatten(0, 1))

    def _rounded(self, names: Sequence[str], axis: int) -> _Constant | None:
        """Return integers with the scale and the zero point that come behind them."""
        parts = [self.constant(name) for name in names if name]
        if any(part is None or part.scale is not None for part in parts) or len(parts) < 2:
            return None
        values, scale, *zero = (part.values for part in parts if part is not None)
        return _Constant(values, scale, zero[0] if zero else None, axis % max(values.ndim, 1))


def weights_of_layers(reads: Iterable[Read], constants: Constants) -> dict[str, Tensor]:
    """Return the parameters and buffers of layers that one operator computes, as torch has them."""
    own: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for read in reads:
        kind = read.scopes[-1].type_name if read.scopes else "none"
        if not kind or kind.startswith("torch.nn."):
            own[read.scopes[-1].path, kind].append(read.node)
    return {
        f"{path}.{name}": tensor
        for (path, kind), nodes in own.items()
        for name, value in constants.parameters(nodes, path, kind or _ANY)
        if (tensor := value.tensor()) is not None
    }
