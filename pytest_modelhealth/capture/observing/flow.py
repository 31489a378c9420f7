"""Records who feeds whom while a model runs, and holds neither tensors nor nodes of autograd.

Two sources: autograd's sequence numbers for what has a gradient, and the function mode that is on
anyway for what has none. Every node of autograd takes the next number of its thread when it is
made, so the counter before and after a call of a layer tells which nodes are the call's own; the
nodes between layers are walked once and remembered by number. docs/decisions/0016-flow.md has why.
"""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.exports import Exports, Reading
from pytest_modelhealth.capture.observing.loss_graph import operation, snake_case
from pytest_modelhealth.capture.observing.places import Place, Places, line_of
from pytest_modelhealth.capture.observing.tensors import version
from pytest_modelhealth.capture.observing.treatments import (
    DIFFERENTIATE,
    FIRST,
    FORM,
    MAKE,
    OVERWRITE,
    PRODUCT,
    READ,
    SKIP,
    TAKE,
    WRITE,
    function_name,
    treatment,
)
from pytest_modelhealth.report.flow import Call, Flow, Graph, Kind, Vertex

if TYPE_CHECKING:
    from pytest_modelhealth.capture.observing.recorder import Layer

counter: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Returns the number that the next node of this thread will have (pytorch#103129)."""

MOST_VERTICES = 200_000
"""A run of more operations has a partial flow: each takes some 300 bytes."""

_LETS_GO = frozenset({"detach", "data"})
"""Functions whose result often lends its memory to what has no tie to it."""
_ACCUMULATES = (1 << 64) - 1
"""The number of every node that stands for a leaf."""

Source = tuple[Kind, tuple[str, ...], Tensor]
"""A tensor that a run starts from: what it is, and the parts of its name."""


class OpenCall:
    """One call of a layer, while it runs and after."""

    __slots__ = (
        "begin",
        "end",
        "index",
        "inputs",
        "live",
        "name",
        "number",
        "outputs",
        "parent",
        "place",
        "type_name",
    )

    def __init__(self, name: str, type_name: str, number: int, parent: int) -> None:
        self.name = name
        self.type_name = type_name
        self.number = number
        self.parent = parent
        self.begin = self.end = -1  # numbers of its nodes
        self.index = -1  # its vertex, where it is one
        self.live = False
        self.inputs: tuple[int, ...] = ()
        self.outputs: tuple[int, ...] = ()
        self.place: Place | None = None

    def vertex(self) -> Vertex:
        """Return the vertex that this call is, where it is one."""
        cuts = frozenset(() if self.live else range(len(self.inputs)))
        line = line_of(self.place)
        return Vertex(Kind.CALL, self.name, self.inputs, cuts, self.number, self.live, line)


class _Row:
    """An operation or a source. Operands from `first_cut` on pass no gradient."""

    __slots__ = ("call", "first_cut", "kind", "live", "made_at", "name", "operands", "place")

    def __init__(
        self,
        kind: Kind,
        name: str,
        operands: tuple[int, ...],
        first_cut: int,
        live: bool,
        call: int,
    ) -> None:
        self.kind = kind
        self.name = name
        self.operands = operands
        self.first_cut = first_cut
        self.live = live
        self.call = call
        self.made_at = -1
        self.place: Place | None = None

    def vertex(self) -> Vertex:
        """Return the vertex that this is."""
        cuts = frozenset(range(self.first_cut, len(self.operands)))
        line = line_of(self.place)
        return Vertex(self.kind, self.name, self.operands, cuts, self.call, self.live, line)


class FlowRecorder:
    """The vertices and calls of one run, as plain numbers and names.

    An error of ours here costs the flow and is noted; it never reaches the user.
    """

    def __init__(self) -> None:
        self._rows: list[_Row | OpenCall] = []  # by vertex
        self._calls: list[OpenCall] = []
        outside = OpenCall("", "", -1, -1)
        self._running = [outside]
        self._spans = [outside]  # calls that are one vertex and made nodes, in order
        self._begins = [-1]  # their first numbers
        self._latest = outside  # one of them that returned one tensor
        self._by_number: dict[int | tuple[int, int], int] = {}
        self._plain: dict[int, tuple[weakref.ref[Tensor], int | None, int]] = {}
        self._sources: dict[int, Source] = {}
        self._unnamed: Iterator[Source] = iter(())
        self._source_vertices: dict[int, int] = {}
        self._functions: list[tuple[int, int, int, Place | None, tuple[int, ...]]] = []
        self._function_ends: list[int] = []
        self._known_functions: dict[Any, int] = {}
        self._places = Places()
        self._exports = Exports()
        self._marks: object | None = None  # the key of marks in the metadata of nodes
        self._unseen: dict[int, tuple[tuple[int, ...], int]] = {}  # by call; calls until then
        self._first = counter()
        self._thread = get_ident()
        self._outputs: tuple[int, ...] = ()
        self._loss: int | None = None
        self._notes: dict[str, None] = {}
        self.is_on = True
        """Whether more is to be recorded."""

    def name_sources(self, sources: Iterable[Source]) -> None:
        """Say what the tensors are that a run starts from: the batch, parameters, buffers.

        They are held until `finish`, as the caller holds them, and gone through when one of them is
        met outside of the layers.
        """
        self._unnamed = iter(sources)

    def enter(self, layer: Layer, tensors: list[Tensor]) -> OpenCall | None:
        """Begin a call of a layer; our own caller has turned functions of torch off."""
        if not self.is_on or not self._is_here():
            return None
        running, calls = self._running, self._calls
        around = running[-1]
        call = OpenCall(layer.name, layer.type_name, len(calls), around.number)
        try:
            # Before the counter is read: the node of a view may be made only now.
            call.inputs = tuple([self._source(tensor) for tensor in tensors])
            call.place = self._places.of(sys._getframe(2), around.place)
        except Exception as error:  # noqa: BLE001 - ours
            self._fail(error)
        calls.append(call)
        running.append(call)
        call.begin = counter()
        return call

    def enter_simply(self, layer: Layer, tensor: Tensor) -> OpenCall | None:
        """Do what `enter` does for a layer with one tensor, at a third of the cost.

        To be called where a forward hook is two frames above, for `Places.of_module`.
        """
        if not self.is_on or (get_ident() != self._thread and not self._is_here()):
            return None
        running, calls, latest = self._running, self._calls, self._latest
        around = running[-1]
        call = OpenCall(layer.name, layer.type_name, len(calls), around.number)
        try:
            node = tensor.grad_fn
            if node is not None and latest.begin <= node._sequence_nr() < latest.end:
                call.inputs = latest.outputs
            else:
                call.inputs = (self._source(tensor),)
            call.place = self._places.of_module(around.place)
        except Exception as error:  # noqa: BLE001 - ours
            self._fail(error)
        calls.append(call)
        running.append(call)
        call.begin = counter()
        return call

    def complete_simply(self, call: OpenCall | None, tensor: Tensor) -> None:
        """End such a call, which returned one tensor."""
        if call is None or not self.is_on:
            return
        begin, end = call.begin, counter()
        is_usual = self._running[-1] is call and self._begins[-1] <= begin < end
        if not is_usual or not tensor.requires_grad:
            self._complete(call, [tensor], True, end)
            return
        self._running.pop()
        call.end = end
        rows = self._rows
        call.index = len(rows)
        if call.index < MOST_VERTICES:
            rows.append(call)
            call.live = True
            call.outputs = (call.index,)
            self._begins.append(begin)
            self._spans.append(call)
            self._latest = call
        else:
            self._fail(_TooManyError())

    def complete(self, call: OpenCall | None, tensors: list[Tensor], is_one_vertex: bool) -> None:
        """End a call, which returned `tensors`.

        Args:
            call: what `enter` returned.
            tensors: what the layer returned.
            is_one_vertex: whether nothing inside was seen: it is one of torch's own layers, or a
                function.
        """
        if call is not None and self.is_on and self._is_here():
            self._complete(call, tensors, is_one_vertex, counter())

    def abandon(self, call: OpenCall | None) -> None:
        """End a call that raised, where the model caught the exception."""
        if call is not None and self.is_on and self._is_here():
            self._complete(call, [], False, counter())

    def finish(self, outputs: list[Tensor], loss: Tensor | None, is_given: bool) -> None:
        """Take what the model returned and the loss; to be called before the backward pass.

        Args:
            outputs: the tensors that the model returned.
            loss: the loss, if there is one.
            is_given: whether it is the user's or the model's; if not it is a random projection.
        """
        if not self.is_on:
            return
        try:
            self._outputs = tuple(self._source(tensor) for tensor in outputs)
            if loss is not None and is_given:
                self._loss = self._source(loss)
            elif loss is not None:
                live = [v for v in self._outputs if self._rows[v].live] or self._outputs
                name, open_ = "random projection", len(live) if loss.requires_grad else 0
                self._loss = self._add(
                    Kind.OPERATION, name, tuple(live), first_cut=open_, live=loss.requires_grad
                )
            self._add_what_was_read()
        except Exception as error:  # noqa: BLE001 - ours
            self._fail(error)
        self.is_on = False
        self._unnamed = iter(())
        for passing in (self._plain, self._sources, self._by_number, self._functions):
            passing.clear()
        self._places.forget()
        self._exports.forget()

    def _add_what_was_read(self) -> None:
        """Make a vertex of each function that took plain values and leads to no end.

        Its nodes are not walked, and so are those of a loss that is differentiated in the forward:
        what such a function takes was read all the same.
        """
        took_plain = [one for one in self._functions if one[4]]
        if not took_plain:
            return
        walked = sorted(n if isinstance(n, int) else n[0] for n in self._by_number)
        for begin, end, call, place, unknown in took_plain:
            at = bisect_left(walked, begin)
            if at == len(walked) or walked[at] >= end:
                self._add(Kind.OPERATION, "function", unknown, call=call, place=place)

    def run_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of a function of torch, and return what it returns."""
        does = self._known_functions.get(function)
        if does is None:
            does = self._known_functions[function] = treatment(function)
        if does == SKIP or not self.is_on:
            return function(*args, **kwargs)
        written: tuple[int, ...] = ()
        if does == WRITE:
            written = self._guarded_sources(args)
        begin = counter()
        result = function(*args, **kwargs)
        if self._is_here():
            try:
                with torch._C.DisableTorchFunction():
                    self._see(function, does, args, kwargs, result, begin, written)
            except Exception as error:  # noqa: BLE001 - ours
                self._fail(error)
        return result

    def flow(self) -> Flow:
        """Return what was recorded, as a graph that is made when somebody asks."""
        return Flow(self._graph)

    # What a call of a function came to.

    def _guarded_sources(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Return where the values come from that a function is about to write over."""
        try:
            with torch._C.DisableTorchFunction():
                return tuple([self._source(t) for t in _tensors(args) if not t.requires_grad])
        except Exception as error:  # noqa: BLE001 - ours
            self._fail(error)
            return ()

    def _see(
        self,
        function: Any,
        does: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        begin: int,
        written: tuple[int, ...],
    ) -> None:
        if does == READ:
            self._see_reading(function, args, kwargs, result)
            return
        if does == DIFFERENTIATE:
            self._mark((args, *kwargs.values()), result)
        made = [args[0]] if result is None and does == WRITE else [*_tensors((result,))]
        given = {id(value) for value in args}
        plain = [t for t in made if t.grad_fn is None and not (t.requires_grad and id(t) in given)]
        if len(plain) < len(made):
            self._see_live(does, args, kwargs, begin, written)
        if plain:
            self._see_plain(function, does, args, kwargs, plain, written)

    def _see_reading(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Note what leaves for Python or NumPy: it may come back."""
        tensors = [*_tensors((args, *kwargs.values()))]
        name, place = function_name(function), self._caller(sys._getframe(4))
        operands = tuple([self._source(tensor) for tensor in tensors])
        vertex = self._add(Kind.OPERATION, name, operands, at=counter(), place=place)
        self._exports.add_reading(Reading(vertex, name, self._running[-1].number, place), result)
        if name == "numpy":
            self._exports.add_memory(tensors[0], vertex)

    def _mark(self, given: tuple[Any, ...], gradients: Any) -> None:
        """Mark gradients that a thread with a counter of its own made, off the CPU (pytorch#52180).

        A mark lives with the node, and holds nothing.
        """
        strange = [t for t in _tensors((gradients,)) if t.grad_fn is not None and _is_elsewhere(t)]
        if strange:
            operands = tuple([self._source(tensor) for tensor in _tensors(given)])
            vertex = self._add(Kind.OPERATION, "grad", operands, first_cut=len(operands), live=True)
            self._marks = self._marks or object()
            for tensor in strange:
                node: Any = tensor.grad_fn
                node.metadata[self._marks] = vertex

    def _read_out(
        self, does: int, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place | None
    ) -> tuple[int, ...]:
        """Return the vertices of values that were read out and come back as numbers or an array."""
        if not self._exports:
            return ()
        exports, given = self._exports, [*args, *kwargs.values()]
        known = exports.given(given)
        if known or place is None:
            return known
        holds = exports.may_be_made_of if does == TAKE else exports.may_be_in
        return self._guessed(place) if holds(given, place) else ()

    def _guessed(self, place: Place | None) -> tuple[int, ...]:
        """Return what may have been made a tensor of: what was read out within the same call."""
        guessed = self._exports.read_in(self._running[-1].number)
        if guessed:
            self._note(self._exports.note(place))
        return guessed

    def _see_live(
        self,
        does: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        begin: int,
        written: tuple[int, ...],
    ) -> None:
        """Note the line of what has nodes, and the operands that the nodes do not know."""
        unknown = list(written)
        given: Any = (args, *kwargs.values()) if kwargs else args
        if does not in (WRITE, FIRST):
            plain = (t for t in _tensors(given) if t.grad_fn is None and not t.requires_grad)
            unknown.extend(self._of_plain(tensor) for tensor in plain)
        if does == PRODUCT:
            zeros = [a for a in args if type(a) in (int, float) and a == 0]
            unknown += [self._add(Kind.CONSTANT, "0") for _ in zeros]
        place = self._caller(sys._getframe(4))
        unknown += self._read_out(does, args, kwargs, place)
        end = counter()
        if len(self._functions) >= MOST_VERTICES:
            raise _TooManyError
        self._functions.append((begin, end, self._running[-1].number, place, tuple(unknown)))
        self._function_ends.append(end)

    def _see_plain(
        self,
        function: Any,
        does: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: list[Tensor],
        written: tuple[int, ...],
    ) -> None:
        operands = self._operands(does, args, kwargs, written)
        name, place = function_name(function), self._caller(sys._getframe(4))
        if name == "getitem" and _keeps_all(args[0], made[0]):
            name = "view"
        if not operands and does == TAKE:
            shared = (self._exports.of_memory(tensor) for tensor in made)
            operands = tuple([vertex for vertex in shared if vertex is not None])
        if not operands or does in (MAKE, PRODUCT, WRITE, OVERWRITE):
            operands += self._read_out(does, args, kwargs, place)
        kind = Kind.OPERATION if operands or does == OVERWRITE else Kind.CONSTANT
        vertex = self._add(kind, name, operands, at=counter(), place=place)
        for tensor in made:
            self._remember(tensor, vertex)
            if name in _LETS_GO:
                self._exports.add_memory(tensor, vertex)
            base = tensor._base
            if does in (WRITE, OVERWRITE) and base is not None:
                self._remember(base, vertex)

    def _operands(
        self,
        does: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: tuple[int, ...],
    ) -> tuple[int, ...]:
        """Return where the values come from that a function takes."""
        if does in (WRITE, FORM):
            return written if does == WRITE else ()
        given: Any = (args, *kwargs.values()) if kwargs else args
        if does == OVERWRITE:
            given = given[1:]
        elif does == FIRST:
            given = args[:1]
        return tuple([self._source(t) for t in _tensors(given)])

    # Where a tensor came from.

    def _source(self, tensor: Tensor) -> int:
        node = tensor.grad_fn
        if node is not None:
            return self._of_node(node, tensor.output_nr, tensor)
        if tensor.requires_grad:
            return self._of_leaf(tensor)
        return self._of_plain(tensor)

    def _of_node(self, node: Any, output: int, tensor: Tensor | None = None) -> int:
        number = node._sequence_nr()
        known = self._known(node, number, output)
        if known is not None:
            return known
        if tensor is not None and "CheckpointFunction" in node.name():
            seen = self._plain.get(id(tensor))
            if seen is not None and seen[0]() is tensor:
                self._revive(number)
                self._by_number[number if not output else (number, output)] = seen[2]
                return seen[2]
        return self._walk(node, output)

    def _known(self, node: Any, number: int, output: int) -> int | None:
        if self._marks is not None and self._marks in node.metadata:
            marked: int = node.metadata[self._marks]
            return marked
        vertex = self._by_number.get((number, output) if output else number)
        if vertex is not None:
            return vertex
        span = self._spans[bisect_right(self._begins, number) - 1]
        return span.index if number < span.end else None

    def _walk(self, root: Any, output: int) -> int:
        """Make the vertices of a node and of those before it that have none yet."""
        stack = [(root, output)]
        while stack:
            node, place = stack[-1]
            number = node._sequence_nr()
            if self._known(node, number, place) is not None:
                stack.pop()
                continue
            todo = [
                (following, index)
                for following, index in node.next_functions
                if following is not None and self._of_following(following, index) is None
            ]
            if todo:
                stack.extend(todo)
                continue
            stack.pop()
            self._add_node(node, number, place)
        vertex = self._known(root, root._sequence_nr(), output)
        assert vertex is not None
        return vertex

    def _of_following(self, node: Any, output: int) -> int | None:
        number = node._sequence_nr()
        if number == _ACCUMULATES:
            return self._of_leaf(node.variable)
        if number < self._first and number not in self._by_number and self._marks is None:
            self._by_number[number] = self._add(Kind.UNKNOWN, "made before the run", live=True)
        return self._known(node, number, output)

    def _add_node(self, node: Any, number: int, output: int) -> None:
        following = node.next_functions
        operands = [self._of_following(f, index) for f, index in following if f is not None]
        known = [operand for operand in operands if operand is not None]
        first_cut = len(known)
        function = self._function_of(number)
        if function is not None and (len(operands) < len(following) or number == function[1] - 1):
            known += function[4]
        name = snake_case(operation(node))
        vertex = self._add(
            Kind.OPERATION,
            f"{name}[{output}]" if output else name,
            tuple(known),
            first_cut=first_cut,
            live=True,
            call=self._call_of(number) if function is None else function[2],
            place=None if function is None else function[3],
        )
        self._by_number[(number, output) if output else number] = vertex

    def _function_of(
        self, number: int
    ) -> tuple[int, int, int, Place | None, tuple[int, ...]] | None:
        place = bisect_right(self._function_ends, number)
        if place < len(self._functions) and self._functions[place][0] <= number:
            return self._functions[place]
        return None

    def _call_of(self, number: int) -> int:
        """Return the innermost call in which the node with a number was made."""
        place = bisect_right(self._calls, number, key=lambda call: call.begin) - 1
        while place >= 0:
            call = self._calls[place]
            if call.end < 0 or number < call.end:
                return place
            place = call.parent
        return -1

    def _of_leaf(self, tensor: Tensor) -> int:
        key = id(tensor)
        vertex = self._source_vertices.get(key)
        if vertex is not None:
            return vertex
        if not self._is_named(key):
            return self._of_stranger(tensor)
        source = self._sources[key]
        name = ".".join(part for part in source[1] if part)
        vertex = self._add(source[0], name, live=tensor.requires_grad)
        self._source_vertices[key] = vertex
        return vertex

    def _of_stranger(self, tensor: Tensor) -> int:
        """Return the vertex of a tensor that nothing showed being made."""
        seen = self._plain.get(id(tensor))
        if seen is not None and seen[0]() is tensor:
            return self._made_leaf(tensor, seen[2]) if tensor.requires_grad else seen[2]
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return self._source(torch._C._functorch.get_unwrapped(tensor))
        shared, live = self._exports.of_memory(tensor), tensor.requires_grad
        if shared is not None:  # such as a parameter made of what was detached
            vertex = self._add(Kind.OPERATION, "alias", (shared,), live=live)
        elif guessed := self._guessed(None):
            vertex = self._add(Kind.OPERATION, "tensor", guessed, live=live)
        else:
            vertex = self._of_unseen(live)
        self._remember(tensor, vertex)
        return vertex

    def _made_leaf(self, tensor: Tensor, vertex: int) -> int:
        """Return the vertex of what was computed and then told to require gradients."""
        if self._rows[vertex].live:
            return vertex
        vertex = self._add(Kind.OPERATION, "requires_grad", (vertex,), live=True)
        self._remember(tensor, vertex)
        return vertex

    def _of_unseen(self, live: bool) -> int:
        """Return the vertex of a tensor that may come of all that its call has been given and made.

        Outside of the model, and where it has a gradient of its own, it is the user's own.
        """
        around = self._running[-1]
        if live or around.number < 0:
            return self._add(Kind.UNKNOWN, "tensor", live=live)
        before, since = self._unseen.get(around.number, (around.inputs, around.number + 1))
        inside = (output for call in self._calls[since:] for output in call.outputs)
        vertex = self._add(Kind.UNKNOWN, "tensor", tuple(dict.fromkeys((*before, *inside))))
        self._unseen[around.number] = (vertex,), len(self._calls)
        self._note(
            f"a tensor inside {around.name or around.type_name!r} was made where nothing shows it "
            "(by a script, vmap, compiled code or in another module): it may come of all before it"
        )
        return vertex

    def _is_named(self, key: int) -> bool:
        """Go on through what has names until the one that is asked for."""
        if key in self._sources:
            return True
        for source in self._unnamed:
            self._sources.setdefault(id(source[2]), source)
            if id(source[2]) == key:
                return True
        return False

    def _of_plain(self, tensor: Tensor) -> int:
        seen = self._plain.get(id(tensor))
        if seen is not None and seen[0]() is tensor and seen[1] == version(tensor):
            return seen[2]
        base = None if tensor.is_inference() else tensor._base
        if base is not None and not self._is_named(id(tensor)):
            return self._source(base)
        if seen is not None and seen[0]() is tensor:
            return seen[2]  # written to where nothing was seen
        return self._of_leaf(tensor)

    # Rows.

    def _complete(
        self, call: OpenCall, tensors: list[Tensor], is_one_vertex: bool, end: int
    ) -> None:
        call.end = end
        self._end_inside(call)
        try:
            if is_one_vertex:
                self._add_call(call, tensors)
            else:
                call.outputs = tuple([self._source(tensor) for tensor in tensors])
        except Exception as error:  # noqa: BLE001 - ours
            self._fail(error)
        if self._running[-1] is call:
            self._running.pop()

    def _end_inside(self, call: OpenCall) -> None:
        """End the calls inside one that an exception ended without a word to us."""
        running = self._running
        if call in running:
            while running[-1] is not call:
                running.pop().end = call.end

    def _add_call(self, call: OpenCall, tensors: list[Tensor]) -> None:
        call.index = self._next_vertex()
        self._rows.append(call)
        makes_nodes = call.end > call.begin
        if makes_nodes:
            while self._begins[-1] > call.begin:  # those of a call inside
                self._begins.pop()
                self._spans.pop()
            self._begins.append(call.begin)
            self._spans.append(call)
        outputs = []
        for tensor in tensors:
            if tensor.requires_grad:
                call.live = True
                outputs.append(call.index if makes_nodes else self._source(tensor))
                continue
            seen = self._plain.get(id(tensor))
            is_own = seen is None or seen[0]() is not tensor or seen[1] != version(tensor)
            if is_own and id(tensor) not in self._source_vertices:
                self._remember(tensor, call.index)
            outputs.append(self._of_plain(tensor))
        call.outputs = tuple(outputs)

    def _next_vertex(self) -> int:
        vertex = len(self._rows)
        if vertex >= MOST_VERTICES:
            raise _TooManyError
        return vertex

    def _add(
        self,
        kind: Kind,
        name: str,
        operands: tuple[int, ...] = (),
        *,
        first_cut: int = 0,
        live: bool = False,
        call: int | None = None,
        at: int = -1,
        place: Place | None = None,
    ) -> int:
        vertex = self._next_vertex()
        if call is None:
            call = self._running[-1].number
        row = _Row(kind, name, operands, first_cut, live, call)
        row.made_at, row.place = at, place
        self._rows.append(row)
        return vertex

    def _remember(self, tensor: Tensor, vertex: int) -> None:
        self._plain[id(tensor)] = (weakref.ref(tensor), version(tensor), vertex)

    def _revive(self, number: int) -> None:
        """Let gradients through what a reentrant checkpoint ran: no node was made inside."""
        for row in self._rows:
            if type(row) is _Row and row.made_at == number:
                row.first_cut, row.live = len(row.operands), True
            elif type(row) is OpenCall and row.begin == number == row.end:
                row.live = True

    def _is_here(self) -> bool:
        if get_ident() == self._thread:
            return True
        self._give_up("layers ran in several threads")
        return False

    def _note(self, text: str) -> None:
        self._notes[text] = None

    def _fail(self, error: Exception) -> None:
        if isinstance(error, _TooManyError):
            self._give_up(f"the run has more than {MOST_VERTICES:,} operations")
        else:
            self._give_up(f"an error in pytest-modelhealth: {type(error).__name__}: {error}")

    def _give_up(self, why: str) -> None:
        """Record no flow: one with a gap would deny ways that there are."""
        self.is_on = False
        self._note(f"not recorded: {why}")
        self._calls.clear()
        self._rows.clear()

    def _caller(self, frame: FrameType | None) -> Place | None:
        """Return the line of the user's code that made a call; a container's for torch's own."""
        return self._places.of(frame, self._running[-1].place)

    def _graph(self) -> Graph:
        vertices = tuple(row.vertex() for row in self._rows)
        last = list(range(len(self._calls)))
        for call in reversed(self._calls):
            if call.parent >= 0:
                last[call.parent] = max(last[call.parent], last[call.number])
        calls = [
            Call(
                layer=call.name,
                type_name=call.type_name,
                parent=call.parent,
                last=last[call.number],
                inputs=call.inputs,
                outputs=call.outputs,
                line=line_of(call.place),
            )
            for call in self._calls
        ]
        return Graph(vertices, tuple(calls), self._outputs, self._loss, tuple(self._notes))


def _is_elsewhere(tensor: Tensor) -> bool:
    """Whether the backward pass of a tensor runs in a thread of its device."""
    return not tensor.is_cpu


class _TooManyError(Exception):
    """There is more than is worth remembering."""


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


def _keeps_all(whole: Tensor, taken: Tensor) -> bool:
    """Whether indexing took all values, once each: ``x[:, None]``."""
    return taken.numel() == whole.numel() and not taken.is_inference() and taken._base is not None
