"""What a run without the engine gives: the independent truth that inspections are held against."""

from __future__ import annotations

import dataclasses
import io
import pickle
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from corpus.models.hooked import Case, make, seeded
from pytest_modelhealth import Inspector
from pytest_modelhealth.capture import Inputs, Request, find_engine
from pytest_modelhealth.report import HealthReport, Observation, Status
from pytest_modelhealth.statistics import TensorStatistics

RUN_SEED = 7


class _Finder(pickle.Pickler):
    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.found: dict[int, Tensor] = {}

    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, Tensor):
            self.found.setdefault(id(value), value)
        return "skipped" if isinstance(value, Tensor | nn.Module) else None


def tensors_in(value: Any) -> list[Tensor]:
    """Return the distinct tensors in `value`: those that pickling it would come across."""
    finder = _Finder()
    finder.dump(value)
    return list(finder.found.values())


def numbers(tensors: Iterable[Tensor]) -> np.ndarray:
    """Return every real number in the floating-point tensors, as float64."""
    parts = [np.empty(0)]
    for tensor in tensors:
        tensor = tensor.detach()
        if tensor.is_sparse:
            tensor = tensor.to_dense()
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        if tensor.is_nested:
            tensor = torch.cat([row.reshape(-1) for row in tensor.unbind()])
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.is_floating_point() and not tensor.is_meta:
            parts.append(tensor.double().numpy().ravel().copy())
    return np.concatenate(parts)


def assert_statistics(statistics: TensorStatistics | None, values: np.ndarray, what: str) -> None:
    """Do nothing if the statistics are those of the values, computed by NumPy."""
    if statistics is None:
        assert not len(values), f"{what}: nothing was seen, but there are {len(values)} numbers"
        return
    assert statistics.count == len(values), what
    if len(values):
        expected = [values.mean(), values.std(), values.min(), values.max()]
        seen = [statistics.mean, statistics.std, statistics.min, statistics.max]
        rounding = 1e-12 * max(1.0, float(abs(values).max()))
        np.testing.assert_allclose(seen, expected, rtol=1e-9, atol=rounding, err_msg=what)
        assert statistics.zero_count == np.count_nonzero(values == 0), what


def projection(output: Any) -> Tensor:
    """A loss that depends on every floating-point number of the output."""
    total = torch.zeros(())
    for tensor in tensors_in(output):
        if tensor.is_nested:
            tensor = tensor.values()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.is_floating_point():
            weights = torch.arange(1.0, tensor.numel() + 1).sin().reshape(tensor.shape)
            total = total + (tensor.float() * weights).sum()
    return total


@dataclass
class Run:
    """What one forward and backward gave, bit for bit.

    Args:
        output: bytes of every tensor of the output.
        loss: bytes of the loss.
        gradients: bytes of the gradient of each parameter that got one, by its position.
        buffers: bytes of each buffer after the forward, by name.
    """

    output: list[bytes]
    loss: bytes
    gradients: dict[int, bytes]
    buffers: dict[str, bytes]


def raw(tensor: Tensor | None) -> bytes:
    """Return a tensor's values as bytes; ``b""`` where it has none to show."""
    if tensor is None or is_lazy(tensor) or tensor.is_meta:
        return b""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.is_sparse or tensor.is_nested:
        return numbers([tensor]).tobytes()
    # a copy, because memory that NumPy has seen cannot be resized
    return tensor.clone().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Recorded:
    """A loss and a backward that keep what they were given, for bare and inspected runs alike."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.run = Run([], b"", {}, {})

    def loss(self, output: Any) -> Tensor:
        self.run.output = [raw(tensor) for tensor in tensors_in(output)]
        self.run.buffers = {name: raw(buffer) for name, buffer in self.model.named_buffers()}
        value = projection(output)
        self.run.loss = raw(value)
        return value

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.run.gradients = {
            index: raw(parameter.grad)
            for index, parameter in enumerate(self.model.parameters())
            if parameter.grad is not None
        }


def call(model: nn.Module, batch: Any) -> Any:
    """Call a model as the documentation says a batch goes in."""
    if isinstance(batch, Inputs):
        return model(*batch.args, **batch.kwargs)
    return model(**batch) if isinstance(batch, dict) else model(batch)


def bare_run(case: Case, model: nn.Module, batch: Any) -> Run:
    """Run without the engine, on gradients set to none."""
    recorded = Recorded(model)
    for leaf in [*model.parameters(), *tensors_in(batch)]:
        leaf.grad = None
    seeded(RUN_SEED)
    with case.context():
        loss = recorded.loss(call(model, batch))
        if loss.requires_grad:
            recorded.backward(loss)
    return recorded.run


def inspect(case: Case, model: nn.Module, batch: Any, **options: Any) -> Observation:
    """Run one inspection on the seed that every run here starts from."""
    seeded(RUN_SEED)
    with case.context():
        request = Request(model, batch, **{"loss": projection} | options)
        return find_engine(model).run(request)


def report_of(model: nn.Module, batch: Any, **options: Any) -> HealthReport:
    """Return the report of an inspection without an error of ours."""
    inspector = Inspector(model)
    report = inspector.run_inspection(batch, **{"loss": projection} | options)
    assert report.observation.errors == ()
    return report


def assert_alike(report: HealthReport, expected: HealthReport, tolerance: float = 0.0) -> None:
    """Do nothing if a report has the modules of another, in their order, with their numbers.

    Functional layers are seen in both, or in the other alone.
    """
    layers = [layer for layer in expected if layer.name in report.layers or not layer.functional]
    assert list(report.layers) == [layer.name for layer in layers]
    for layer in layers:
        seen = report[layer.name]
        assert (seen.type_name, seen.status, seen.calls) == (
            *(layer.type_name, layer.status, layer.calls),
        )
        for role in ("inputs", "activations", "gradients"):
            ours, theirs = seen.statistics(role), layer.statistics(role)
            assert ours.count == theirs.count
            values = [theirs.mean, theirs.std, theirs.abs_max]
            assert [ours.mean, ours.std, ours.abs_max] == pytest.approx(values, abs=tolerance)
        assert seen.parameter_gradients.keys() == layer.parameter_gradients.keys()
    order = sorted(report, key=lambda layer: layer.completed)
    in_order = sorted(layers, key=lambda layer: layer.completed)
    assert [layer.name for layer in order] == [layer.name for layer in in_order]


# ---- the state of a model ----------------------------------------------------------------------


def fingerprint(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return all that an inspection must leave as it was, in comparable form.

    Objects are kept by identity (the object stays referred to here, so none can be mistaken for
    another), tensors by identity and bytes.
    """
    state: dict[str, Any] = {
        "torch": raw(torch.get_rng_state()),
        "python": random.getstate(),
        "numpy": repr(np.random.get_state()),
        "pickle": _pickled(model),
        "batch": [_leaf(tensor) for tensor in tensors_in(batch)],
    }
    for name, module in model.named_modules(remove_duplicate=False):
        for attribute, value in vars(module).items():
            state[f"{name}:{attribute}"] = frozen(value)
    return state


def frozen(value: Any) -> Any:
    """Return a value in comparable form, as `fingerprint` has it."""
    if isinstance(value, Tensor):
        return _leaf(value)
    if isinstance(value, dict):
        return [(key, frozen(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | set):
        return [frozen(item) for item in value]
    if isinstance(value, torch.Generator):
        return raw(value.get_state())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return Same(value)


def _leaf(tensor: Tensor) -> Any:
    gradient = tensor.grad if tensor.is_leaf and not is_lazy(tensor) else None
    return (
        *(Same(tensor), raw(tensor), tensor.requires_grad),
        *(Same(gradient), raw(gradient)),
        *(Same(hooks) for hooks in _hooks(tensor)),
    )


def _hooks(tensor: Tensor) -> list[Any]:
    kept = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    return [hook for hooks in kept for hook in (hooks or {}).values()]


class Same:
    """Equal only to another one of the very same object; atoms by value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return False
        atom = isinstance(self.value, int | float | str | bytes)
        return self.value is other.value or (atom and self.value == other.value)

    __hash__ = None

    def __repr__(self) -> str:
        return f"{type(self.value).__name__} at {id(self.value):#x}"


def _pickled(model: nn.Module) -> bytes | str:
    if any(isinstance(v, torch.Generator) for m in model.modules() for v in vars(m).values()):
        return "differs each time: a generator's state is pickled from memory that is elsewhere"
    try:
        return pickle.dumps(model)
    except Exception as error:  # noqa: BLE001 - a compiled model, say: it must fail alike later
        return type(error).__name__


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return what differs between two fingerprints, by name."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


# ---- activations and their gradients -----------------------------------------------------------


def reference_model(case: Case) -> tuple[nn.Module, Any]:
    """Return the case's model, in the form that plain hooks see, and the batch."""
    return make(dataclasses.replace(case, build=case.reference or case.build))


def activations(case: Case) -> dict[str, np.ndarray]:
    """Return what each layer returned, cloned by a hook of our own, over all its calls."""
    model, batch = reference_model(case)
    seen: dict[str, list[np.ndarray]] = {}
    in_forward = [True]

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if in_forward and module in hooked and not _is_wrapped(output):
                seen.setdefault(name, []).append(numbers(tensors_in(output)))

        return hook

    _hook_all(model, look)
    hooked = set(model.modules())  # a deep copy made in the forward is no layer of the model
    seeded(RUN_SEED)
    with case.context():
        projection(call(model, batch))
        in_forward.clear()
    return {name: np.concatenate(parts) for name, parts in seen.items()}


def gradients_by_eps(case: Case) -> dict[str, np.ndarray | None]:
    """Return the gradient of the loss with respect to each layer's output, by brute force.

    A zero that requires a gradient is added to everything that a layer returns; its gradient is
    the one with respect to the output. ``None`` where no gradient came back. In a big model only
    layers that return one tensor are looked at: the parts of a container often depend on each
    other, and what a hook sees of a tensor is its whole gradient.
    """
    model, batch = reference_model(case)
    epsilons: dict[str, list[Tensor]] = {}

    def look(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if case.statuses is None and not isinstance(output, Tensor):
                return None

            def plus_zero(value: Any) -> Any:
                if not (isinstance(value, Tensor) and value.requires_grad):
                    return value
                with torch.autocast("cpu", enabled=False):
                    epsilon = torch.zeros_like(value, requires_grad=True)
                    epsilons.setdefault(name, []).append(epsilon)
                    return value + epsilon

            return pytree.tree_map(plus_zero, output)

        return hook

    _hook_all(model, look)
    seeded(RUN_SEED)
    with case.context():
        loss = projection(call(model, batch))
        if loss.requires_grad:
            loss.backward()
    return {
        name: numbers([e.grad for e in parts if e.grad is not None])
        if any(e.grad is not None for e in parts)
        else None
        for name, parts in epsilons.items()
    }


def _hook_all(model: nn.Module, look: Callable[[str], Callable[..., Any]]) -> None:
    for name, module in model.named_modules():
        # unbound, because a scripted module refuses its own
        nn.Module.register_forward_hook(module, look(name))


def _is_wrapped(output: Any) -> bool:
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return isinstance(output, Tensor) and is_wrapped(output)


# ---- an observation against these truths -------------------------------------------------------


def compare_activations(case: Case, observation: Observation) -> int:
    """Hold every layer's activations against clones; return how many layers were compared."""
    expected = activations(case)
    compared = 0
    for name, record in observation.layers.items():
        if record.functional or record.status is Status.OPAQUE:
            assert record.functional or record.activations is None
            continue
        if name not in expected:
            assert record.activations is None, name
            continue
        assert_statistics(record.activations, expected[name], f"activations of {name!r}")
        compared += 1
    return compared


def compare_gradients(case: Case, observation: Observation) -> int:
    """Hold gradients of activations against brute force; return how many layers were compared."""
    expected = gradients_by_eps(case)
    for layer, values in expected.items():
        record = observation.layers[layer]
        if record.status in (Status.ALIAS_OF_INPUT, Status.OPAQUE):
            assert record.gradients is None
        elif values is None:
            assert record.gradients is None, layer
        elif not len(values):
            assert record.gradients.count == 0
        else:
            assert record.gradients is not None, f"{layer}: {record.status}, {record.reason}"
            shared = record.gradients.count != len(values)
            assert not shared, f"{layer}: {record.gradients.count} of {len(values)}"
            _assert_close(record.gradients, values, layer)
    return len(expected)


def _assert_close(statistics: TensorStatistics, values: np.ndarray, what: str) -> None:
    """Do nothing if the statistics are those of the values up to the rounding of one addition."""
    seen = [statistics.mean, statistics.std, statistics.abs_max]
    expected = [values.mean(), values.std(), abs(values).max()]
    tolerance = 2e-2 if "bfloat16" in statistics.dtype else 1e-5
    scale = float(abs(values).max()) or 1.0
    assert seen == pytest.approx(expected, abs=tolerance * scale), what


def compare_parameter_gradients(case: Case, observation: Observation) -> int:
    """Hold each parameter's gradient against a bare backward's; return how many there are."""
    seen = {
        f"{name}.{own}".lstrip("."): statistics
        for name, record in observation.layers.items()
        for own, statistics in record.parameter_gradients.items()
    }
    bare, batch = reference_model(case)
    parameters = dict(bare.named_parameters())  # the forward may put others in their place
    for parameter in parameters.values():
        if parameter._post_accumulate_grad_hooks:
            parameter._post_accumulate_grad_hooks.clear()
    bare_run(case, bare, batch)
    expected = {
        name.replace("_orig_mod.", ""): numbers([parameter.grad])
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }
    assert seen.keys() == expected.keys()
    for name, values in expected.items():
        assert_statistics(seen[name], values, name)
    return len(expected)
