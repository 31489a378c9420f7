"""`FlowRecorder`: is told of calls of layers and functions while a model runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.flow.functions import (
    SKIP,
    WRITE,
    FunctionCall,
    Functions,
    tensors,
    treatment,
)
from pytest_modelhealth.capture.observing.flow.origins import Origins, Source
from pytest_modelhealth.capture.observing.flow.rows import (
    OpenCall,
    Rows,
    TooManyError,
    counter,
    place_of,
)
from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.report.flow import Flow, Graph, Kind


class FlowRecorder:
    """The vertices and calls of one run.

    An error of ours here costs the flow and is noted; it never reaches the user.
    """

    def __init__(self) -> None:
        self._rows = Rows()
        self._origins = Origins(self._rows)
        self._functions = Functions(self._rows, self._origins)
        self._treatments: dict[Any, int] = {}
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

    def enter(self, layer: Layer, given: list[Tensor]) -> OpenCall | None:
        """Begin a call of a layer; our own caller has turned functions of torch off."""
        if not self._records():
            return None
        rows = self._rows
        around = rows.running[-1]
        call = OpenCall(layer.name, layer.type_name, len(rows.calls), around.number)
        try:
            # Before the counter is read: the node of a view may be made only now.
            call.inputs = self._origins.of_all(given)
            # that of a hook of ours, or of whatever else of ours sees the call
            call.place = place_of(sys._getframe(4), around.place)
        except Exception as error:  # noqa: BLE001 - ours
            self._fail(error)
        if not self.is_on:
            return None
        rows.calls.append(call)
        rows.running.append(call)
        call.begin = counter()
        return call

    def complete(self, call: OpenCall | None, returned: list[Tensor], is_one_vertex: bool) -> None:
        """End a call, which returned these tensors; none, where it raised and the model caught it.

        Args:
            call: what `enter` returned.
            returned: what the layer returned.
            is_one_vertex: whether nothing inside was seen: it is one of torch's own layers, or a
                function.
        """
        if call is None or not self._records():
            return
        running, call.end = self._rows.running, counter()
        if call in running:
            while running[-1] is not call:  # an exception ended it without a word to us
                running.pop().end = call.end
        try:
            if is_one_vertex:
                self._origins.add_call(call, returned)
            else:
                call.outputs = self._origins.of_all(returned)
        except Exception as error:  # noqa: BLE001 - ours
            self._fail(error)
        if running[-1] is call:
            running.pop()

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
            self._outputs = self._origins.of_all(outputs)
            if loss is not None:
                self._loss = self._origins.of(loss) if is_given else self._projection(loss)
            self._origins.add_what_was_read()
        except Exception as error:  # noqa: BLE001 - ours
            self._fail(error)
        self.is_on = False
        self._origins.forget()

    def _projection(self, loss: Tensor) -> int:
        outputs = self._outputs
        live = tuple(v for v in outputs if self._rows.is_live(v)) or outputs
        first_cut = len(live) if loss.requires_grad else 0
        name = "random projection"
        return self._rows.add(
            Kind.OPERATION, name, live, first_cut=first_cut, live=loss.requires_grad
        )

    def run_function(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Make a call of a function of torch, and return what it returns."""
        does = self._treatments.get(function)
        if does is None:
            does = self._treatments[function] = treatment(function)
        if does == SKIP or not self.is_on:
            return function(*args, **kwargs)
        written: tuple[int, ...] = ()
        if does == WRITE:
            written = self._written(args)
        begin = counter()
        result = function(*args, **kwargs)
        if self._is_here():
            call = FunctionCall(function, does, args, kwargs, result, begin, written)
            try:
                with torch._C.DisableTorchFunction():
                    self._functions.see(call)
            except Exception as error:  # noqa: BLE001 - ours
                self._fail(error)
        return result

    def _written(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Return where the plain values come from that a function is about to write over."""
        try:
            with torch._C.DisableTorchFunction():
                return self._origins.of_all([t for t in tensors(args) if not t.requires_grad])
        except Exception as error:  # noqa: BLE001 - ours
            self._fail(error)
            return ()

    def line_of_leaf(self, leaf: Tensor) -> str:
        """Return the line that first uses a leaf, or what was made of it; ``""`` if unknown."""
        vertex = self._origins.leaves.get(id(leaf), self._origins.earlier)
        return "" if vertex is None else self._rows.line_after(vertex)

    @property
    def has_own_functions(self) -> bool:
        """Whether a custom `torch.autograd.Function` of the user's was seen."""
        return bool(self._rows.own_functions)

    def flow(self) -> Flow:
        """Return what was recorded, as a graph that is made when somebody asks."""
        return Flow(self._graph)

    def _graph(self) -> Graph:
        return self._rows.graph(self._outputs, self._loss)

    def _records(self) -> bool:
        return self.is_on and (get_ident() == self._thread or self._is_here())

    def _is_here(self) -> bool:
        if get_ident() != self._thread:
            self._give_up("layers ran in several threads")
        return get_ident() == self._thread

    def _fail(self, error: Exception) -> None:
        is_full = isinstance(error, TooManyError)
        why = f"an error in pytest-modelhealth: {type(error).__name__}: {error}"
        self._give_up(str(error) if is_full else why)

    def _give_up(self, why: str) -> None:
        """Record no flow: one with a gap would deny ways that there are."""
        self.is_on = False
        self._rows.notes[f"not recorded: {why}"] = None
        self._rows.clear()
