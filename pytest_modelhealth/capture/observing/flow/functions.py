"""What calls of torch's functions do to values, as the function mode shows them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from pytest_modelhealth.capture.observing.flow.origins import Function, Origins
from pytest_modelhealth.capture.observing.flow.rows import Place, Reading, Rows, counter, place_of
from pytest_modelhealth.report.flow import Kind

SKIP, MAKE, FORM, FIRST, WRITE, OVERWRITE, PRODUCT, READ, TAKE, DIFFERENTIATE = range(10)
"""A function gives no values on, makes new ones, takes a form or the first tensor alone, writes,
writes over all, multiplies, reads values out for Python, takes them from there, or
differentiates."""

_OPERATORS = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_NUMBERS = frozenset({"__float__", "__int__", "__index__", "__complex__", "__bool__", "is_nonzero"})
"""Functions that are `Tensor.item` by another name; `float` is a conversion, too."""
_NAMES = {
    SKIP: "__len__ dim element_size get_device is_complex is_contiguous size is_floating_point "
    "ndimension nelement numel stride storage_offset requires_grad_ register_hook retain_grad "
    "backward __repr__ __format__ __set__",
    READ: "item tolist numpy __array__ equal allclose __dlpack__ " + " ".join(_NUMBERS),
    DIFFERENTIATE: "grad",
    TAKE: "tensor as_tensor asarray from_numpy frombuffer scalar_tensor",
    FORM: "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros "
    "new_ones new_empty new_full new_tensor",
    FIRST: "to type_as expand_as view_as reshape_as",
    OVERWRITE: "copy_ fill_ zero_ normal_ uniform_ bernoulli_ random_ exponential_ trunc_normal_ "
    "set_",
    PRODUCT: "mul __mul__ __rmul__ multiply",
    WRITE: "__setitem__ " + " ".join(f"__i{name}__" for name in _OPERATORS),
}
_TREATMENTS = {name: does for does, names in _NAMES.items() for name in names.split()}


def treatment(function: Any) -> int:
    """Return what a function does."""
    name = getattr(function, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    return _TREATMENTS.get(name, WRITE if is_in_place else MAKE)


def function_name(function: Any) -> str:
    """Return the name of a function, or of the attribute that it reads."""
    name = getattr(function, "__name__", "") or "function"
    if name == "__get__":  # an attribute, such as ``x.data``
        name = getattr(getattr(function, "__self__", None), "__name__", "attribute")
    if name in _NUMBERS:
        return "item"
    name = name.strip("_").lower()
    return "numpy" if name == "array" else name


_LETS_GO = frozenset({"detach", "data"})
"""Functions whose result often lends its memory to what has no tie to it."""


class FunctionCall(NamedTuple):
    """A call of a function that has returned.

    Args:
        function: the function.
        does: how it is treated.
        args, kwargs: what it was given.
        result: what it returned.
        begin: the number of its first node.
        written: where the values came from that it wrote over.
    """

    function: Any
    does: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    begin: int
    written: tuple[int, ...]

    @property
    def given(self) -> tuple[Any, ...]:
        """All arguments."""
        return (*self.args, *self.kwargs.values())


class Functions:
    """Adds calls of functions to the rows of a run."""

    def __init__(self, rows: Rows, origins: Origins) -> None:
        self._rows = rows
        self._origins = origins

    def see(self, call: FunctionCall) -> None:
        """Take a call of a function."""
        if call.does == READ:
            self._see_reading(call)
            return
        if call.does == DIFFERENTIATE:
            self._mark(call)
        overwrites = call.result is None and call.does == WRITE
        made = [call.args[0]] if overwrites else [*tensors((call.result,))]
        given = {id(value) for value in call.args}
        plain = [t for t in made if t.grad_fn is None and not (t.requires_grad and id(t) in given)]
        if len(plain) < len(made):
            self._see_live(call)
        if plain:
            self._see_plain(call, plain)

    def _see_reading(self, call: FunctionCall) -> None:
        """Note what leaves for Python or NumPy: it may come back."""
        read = [*tensors(call.given)]
        name, place = function_name(call.function), self._caller()
        operands, exports = self._origins.of_all(read), self._origins.exports
        vertex = self._rows.add(Kind.OPERATION, name, operands, at=counter(), place=place)
        around = self._rows.running[-1].number
        exports.add_reading(Reading(vertex, name, around, place), call.result)
        if name == "numpy":
            exports.add_memory(read[0], vertex)

    def _mark(self, call: FunctionCall) -> None:
        """Mark gradients that a thread with a counter of its own made: pytorch#52180."""
        gradients = [t for t in tensors((call.result,)) if t.grad_fn is not None]
        strange = [tensor for tensor in gradients if _is_elsewhere(tensor)]
        if strange:
            operands = self._origins.of_all(tensors(call.given))
            vertex = self._rows.add(
                Kind.OPERATION, "grad", operands, first_cut=len(operands), live=True
            )
            self._origins.mark(strange, vertex)

    def _see_live(self, call: FunctionCall) -> None:
        """Note the line of what has nodes, and the operands that the nodes do not know."""
        unknown = list(call.written)
        if call.does not in (WRITE, FIRST):
            plain = (t for t in tensors(call.given) if t.grad_fn is None and not t.requires_grad)
            unknown.extend(self._origins.of_plain(tensor) for tensor in plain)
        if call.does == PRODUCT:
            zeros = [a for a in call.args if type(a) in (int, float) and a == 0]
            unknown += [self._rows.add(Kind.CONSTANT, "0") for _ in zeros]
        place = self._caller()
        unknown += self._read_out(call, place)
        around = self._rows.running[-1].number
        self._origins.add_function(Function(call.begin, counter(), around, place, tuple(unknown)))

    def _see_plain(self, call: FunctionCall, made: list[Tensor]) -> None:
        """Make a vertex of a call that returned tensors without gradients."""
        origins, does = self._origins, call.does
        operands = self._operands(call)
        name, place = function_name(call.function), self._caller()
        if name == "getitem" and _keeps_all(call.args[0], made[0]):
            name = "view"
        if not operands and does == TAKE:
            shared = (origins.exports.of_memory(tensor) for tensor in made)
            operands = tuple([vertex for vertex in shared if vertex is not None])
        if not operands or does in (MAKE, PRODUCT, WRITE, OVERWRITE):
            operands += self._read_out(call, place)
        kind = Kind.OPERATION if operands or does == OVERWRITE else Kind.CONSTANT
        vertex = self._rows.add(kind, name, operands, at=counter(), place=place)
        for tensor in made:
            origins.put(tensor, vertex)
            if name in _LETS_GO:
                origins.exports.add_memory(tensor, vertex)
            base = tensor._base
            if does in (WRITE, OVERWRITE) and base is not None:
                origins.put(base, vertex)

    def _operands(self, call: FunctionCall) -> tuple[int, ...]:
        """Return where the values come from that a function takes."""
        if call.does in (WRITE, FORM):
            return call.written if call.does == WRITE else ()
        given = call.given
        if call.does == OVERWRITE:
            given = given[1:]
        elif call.does == FIRST:
            given = call.args[:1]
        return self._origins.of_all(tensors(given))

    def _read_out(self, call: FunctionCall, place: Place | None) -> tuple[int, ...]:
        """Return the vertices of values that were read out and come back as numbers or an array."""
        exports, given = self._origins.exports, list(call.given)
        if not exports:
            return ()
        known = exports.given(given)
        if known or place is None:
            return known
        holds = exports.may_be_made_of if call.does == TAKE else exports.may_be_in
        return self._origins.guessed(place) if holds(given, place) else ()

    def _caller(self) -> Place | None:
        """Return the line of the user's code that made a call; a container's for torch's own."""
        return place_of(sys._getframe(2), self._rows.running[-1].place)


def _is_elsewhere(tensor: Tensor) -> bool:
    """Whether the backward pass of a tensor runs in a thread of its device."""
    return not tensor.is_cpu


def tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments of a function, and in lists among them.

    No method of the user's objects is called.
    """
    for value in values:
        kind = type(value)
        if issubclass(kind, Tensor):
            yield value
        elif issubclass(kind, tuple):
            yield from tensors(tuple.__iter__(value))
        elif issubclass(kind, list):
            yield from tensors(list.__iter__(value))


def _keeps_all(whole: Tensor, taken: Tensor) -> bool:
    """Whether indexing took all values, once each: ``x[:, None]``."""
    return taken.numel() == whole.numel() and not taken.is_inference() and taken._base is not None
