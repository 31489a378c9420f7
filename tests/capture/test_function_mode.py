"""The function mode: where it is among the user's own modes, and that it leaves none behind."""

from __future__ import annotations

import gc
import inspect
import sys
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import Inspector


def modes() -> list[Any]:
    """Return the modes that are on, the outermost first."""
    depth = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(level) for level in range(depth)]


@pytest.mark.parametrize(
    ("event", "function"), [("return", "__enter__"), ("call", "__exit__"), ("call", "__enter__")]
)
def test_an_interruption_of_torchs_own_code_leaves_no_mode(event: str, function: str) -> None:
    """While torch had the mode in hand: it would put it back when its generator is collected."""
    code = inspect.unwrap(torch.overrides._pop_mode_temporarily).__code__

    def interrupt(frame: FrameType, happened: str, _: Any) -> None:
        manager = frame.f_locals.get("self")
        is_here = (happened, frame.f_code.co_name) == (event, function)
        if is_here and getattr(getattr(manager, "gen", None), "gi_code", None) is code:
            sys.setprofile(None)
            raise KeyboardInterrupt

    class Activates(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(F.softmax(x, -1))

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            Inspector(Activates()).run_inspection(torch.ones(2, 3))
    finally:
        sys.setprofile(None)
    assert modes() == []
    del raised
    gc.collect()
    assert modes() == []


def test_the_mode_is_off_inside_torchs_own_layers_and_on_around_them() -> None:
    """A functional layer after a Linear is seen, and so is one in a hook of the user's on it."""
    seen: dict[str, bool] = {}

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.hooked = nn.Linear(4, 4), nn.Linear(4, 4)
            self.hooked.register_forward_hook(lambda module, args, output: F.relu(output))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.hooked(F.gelu(self.plain(x))))

    model = Looks()
    forward = nn.Linear.forward

    def looking(module: nn.Linear, x: Tensor) -> Tensor:
        seen["plain" if module is model.plain else "hooked"] = bool(modes())
        return forward(module, x)

    nn.Linear.forward = looking
    try:
        report = Inspector(model).run_inspection(torch.randn(5, 4))
    finally:
        nn.Linear.forward = forward
    assert seen == {"plain": False, "hooked": True}
    assert {"gelu", "hooked.relu", "sigmoid"} <= set(report.layers)
