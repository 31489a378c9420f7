"""`FlowRecorder`: is told of calls of layers and functions while a model runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.flow.attention import READ_LAYERS, Facts
from pytest_modelhealth.capture.observing.flow.facts import FactReader
from pytest_modelhealth.capture.observing.flow.origins import CUSTOM, Function, Origins, Source
from pytest_modelhealth.capture.observing.flow.rows import (
    OpenCall,
    Place,
    Rows,
    TooManyError,
    counter,
    place_of,
)
from pytest_modelhealth.capture.observing.layer import Given, Layer
from pytest_modelhealth.report.flow import Flow, Kind

SKIP, MAKE, FORM, FIRST, WRITE, OVERWRITE, PRODUCT, READ, TAKE, DIFFERENTIATE = range(10)
"""A function gives no values on, makes new ones, takes a form or the first tensor alone, writes,
writes over all, multiplies, reads values out for Python, takes them from there, or
differentiates."""

_OPERATORS = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_NUMBERS = frozenset({"__float__", "__int__", "__index__", "__complex__", "__bool__", "is_nonzero"})
"""Functions that are `Tensor.item` by another name; `float` is a conversion, too."""
FORM_QUERIES = frozenset(
    {"__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous"}
    | {"is_floating_point", "ndimension", "nelement", "numel", "size", "stride"}
)
"""Functions that ask a tensor for its form, and not for its values."""

_NAMES = {
    SKIP: "storage_offset requires_grad_ register_hook retain_grad backward __repr__ __format__ "
    "__set__ " + " ".join(FORM_QUERIES),
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


def function_name(function: Any) -> str:
    """Return the name of a function, or of the attribute that it reads."""
    name = getattr(function, "__name__", "") or "function"
    if name == "__get__":  # an attribute, such as ``x.data``
        name = getattr(getattr(function, "__self__", None), "__name__", "attribute")
    if name in _NUMBERS:
        return "item"
    name = name.strip("_").lower()
    return "numpy" if name == "array" else name


class FunctionCall(NamedTuple):
    """A call of a function that has returned."""

    does: int  # how it is treated
    args: tuple[Any, ...]
    given: tuple[Any, ...]  # all arguments
    result: Any
    begin: int  # the number of its first node
    written: tuple[int, ...]  # where the values came from that it wrote over
    name: str
    facts: Facts | None  # what was read while it ran


_MODULE_CALL = nn.Module._wrapped_call_impl.__code__


class FlowRecorder:
    """The vertices and calls of one run.

    An error of ours here costs the flow and is noted; it never reaches the user.
    """

    def __init__(self) -> None:
        self._rows = Rows()
        self._origins = Origins(self._rows)
        self._facts = FactReader()
        self._treatments: dict[Any, tuple[int, str]] = {}  # with the name, by function
        self._thread = get_ident()
        self._outputs: tuple[int, ...] = ()
        self._loss: int | None = None
        self.is_on = True
        """Whether more is to be recorded."""

    def name_sources(self, sources: Iterable[Source]) -> None:
        """Say what the tensors are that a run starts from: the batch, parameters, buffers.

        They are held until `finish`, as the caller holds them.
        """
        self._origins.name_sources(sources)

    # Calls of layers.

    def enter(self, layer: Layer, given: Sequence[Given]) -> OpenCall | None:
        """Begin a call of a layer; our own caller has turned functions of torch off."""
        if not self.is_on or (get_ident() != self._thread and not self._is_here()):
            return None
        calls, running = self._rows.calls, self._rows.running
        around = running[-1]
        call = OpenCall(layer.name, layer.type_name, len(calls), around.call)
        try:
            # Before the counter is read: the node of a view may be made only now.
            known = given[0][2] if len(given) == 1 else None  # most layers
            # a tensor that `detach_` took out of the graph is the same, and has no new version
            if known is not None and known.made_by is not None and not given[0][0].is_leaf:
                call.operands = known.made_by
            else:
                call.operands = self._origins.of_all([tensor for tensor, _, _ in given])
            if layer.type_name in READ_LAYERS:
                call.read = self._facts.attention.entered(layer, given)
            # that of a hook of ours, which a call of a module is the third frame from as a rule, or
            # of whatever else of ours sees the call
            frame = sys._getframe(6)
            is_module = frame.f_code is _MODULE_CALL
            caller = frame.f_back if is_module else sys._getframe(4)
            call.place = place_of(caller, around.place)
        except Exception as error:  # noqa: BLE001 - ours
            self._fail(error)
            return None
        calls.append(call)
        running.append(call)
        call.begin = counter()
        return call

    def complete(self, call: OpenCall | None, returned: list[Tensor], is_one_vertex: bool) -> None:
        """End a call, which returned these tensors; none, where it raised and the model caught it.

        Of one of torch's own layers, or a function, nothing inside was seen: it is one vertex.
        """
        if call is None or not self.is_on or (get_ident() != self._thread and not self._is_here()):
            return
        running, call.end = self._rows.running, counter()
        if running[-1] is not call and call in running:
            while running[-1] is not call:  # an exception ended it without a word to us
                running.pop().end = call.end
        try:
            if is_one_vertex:
                self._origins.add_call(call, returned)
                call.facts = call.read(returned[0]) if call.read and returned else None
            else:
                call.outputs = self._origins.of_all(returned)
        except Exception as error:  # noqa: BLE001 - ours
            self._fail(error)
        if running[-1] is call:
            running.pop()

    def finish(self, outputs: list[Tensor], loss: Tensor | None, is_given: bool) -> None:
        """Take what the model returned and the loss; to be called before the backward pass.

        A loss that is neither the user's nor the model's is a random projection.
        """
        if not self.is_on:
            return
        try:
            self._outputs = made = self._origins.of_all(outputs)
            if loss is not None and is_given:
                self._loss = self._origins.of(loss)
            elif loss is not None:
                taken, live = [v for v in made if self._rows[v].live] or made, loss.requires_grad
                first_cut, name = len(taken) if live else 0, "random projection"
                self._loss = self._rows.add(
                    Kind.OPERATION, name, tuple(taken), first_cut=first_cut, live=live
                )
            self._facts.finish()
            self._origins.add_what_was_read()
        except Exception as error:  # noqa: BLE001 - ours
            self._fail(error)
        self.is_on = False
        self._origins.forget()

    # Calls of functions, as the function mode shows them.

    def run_function(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Make a call of a function of torch, and return what it returns."""
        known = self._treatments.get(function)
        if known is None:
            name = getattr(function, "__name__", "")
            is_in_place = name.endswith("_") and not name.endswith("__")
            does = _TREATMENTS.get(name, WRITE if is_in_place else MAKE)
            self._treatments[function] = known = does, function_name(function)
        does, name = known
        if does == SKIP or not self.is_on:
            return function(*args, **kwargs)
        written = self._written(args) if does == WRITE else ()
        begin = counter()
        result = function(*args, **kwargs)
        if self._is_here():
            given = (*args, *kwargs.values()) if kwargs else args
            try:
                with torch._C.DisableTorchFunction():
                    facts = self._facts.read(name, args, kwargs, result)
                    if does in (WRITE, OVERWRITE):
                        facts = self._facts.written(args, facts)
                    call = FunctionCall(does, args, given, result, begin, written, name, facts)
                    self._see(call)
            except Exception as error:  # noqa: BLE001 - ours
                self._fail(error)
        return result

    def _written(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Return where the plain values come from that a function is about to write over."""
        try:
            with torch._C.DisableTorchFunction():
                return self._origins.of_all([t for t in _tensors(args) if not t.requires_grad])
        except Exception as error:  # noqa: BLE001 - ours
            self._fail(error)
            return ()

    def _see(self, call: FunctionCall) -> None:
        if call.does == READ:  # what leaves for Python or NumPy may come back
            operands, place = self._origins.of_all(_tensors(call.given)), self._caller()
            vertex = self._rows.add(Kind.OPERATION, call.name, operands, at=counter(), place=place)
            self._origins.add_reading(vertex, call.result)
            return
        if call.does == DIFFERENTIATE:
            self._origins.of_all(_tensors(call.given))  # what is differentiated is used
            self._mark(call)
        overwrites = call.result is None and call.does == WRITE
        made = [call.args[0]] if overwrites else [*_tensors((call.result,))]
        given = {id(value) for value in call.args}
        plain = [t for t in made if t.grad_fn is None and not (t.requires_grad and id(t) in given)]
        if len(plain) < len(made):
            self._see_live(call)
        if plain:
            self._see_plain(call, plain)

    def _mark(self, call: FunctionCall) -> None:
        """Mark gradients that a thread with a counter of its own made: pytorch#52180."""
        made = _tensors((call.result,))
        strange = [t for t in made if t.grad_fn is not None and _is_elsewhere(t)]
        if strange:
            operands = self._origins.of_all(_tensors(call.given))
            vertex = self._rows.add(
                Kind.OPERATION, "grad", operands, first_cut=len(operands), live=True
            )
            self._origins.mark(strange, vertex)

    def _see_live(self, call: FunctionCall) -> None:
        """Note the line of what has nodes, and the operands that the nodes do not know."""
        origins, unknown = self._origins, list(call.written)
        for tensor in _tensors(call.given):
            if isinstance(tensor.grad_fn, CUSTOM):
                origins.see_made_within(tensor)
            elif call.does not in (WRITE, FIRST) and not tensor.requires_grad:
                unknown.append(origins.of_plain(tensor))
        if call.does == PRODUCT:
            zeros = [a for a in call.args if type(a) in (int, float) and a == 0]
            unknown += [self._rows.add(Kind.CONSTANT, "0") for _ in zeros]
        place = self._caller()
        if call.does == TAKE:
            unknown += origins.guessed(place)
        around = self._rows.running[-1].call
        origins.add_function(
            Function(call.begin, counter(), around, place, tuple(unknown), call.name, call.facts)
        )

    def _see_plain(self, call: FunctionCall, made: list[Tensor]) -> None:
        """Make a vertex of a call that returned tensors without gradients."""
        origins, does = self._origins, call.does
        operands = self._operands(call)
        name, place = call.name, self._caller()
        if name == "getitem" and made[0].numel() == call.args[0].numel():
            # it took all values, once each: ``x[:, None]``
            is_view = not made[0].is_inference() and made[0]._base is not None
            name = "view" if is_view else name
        if not operands and does == TAKE:
            operands = origins.guessed(place)
        kind = Kind.OPERATION if operands or does == OVERWRITE else Kind.CONSTANT
        vertex = self._rows.add(kind, name, operands, at=counter(), place=place, facts=call.facts)
        for tensor in made:
            origins.put(tensor, vertex)
            if does in (WRITE, OVERWRITE) and tensor._base is not None:
                origins.put(tensor._base, vertex)

    def _operands(self, call: FunctionCall) -> tuple[int, ...]:
        """Return where the values come from that a function takes."""
        if call.does in (WRITE, FORM):
            return call.written
        given = call.given
        if call.does == OVERWRITE:
            given = given[1:]
        elif call.does == FIRST:
            given = call.args[:1]
        return self._origins.of_all(_tensors(given))

    def _caller(self) -> Place | None:
        """Return the line of the user's code that made a call; a container's for torch's own."""
        return place_of(sys._getframe(2), self._rows.running[-1].place)

    # What was recorded.

    def line_of_leaf(self, leaf: Tensor) -> str:
        """Return the line that first uses a leaf, or what was made of it; ``""`` if unknown."""
        vertex = self._origins.leaves.get(id(leaf), self._origins.earlier)
        return "" if vertex is None else self._rows.line_after(vertex)

    def has_met(self, sources: Iterable[Tensor]) -> bool | None:
        """Whether a function or layer took one of the sources; ``None`` if that was not seen."""
        return any(id(s) in self._origins.source_vertices for s in sources) if self.is_on else None

    @property
    def has_own_functions(self) -> bool:
        """Whether a custom `torch.autograd.Function` of the user's was seen."""
        return bool(self._rows.own_functions)

    def flow(self) -> Flow:
        """Return what was recorded, as a graph that is made when somebody asks."""
        return Flow(lambda: self._rows.graph(self._outputs, self._loss))

    def _is_here(self) -> bool:
        if get_ident() != self._thread:
            self._give_up("layers ran in several threads")
        return get_ident() == self._thread

    def _fail(self, error: Exception) -> None:
        is_full = isinstance(error, TooManyError)
        why = f"an error in pytest-modelhealth: {type(error).__name__}: {error}"
        self._give_up(str(error) if is_full else why)

    def _give_up(self, why: str) -> None:
        self.is_on = False
        rows = self._rows
        rows.notes[f"not recorded: {why}"] = None
        for recorded in (rows, rows.calls, rows.own_functions):  # a gap would deny ways there are
            recorded.clear()


def _is_elsewhere(tensor: Tensor) -> bool:
    """Whether the backward pass of a tensor runs in a thread of its device."""
    return not tensor.is_cpu


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments of a function, and in lists among them.

    No method of the user's objects is called.
    """
    for value in values:
        kind = type(value)
        if issubclass(kind, Tensor):
            yield value
        elif issubclass(kind, tuple):
            yield from _tensors(tuple.__iter__(value))
        elif issubclass(kind, list):
            yield from _tensors(list.__iter__(value))
