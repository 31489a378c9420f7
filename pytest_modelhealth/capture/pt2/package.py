"""Runs a package that AOTInductor compiled: a library that gives nothing but outputs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.pt2.archive import archive_of, is_pt2, only_model
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.transcript.program import Program, Runtime
from pytest_modelhealth.errors import InspectionError

WHY_OPAQUE = "AOTInductor compiled it into a library, which gives the outputs of the model alone"


class PackageRuntime(Runtime):
    """A package that AOTInductor compiled.

    Args:
        model: the package, loaded or a file.

    Raises:
        InspectionError: there is no such file, or it holds nothing that can be run.
    """

    def __init__(self, model: Any) -> None:
        is_file = is_pt2(model)
        self._model = _loaded(model) if is_file else model
        self._checks_inputs = is_file  # the library keeps to it from its first run on

    @cached_property
    def program(self) -> Program:
        """Its layers, as far as they have constants that the compiler kept under their names."""
        names = sorted(self._model.get_constant_fqns())
        layers = {name.rpartition(".")[0]: WHY_OPAQUE for name in names if "." in name}
        return Program("AOTInductor package", (), (), (), opaque=layers)

    def execute(self, inputs: Inputs) -> tuple[Mapping[str, Tensor], Any]:
        """Run a batch; there are no values inside."""
        self._refuse_others(inputs)
        with _checked_inputs() if self._checks_inputs else nullcontext():
            return {}, self._model(*inputs.args, **inputs.kwargs)

    def _refuse_others(self, inputs: Inputs) -> None:
        """Do nothing if a batch has the form that was compiled; the library itself may not look.

        Raises:
            InspectionError: it has another, or lies on another device.
        """
        form = pytree.treespec_loads(self._model.loader.get_call_spec()[0])
        args, kwargs = pytree.tree_unflatten([None] * form.num_leaves, form)
        if set(inputs.kwargs) != set(kwargs) or len(inputs.args) != len(args):
            raise InspectionError(
                f"the package was compiled for {_call(args, kwargs)}, and the batch is "
                f"{_call(inputs.args, inputs.kwargs)}"
            )
        count = len(pytree.tree_leaves((inputs.args, inputs.kwargs)))
        if count != form.num_leaves:
            raise InspectionError(
                f"the package was compiled for {form.num_leaves} values nested in its arguments, "
                f"and the batch has {count}"
            )
        device = self._model.get_metadata().get("AOTI_DEVICE_KEY", "")
        given = {tensor.device.type for tensor in find_tensors((inputs.args, inputs.kwargs))}
        if device and given - {device}:
            raise InspectionError(
                f"the package was compiled for {device!r}, and the batch lies on "
                f"{', '.join(sorted(given))!r}: move it there"
            )


@contextmanager
def _checked_inputs() -> Iterator[None]:
    """Let a library check dtypes and shapes: it reads other memory where they are wrong."""
    before = os.environ.get(_CHECK)
    os.environ[_CHECK] = before or "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_CHECK]


_CHECK = "AOTI_RUNTIME_CHECK_INPUTS"


def _call(args: Sequence[Any], kwargs: Iterable[str]) -> str:
    positional = f"{len(args)} positional argument{'' if len(args) == 1 else 's'}"
    return " and ".join([positional, *(f"{name}=" for name in kwargs)])


def is_package(model: object) -> bool:
    """Whether `model` is a package of AOTInductor, loaded."""
    kind = type(model)
    return kind.__name__ == "AOTICompiledModel" and kind.__module__.startswith("torch.")


def _loaded(path: Any) -> Any:
    """Return the package that lies in a file.

    Raises:
        InspectionError: there is no such file, it holds no model or several, or it was compiled for
            another machine or version of torch.
    """
    from torch.export.pt2_archive._package import load_pt2

    if not Path(path).is_file():
        raise InspectionError(f"there is no file {str(path)!r}")
    packages = archive_of(path).packages
    if not packages:
        raise InspectionError(
            f"{str(path)!r} holds no model: it must be written by torch.export.save or by "
            "torch._inductor.aoti_compile_and_package"
        )
    name = only_model(path, packages, "aoti_runners")
    try:
        return load_pt2(str(path)).aoti_runners[name]
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise InspectionError(
            f"torch {torch.__version__} cannot load {str(path)!r}: {reason}; compile it anew with "
            "this torch, on this kind of machine"
        ) from error
