"""TorchScript that was frozen, or inlined: one graph, in which each node knows its layer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from pytest_modelhealth.capture.engine import Engine, Request
from pytest_modelhealth.capture.torchscript.reading import is_inlined
from pytest_modelhealth.capture.transcript.stand_ins import StandInModel, run_program
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report import Observation

_NOTE = "layers are seen in a run of a copy of the script's graph"
_NO_GRADIENTS = "a frozen script has constants in the place of parameters, without gradients"


class FrozenEngine(Engine):
    """Scripts and traces that were frozen, optimised for inference, or inlined."""

    precedence = 2
    runs_in_torch: ClassVar[bool] = False
    why_not_measured: ClassVar[str] = (
        "the costs of a frozen script are not measured, as it calls no hooks that would tell its "
        "layers apart; the module that it was made of has them"
    )

    def supports(self, model: object) -> bool:
        """Whether `model` is a script without calls of layers."""
        if not isinstance(model, torch.jit.ScriptModule):
            return False
        script: Any = model
        return script._c._has_method("forward") and is_inlined(script)

    def load(self, model: Any) -> StandInModel:
        """Return stand-ins for the layers of a frozen script."""
        from pytest_modelhealth.capture.torchscript.runtime import InlinedScript

        return StandInModel(InlinedScript(model))

    def run(self, request: Request) -> Observation:
        """Run the batch through a copy of the graph, and play back what it computed.

        Raises:
            InspectionError: a backward pass is demanded.
        """
        if request.backward:
            raise InspectionError(
                f"{_NO_GRADIENTS}; leave backward out, or inspect the module that it was made of"
            )
        runtime = request.model.runtime
        note = f"{_NOTE}; {_NO_GRADIENTS}" if runtime.is_frozen else _NOTE
        return run_program(request, request.model, [note, *_notes_on_names(runtime.nameless)])


def _notes_on_names(nameless: list[str]) -> list[str]:
    """Return what to say of layers that have no name in the script."""
    if not nameless:
        return []
    shown = ", ".join(nameless[:3]) + (", ..." if len(nameless) > 3 else "")
    return [
        (
            f"the script does not tell the names of {len(nameless)} of its layers, which are named "
            f"after what they compute: {shown}"
        )
    ]
