"""Finds what the monitor may have left behind."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def traces(model: nn.Module) -> list[str]:
    """Return where something of ours is on a model or in torch."""
    found = [name for name, module in model.named_modules() if _is_hooked(module)]
    found += [f"optimizers: {hook!r}" for hook in _global_optimizer_pre_hooks.values()]
    found += [f"optimizers: {hook!r}" for hook in _global_optimizer_post_hooks.values()]
    return [*found, *_modes()]


def _modes() -> Iterator[str]:
    for level in range(torch._C._len_torch_function_stack()):
        yield f"mode: {torch._C._get_function_stack_at(level)!r}"


def _is_hooked(module: nn.Module) -> bool:
    before, after = module._forward_pre_hooks, module._forward_hooks
    extras = module._forward_pre_hooks_with_kwargs.keys() - before.keys()
    extras |= module._forward_hooks_always_called.keys() - after.keys()
    hooks = (*before.values(), *after.values())
    return bool(extras) or any(type(h).__module__.startswith("pytest_modelhealth") for h in hooks)
