"""One model under each engine that distributes one, inspected on the ranks that this runs on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from corpus.ranks.spread import batch, distributed, loss, net, share, sharing
from pytest_modelhealth import Inspector
from pytest_modelhealth.report import Observation
from pytest_modelhealth.report.flow import Flow


def inspected(engine: str, samples: int, steps: int) -> Observation:
    """Return what this rank is told of the model under `engine`, on its share of the batch."""
    model = distributed(net(), engine)
    size = dist.get_world_size()
    shares = sharing(engine, size)
    whole = batch(samples)
    x, y = share(whole, dist.get_rank() * shares // size, shares)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(steps):
        loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Inspector(model).run_inspection(x, y, loss=loss).observation


def told(value: Any) -> Any:
    """Return all that an observation holds as plain comparable data, to the last bit."""
    if isinstance(value, Flow):
        return repr(value.graph)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: told(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Mapping):
        return [(key, told(inner)) for key, inner in value.items()]
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple | list):
        return [told(inner) for inner in value]
    return value.hex() if isinstance(value, float) else value
