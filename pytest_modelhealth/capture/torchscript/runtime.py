"""Runs a script whose layers were inlined, with every value shown."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.jit._fuser import optimized_execution

from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.torchscript.naming import name_layers
from pytest_modelhealth.capture.torchscript.reading import read
from pytest_modelhealth.capture.torchscript.recording import Shower, recording
from pytest_modelhealth.capture.torchscript.retelling import Prospect, Retelling
from pytest_modelhealth.capture.transcript.program import Program, Runtime
from pytest_modelhealth.errors import InspectionError

_MANGLED = re.compile(r"^__torch__\.|___torch_mangle_\d+\.")


class InlinedScript(Runtime):
    """A script that holds the code of all its layers in one graph.

    A copy of the graph runs, with the script's own optimisations in it and none made on the way.

    Args:
        script: the script, which is left alone.
    """

    def __init__(self, script: Any) -> None:
        self._script = script
        graph = script.graph.copy()
        torch._C._jit_pass_inline(graph)
        self._graph = read(graph, script)
        self._naming = name_layers(self._graph)
        self._shower = Shower(graph, self._graph)
        self._function = torch._C._create_function_from_graph("forward", graph)
        prospect = Prospect(self._graph, self._naming, self._shower)
        for value in self._given:
            prospect.take_input(value, torch.empty(0))
        self._program = self._told(prospect, tuple(value.name for value in self._given))
        self._ran = self._program

    @property
    def program(self) -> Program:
        """All that the graph may run."""
        return self._program

    @property
    def ran(self) -> Program:
        """What the last batch ran."""
        return self._ran

    @property
    def nameless(self) -> list[str]:
        """The layers whose names are made up, since the graph keeps none."""
        return self._naming.nameless

    @property
    def is_frozen(self) -> bool:
        """Whether it holds constants in the place of parameters."""
        return not any(True for _ in self._script.parameters())

    @property
    def _given(self) -> tuple[Any, ...]:
        return self._graph.body.inputs[1:]

    def _told(self, retelling: Prospect | Retelling, inputs: tuple[str, ...]) -> Program:
        outputs = retelling.names(retelling.run(self._graph.body))
        return Program(
            type_name=_MANGLED.sub("", self._script._c._type().qualified_name()),
            nodes=tuple(retelling.nodes),
            inputs=inputs,
            outputs=outputs,
            parameters=self._naming.parameters,
            buffers=self._naming.buffers,
            opaque=self._naming.opaque,
            training=frozenset(self._naming.training),
        )

    def execute(self, inputs: Inputs) -> tuple[Mapping[str, Tensor], Any]:
        """Run a batch.

        Raises:
            InspectionError: the batch does not fill the inputs.
            Exception: whatever the script raises.
        """
        given = _bound(self._script.forward.schema, inputs)
        clock = torch.zeros((), dtype=torch.int64)
        with recording(self._shower.showings) as events:
            retelling = Retelling(self._graph, self._naming, self._shower, events)
            for value, argument in zip(self._given, given, strict=True):
                retelling.take_input(value, argument)
            with optimized_execution(False):
                output = self._function(copy.deepcopy(self._script), *given, clock)
        self._ran = self._told(retelling, tuple(retelling.values))
        return retelling.values, output


def _bound(schema: Any, inputs: Inputs) -> list[Any]:
    """Return the arguments of a call in the order of the script's inputs.

    Raises:
        InspectionError: one is missing, or there is one too many.
    """
    expected = schema.arguments[1:]
    keywords = dict(inputs.kwargs)
    names = [argument.name for argument in expected]
    if len(inputs.args) > len(expected) or not keywords.keys() <= set(names[len(inputs.args) :]):
        raise InspectionError(_misfit(inputs, names))
    bound = list(inputs.args)
    for argument in expected[len(bound) :]:
        if argument.name in keywords:
            bound.append(keywords[argument.name])
        elif argument.has_default_value():
            bound.append(argument.default_value)
        else:
            raise InspectionError(_misfit(inputs, names))
    return bound


def _misfit(inputs: Inputs, names: list[str]) -> str:
    return (
        f"the batch gives the script {len(inputs.args)} positional inputs and the keywords "
        f"{sorted(inputs.kwargs)}, and it takes: {', '.join(names)}"
    )
