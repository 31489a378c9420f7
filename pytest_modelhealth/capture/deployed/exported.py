"""`torch.export.ExportedProgram`: unflattened, so that its layers are modules again."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from torch import fx, nn

from pytest_modelhealth.capture.eager import EagerEngine
from pytest_modelhealth.capture.engine import Request
from pytest_modelhealth.capture.step.run import Watch, run_step
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report import Observation

if TYPE_CHECKING:
    from torch.export import ExportedProgram


class ExportedEngine(EagerEngine):
    """Exported programs, run as modules once they are unflattened."""

    files: ClassVar[str] = "exported programs (*.pt2)"

    def __init__(self) -> None:
        self._unflattened: WeakKeyDictionary[ExportedProgram, nn.Module] = WeakKeyDictionary()

    def supports(self, model: object) -> bool:
        """Whether `model` came out of `torch.export`, or is a path to a file that did."""
        return type(model).__name__ == "ExportedProgram" or _is_file(model)

    def load(self, model: Any) -> Any:
        """Return the program that lies in a file.

        Raises:
            InspectionError: there are several, or it cannot be loaded.
        """
        if not _is_file(model):
            return model
        import torch.export

        if not Path(model).exists():
            raise InspectionError(f"there is no file {str(model)!r}")
        try:
            return torch.export.load(model)
        except Exception as error:
            said = " ".join(str(error).split()) or type(error).__name__
            raise InspectionError(
                f"torch {torch.__version__} cannot load the exported program in {str(model)!r}: "
                f"{said}; it must be one that torch.export.save wrote"
            ) from error

    def module(self, model: Any) -> nn.Module:
        """Return the program's modules, with copies of its parameters and buffers."""
        if model not in self._unflattened:
            from torch.export import unflatten

            unflattened: Any = unflatten(_without_aliases(model))
            # torch 2.8 names the classes of the layers alone
            stacks = (node.meta.get("nn_module_stack") or {} for node in model.graph.nodes)
            classes = (kind for stack in stacks for path, kind in stack.values() if not path)
            unflattened._ty = next(classes, None)
            for module in unflattened.modules():  # torch leaves some of several names unfinished
                if "graph" in vars(module) and "graph_module" not in vars(module):
                    module.finalize()
            _set_modes(unflattened, model.graph.nodes)
            self._unflattened[model] = unflattened
        return self._unflattened[model]

    def _run(self, request: Request, watch: Watch) -> Observation:
        return run_step(request, self.module(request.model), [], watch)


def _is_file(model: object) -> bool:
    return isinstance(model, str | Path) and Path(model).suffix == ".pt2"


def _without_aliases(program: ExportedProgram) -> ExportedProgram:
    """Return the program, where no layer hands on its own input as if it had computed it.

    A cast to the dtype that a tensor has gives the tensor itself, and the exporter lets all that
    follows read the cast: of a norm that casts its input, the residual sum would.
    """
    if not any(map(_is_idle_cast, program.graph.nodes)):
        return program
    plain = copy.copy(program)
    plain._graph_module = copy.deepcopy(program.graph_module)
    for node in filter(_is_idle_cast, reversed(plain.graph.nodes)):
        layer = _layers(node)[-1:]
        for user in list(node.users):
            if user.op != "output" and layer and layer[0] not in _layers(user):
                user.replace_input_with(node, node.args[0])
    return plain


def _is_idle_cast(node: fx.Node) -> bool:
    """Whether a node casts a tensor to the dtype and device that it has, and so does nothing."""
    if str(node.target) not in ("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device"):
        return False
    source: Any = node.args[0]
    given, made = source.meta.get("val"), node.meta.get("val")
    copies = node.kwargs.get("copy", False) or True in node.args[3:]
    if copies or given is None or made is None:
        return False
    return bool(given.dtype == made.dtype and given.device == made.device)


def _layers(node: fx.Node) -> list[str]:
    """Return the keys of the calls of modules that a node is in, the outermost first."""
    return list(node.meta.get("nn_module_stack") or ())


def _set_modes(model: nn.Module, nodes: Iterable[fx.Node]) -> None:
    """Let the modules of a program be in the mode that it was exported in, as far as it is known.

    A program has no mode: its operators say of themselves whether they train, and of a module
    without such operators `training` is ``None``.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    for module in modules.values():
        module.training = None
    for node in nodes:
        trains = _trains(node)
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            if trains is not None and path in modules:
                modules[path].training = bool(modules[path].training) or trains


def _trains(node: fx.Node) -> bool | None:
    """Return whether an operator computes what it does in training mode; ``None`` for most."""
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    for place, argument in enumerate(arguments):
        if argument.name in ("train", "training"):
            given = node.args[place] if place < len(node.args) else argument.default_value
            return bool(node.kwargs.get(argument.name, given))
    return False if "no_training" in str(node.target) else None
