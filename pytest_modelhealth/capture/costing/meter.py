"""Reads what each operation of a run costs, and puts it down to the layer that makes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from pytest_modelhealth.capture.costing.formulas import own_formulas
from pytest_modelhealth.capture.costing.storages import Storages
from pytest_modelhealth.capture.observing.tensors import find_tensors


class Meter(TorchDispatchMode):
    """Sees every operation of a run.

    Args:
        running_layer: the name of the innermost layer whose forward runs, ``None`` outside of it.
        sees_saved: whether to see what autograd saves.

    Attributes:
        multiply_adds, saved_bytes: by layer; the latter is ``None`` where that is not to be seen.
        storages: what is in use.
    """

    supports_higher_order_operators = True

    def __init__(self, running_layer: Callable[[], str | None], *, sees_saved: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.multiply_adds: Counter[str] = Counter()
        self.saved_bytes: Counter[str] | None = Counter() if sees_saved else None
        self.storages = Storages()
        self._running_layer = running_layer
        self._counter = FlopCounterMode(display=False, custom_mapping=own_formulas())
        # that of torch hooks every module and tensor to tell layers apart, which we do ourselves
        self._counter.mod_tracker = _NoModules()
        self._counted = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """See the operations that run inside, and what they have saved."""
        sees_saved = self.saved_bytes is not None
        saved = saved_tensors_hooks(self._save, _same) if sees_saved else nullcontext()
        with self._counter, self, saved:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation; the counter, which is on below this mode, sees it too."""
        with torch._C.DisableTorchFunction():  # the user's function modes have seen the call
            made = func(*args, **(kwargs or {}))
        for tensor in [made] if type(made) is Tensor else find_tensors(made):
            self.storages.follow(tensor)
        counted = self._counter.get_total_flops()
        if counted != self._counted:
            layer = self._running_layer()
            if layer is not None:
                self.multiply_adds[layer] += (counted - self._counted) // 2
            self._counted = counted
        return made

    def _save(self, tensor: Tensor) -> Tensor:
        layer = self._running_layer()
        if layer is not None and self.saved_bytes is not None:
            with torch._C.DisableTorchFunction():
                self.saved_bytes[layer] += self.storages.save(tensor)
        return tensor


class _NoModules(ModuleTracker):
    """Tracks nothing."""

    def __enter__(self) -> ModuleTracker:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _same(tensor: Tensor) -> Tensor:
    return tensor
