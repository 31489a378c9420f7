"""The peers on the same cases, each at what a competent user would ask of it.

What that is, is chosen in their favour: a check that would object to most healthy models is left
out. A plain exception counts as caught, since a test with it in fails too; on a control it is
counted apart from false alarms, as a case that the tool cannot run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from corpus.scoring import Finding
from corpus.subject import Subject, loss_of, run


def scalar_loss(subject: Subject) -> Callable[[Any], Tensor]:
    """Return the subject's loss as a function of the output.

    Where the subject leaves it to the inspector, it is what the inspector takes: the output's own
    loss, or a fixed random projection.
    """

    def loss(output: Any) -> Tensor:
        if subject.loss is not None:
            return loss_of(subject, output, subject.target)
        if getattr(output, "loss", None) is not None:
            return output.loss
        parts = [part for part in _tensors(output) if part.is_floating_point()]
        if len(parts) == 1 and parts[0].ndim == 0:
            return parts[0]
        generator = torch.Generator().manual_seed(0)
        return sum(
            (part.float() * torch.randn(part.shape, generator=generator)).mean() for part in parts
        )

    return loss


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _by_line(check: str, text: str, model: nn.Module) -> list[Finding]:
    """Return a finding for each line that names a parameter, or one of the whole text."""
    names = sorted((name for name, _ in model.named_parameters()), key=len, reverse=True)
    found = []
    for line in text.splitlines():
        name = next((name for name in names if line.strip(" -").startswith(f"{name}:")), None)
        if name is not None:
            found.append(Finding(name.rpartition(".")[0], check, text))
    return found or [Finding("", check, text)]


# ---- pytest-torch -------------------------------------------------------------------------------


def pytest_torch(subject: Subject) -> list[Finding]:
    from pytest_torch import assert_all_params_receive_grad, assert_gradients_finite

    found = []
    for check in (assert_gradients_finite, assert_all_params_receive_grad):
        try:
            check(subject.model, subject.inputs, scalar_loss(subject))
        except (AssertionError, RuntimeError) as error:
            found += _by_line(check.__name__, str(error), subject.model)
    return found + _contract(subject)


def _contract(subject: Subject) -> list[Finding]:
    """Ask for the inference contract where the model is in evaluation mode as a whole."""
    from pytest_torch import check_inference_contract

    if subject.model.training:
        return []
    asked = ["eval_mode", "finite_outputs", "deterministic"]
    try:
        check_inference_contract(subject.model, subject.inputs, checks=asked)
    except AssertionError as error:
        inside = re.search(r"\(e\.g\. ([\w.]+)", str(error))
        return [Finding(inside[1] if inside else "", "check_inference_contract", str(error))]
    return []


def pytest_torch_trained(subject: Subject) -> list[Finding]:
    from pytest_torch import assert_loss_decreases

    found = pytest_torch(subject)
    try:
        assert_loss_decreases(subject.model, subject.inputs, scalar_loss(subject))
    except (AssertionError, RuntimeError) as error:
        found.append(Finding("", "assert_loss_decreases", str(error)))
    return found


# ---- torcheck -----------------------------------------------------------------------------------


def torcheck(subject: Subject) -> list[Finding]:
    from torcheck.registry import Registry

    model, registry = subject.model, Registry()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)  # bfloat16 weights move, too
    registry.register(optimizer)
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            registry.add_tensor(
                parameter,
                own,
                name or "model",
                changing=parameter.requires_grad,
                check_nan=True,
                check_inf=True,
            )
        if _gives_a_tensor(module):
            registry._add_output_check(module, name or "model", check_nan=True, check_inf=True)
    try:
        scalar_loss(subject)(run(model, subject.inputs)).backward()
        optimizer.step()
    except RuntimeError as error:
        names = re.findall(r"Module (\S+)'s", str(error))
        layers = ["" if name == "model" else name for name in dict.fromkeys(names)]
        return [Finding(layer, "torcheck", str(error)) for layer in layers or [""]]
    return []


def _gives_a_tensor(module: nn.Module) -> bool:
    """Whether its output can be checked: torcheck takes tensors only."""
    is_torch = type(module).__module__.startswith("torch.nn")
    return is_torch and not list(module.children()) and not isinstance(module, nn.RNNBase)


# ---- TorchLens ----------------------------------------------------------------------------------

ACTIVATIONS = ("relu", "gelu", "silu", "sigmoid", "tanh", "hardtanh", "hardswish", "elu")


def torchlens(subject: Subject) -> list[Finding]:
    import torchlens as tl

    capture = tl.options.CaptureOptions(save_grads=True, unwrap_when_done=True)
    positional, named = arguments_of(subject.inputs)
    trace = tl.trace(subject.model, positional, named, capture=capture)
    found = []
    try:
        outputs = [trace[label].out for label in trace.output_layers]
        own_loss = subject.loss is None or len(outputs) == 1
        trace.log_backward(scalar_loss(subject)(outputs[0] if own_loss else tuple(outputs)))
    except RuntimeError as error:
        found.append(Finding("", "log_backward", str(error)))
    found += _non_finite_or_near(tl.debug.dtype_range_audit(trace), trace)
    found += _gradient_flow(tl.debug.gradient_flow_audit(trace), trace)
    found += _dead(tl.debug.dead_neurons(trace), trace)
    trace.cleanup()
    for finding in _audit_weights(subject.model).findings:
        if finding.severity != "info":
            check = f"{finding.severity} {finding.check}"
            found += [
                Finding(name.rpartition(".")[0], check, finding.message)
                for name in finding.names or [""]
            ]
    return found + _session(subject)


def _audit_weights(model: nn.Module) -> Any:
    """Audit matrices and kernels, since the scales of norms start out constant."""
    from torchlens.checks import audit_params

    return audit_params(model, within=[n for n, p in model.named_parameters() if p.ndim > 1])


def arguments_of(inputs: Any) -> tuple[Any, dict[str, Any] | None]:
    if isinstance(inputs, dict):
        return (), inputs
    return (list(inputs) if isinstance(inputs, tuple) else inputs), None


def modules_of(trace: Any, label: str) -> list[str]:
    """Return the module of an operation; for one of the model itself also its functional name."""
    module = getattr(trace[label], "module", None)
    if module is not None:
        return [str(module).partition(":")[0]]
    name, _, number = label.partition(":")[0].rpartition("_")[0].rpartition("_")
    return ["", name if number == "1" or not number.isdigit() else f"{name}_{int(number) - 1}"]


# audit_trace calls both of these, and then bisect_nan_backward, which raises on a model that runs
# one operation twice ("Layer 'add_3_48' has 2 ops").


def _non_finite_or_near(audit: Any, trace: Any) -> list[Finding]:
    return [
        Finding(layer, f"{finding.severity} {finding.check}", finding.message)
        for finding in audit.findings
        if finding.check != "dtype_downcast"
        for label in finding.ops
        for layer in finding.modules or modules_of(trace, label)
    ]


def _gradient_flow(table: Any, trace: Any) -> list[Finding]:
    found = []
    for _, row in table[table["severity"] > 0].iterrows() if len(table) else ():
        severity = "critical" if row["exploding"] else "warning"
        kinds = [kind for kind in ("exploding", "vanishing", "dead") if row[kind]]
        text = f"gradient is {' '.join(kinds)}: {row['reason']}"
        layers = modules_of(trace, row["op"])
        found += [Finding(layer, f"{severity} gradient_flow_audit", text) for layer in layers]
    return found


def _dead(table: Any, trace: Any) -> list[Finding]:
    """Return the activations of which more than half of the units are dead."""
    rows = table[table["dead_frac"].fillna(0) > 0.5]
    return [
        Finding(layer, "warning dead_neurons", f"{row['dead_frac']:.0%} dead units")
        for _, row in rows.iterrows()
        if row["op"].startswith(ACTIVATIONS)
        for layer in modules_of(trace, row["op"])
    ]


def _session(subject: Subject) -> list[Finding]:
    """Train one step under its step checks."""
    from torchlens.checks import ChecksSession

    optimizer = torch.optim.SGD(subject.model.parameters(), lr=1e-3)
    session = ChecksSession(subject.model, optimizer)
    session.register_change_check(window=(1, 1), action="collect")
    session.register_nonfinite_gradient_check(action="collect")
    with session:
        try:
            scalar_loss(subject)(run(subject.model, subject.inputs)).backward()
            optimizer.step()
        except RuntimeError:
            return []  # reported by log_backward
        report = session.report()
    return [
        Finding(name.rpartition(".")[0], f"{finding.severity} {finding.check}", finding.message)
        for finding in report.findings
        if finding.severity != "info"
        for name in finding.names or [""]
    ]


def torchlens_critical(subject: Subject) -> list[Finding]:
    """Leave out warnings, but for parameters that got no gradient."""
    return [
        found
        for found in torchlens(subject)
        if not found.check.startswith("warning") or "no_gradient" in found.check
    ]
