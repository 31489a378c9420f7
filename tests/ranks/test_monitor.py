"""A monitor of a training on two ranks changes no number, and says whose numbers it has."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from corpus.ranks.spread import batch, distributed, loss, net, share
from pytest_modelhealth import Inspector
from tests.ranks.launching import on_ranks

ENGINES = ("ddp", "static graph", "fsdp")


def _spread(engine: str) -> nn.Module:
    if engine == "static graph":
        return DistributedDataParallel(net(), static_graph=True)
    return distributed(net(), engine)


def _trained(model: nn.Module, optimizer: Any, steps: int, monitor: Any = None) -> list[Tensor]:
    """Train; return losses, gradients and parameters of each step."""
    found = []
    x, y = share(batch(8), dist.get_rank(), dist.get_world_size())
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(model(x + step), y)
        value.backward()
        held = [value, *(p.grad for p in model.parameters())]
        optimizer.step()
        held += model.parameters()
        found += [copy.deepcopy(_local(tensor.detach())) for tensor in held]
        if monitor is not None:
            monitor.step_end(step, loss=value)
    return found


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def watched() -> dict[str, Any]:
    """Return whether a training went as its twin's, and what the monitor says."""
    found = {}
    for engine in ENGINES:
        model, twin = _spread(engine), _spread(engine)
        mine, other = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin))
        with Inspector(model).monitor() as monitor:
            seen = _trained(model, mine, 3, monitor)
        seen += _trained(model, mine, 2)
        unseen = _trained(twin, other, 3) + _trained(twin, other, 2)
        same = [torch.equal(*pair) for pair in zip(seen, unseen, strict=True)]
        observation = monitor.report.observation
        gradient = observation.layers["head"].parameter_gradients["weight"].count
        found[engine] = all(same), list(observation.notes), observation.errors, gradient
    return found


def test_a_training_on_two_ranks_goes_on_as_if_never_watched() -> None:
    """Losses, gradients and parameters of five steps, bit for bit; the first three are watched."""
    for rank, found in enumerate(on_ranks(2, watched)):
        for engine, (same, notes, errors, count) in found.items():
            assert same, engine
            assert errors == ()
            assert notes[0].startswith(f"these are numbers of rank {rank} of 2 alone"), notes
            assert ("its shards" in notes[0]) is (engine == "fsdp")
            assert count == (32 if engine == "fsdp" else 64)
