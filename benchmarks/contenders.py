"""What is compared with the bare step: the bounds, ours, and other tools on the nearest equal work.

A contender runs a `Step` once, forward and backward. Other tools are optional, and imported only
when they run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.steps import Step
from pytest_modelhealth import HealthReport, Inspector


@dataclass(frozen=True)
class Contender:
    """Something that watches a step.

    Args:
        run: does the step, watched.
        sees: what is kept and of what, for people.
        needs: a package that must be there.
    """

    run: Callable[[Step], object]
    sees: str
    needs: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether the package that it needs is there."""
        return not self.needs or find_spec(self.needs) is not None


def _with_hooks(step: Step, see: Callable[[Tensor], object]) -> None:
    """Run the step with `see` on each leaf module's output, its gradient and every parameter's."""

    def on_gradient(gradient: Tensor) -> None:
        see(gradient)

    def after(module: object, arguments: object, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            see(output.detach())
            if output.requires_grad:
                output.register_hook(on_gradient)

    with ExitStack() as stack:
        for module in step.model.modules():
            if not list(module.children()):
                stack.callback(module.register_forward_hook(after).remove)
        step.run()
    for parameter in step.model.parameters():
        see(parameter.detach())
        if parameter.grad is not None:
            see(parameter.grad)


def hooks_only(step: Step) -> None:
    _with_hooks(step, lambda tensor: None)


def read_once(step: Step) -> None:
    _with_hooks(step, torch.sum)


def modelhealth(step: Step) -> HealthReport:
    loss = None if step.loss is None else lambda output, *_: step.loss_of(output)
    return Inspector(step.model).run_inspection(step.inputs, step.target, loss=loss)


def with_verdict(step: Step) -> bool:
    return modelhealth(step).healthy


def eight_passes(step: Step) -> None:
    def see(t: Tensor) -> None:
        _ = t.isnan().any().item(), t.isinf().any().item(), t.mean().item(), t.std().item()
        _ = t.min().item(), t.max().item(), t.norm().item(), (t == 0).sum().item()

    _with_hooks(step, see)


def _mean_std_norm(tensor: Tensor) -> tuple[float, float, float]:
    t = tensor.detach()
    std = t.std().item() if t.numel() > 1 else math.nan
    return t.mean().item(), std, t.norm().item()


def hook_dictionary(step: Step) -> None:
    """Do what is written by hand: a dictionary, forward hooks and full backward hooks."""
    kept: dict[tuple[str, str], tuple[float, float, float]] = {}

    def add(layer: str, role: str, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            kept[layer, role] = _mean_std_norm(tensor)

    def watch(name: str, module: nn.Module) -> None:
        def after(module: object, arguments: object, output: Any) -> None:
            add(name, "activations", output)

        def backward(module: object, inputs: object, outputs: tuple[Any, ...]) -> None:
            add(name, "gradients", outputs[0])

        stack.callback(module.register_forward_hook(after).remove)
        stack.callback(module.register_full_backward_hook(backward).remove)

    with ExitStack() as stack:
        for name, module in step.model.named_modules():
            if not list(module.children()):
                watch(name, module)
        step.run()
    for name, parameter in step.model.named_parameters():
        add(name, "parameters", parameter)
        add(name, "parameter_gradients", parameter.grad)


def torchlens(step: Step) -> None:
    """Trace the step with gradients and reduce what was kept.

    torch's functions are unwrapped after it, since wrapped ones would slow the others down. It has
    to keep the tensors: where `activation_transform` replaces them, there is no output for a loss.
    """
    import torchlens as tl

    step.model.zero_grad(set_to_none=True)
    arguments, keywords = ((), step.inputs) if step.takes_keywords else (step.inputs, None)
    capture = tl.options.CaptureOptions(save_grads=True, unwrap_when_done=True)
    trace = tl.trace(step.model, arguments, keywords, capture=capture)
    output = trace[trace.output_layers[0]].out  # the loss, where the model computes its own
    trace.log_backward(output if step.loss is None else step.loss_of(output))
    for layer in trace.layer_list:
        for tensor in (layer.out, layer.grad):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                _mean_std_norm(tensor)
    trace.cleanup()


def pytest_torch(step: Step) -> None:
    from pytest_torch import assert_gradients_finite

    assert_gradients_finite(step.model, step.inputs, step.loss_of)


CONTENDERS = {
    "hooks only": Contender(hooks_only, "nothing; its hooks are called with every tensor"),
    "read once": Contender(
        read_once, "the sum of every tensor: each byte is read once, the bound for any monitor"
    ),
    "modelhealth": Contender(
        modelhealth,
        "complete statistics, histograms and unit liveliness of everything, functional layers, "
        "containers, inputs and buffers included; the model is put back as it was",
    ),
    "modelhealth, with verdict": Contender(
        with_verdict, "the same, and every layer's record made and judged by every check"
    ),
    "eight passes": Contender(
        eight_passes, "one torch call a statistic: NaN, infinity, mean, std, min, max, norm, zeros"
    ),
    "hook dictionary": Contender(
        hook_dictionary,
        "mean, std and norm in a dictionary, from forward and full backward hooks on leaf modules",
    ),
    "TorchLens": Contender(
        torchlens, "every operation's tensors and gradients, then mean, std and norm", "torchlens"
    ),
    "pytest-torch": Contender(
        pytest_torch,
        "assert_gradients_finite, the nearest it offers: NaN and infinity in parameter gradients; "
        "no activations, no statistics",
        "pytest_torch",
    ),
}
