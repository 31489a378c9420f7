"""Several ranks tell what one process with the whole batch tells."""

from __future__ import annotations

import math
import pickle
import signal
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from corpus.ranks.spread import Net, batch, loss, net, share
from pytest_modelhealth import InspectionError, Inspector
from pytest_modelhealth.report import ROLES, LayerRecord, Observation
from pytest_modelhealth.statistics import TensorStatistics
from tests.ranks.engines import inspected, told
from tests.ranks.launching import on_ranks

SAMPLES = 8


def plain_report(samples: int = SAMPLES) -> Observation:
    """Return what one process with the whole batch sees of the model that nothing distributes."""
    x, y = batch(samples)
    return Inspector(net()).run_inspection(x, y, loss=loss).observation


def both(engines: tuple[str, ...], samples: int) -> dict[str, tuple[bytes, Any]]:
    """Return of each engine what this rank was told, pickled, and all of it as plain data."""
    found = {engine: inspected(engine, samples, steps=0) for engine in engines}
    return {engine: (pickle.dumps(seen), told(seen)) for engine, seen in found.items()}


def differences(whole: Observation, joint: Observation, is_cut: bool) -> list[str]:
    """Return in what a joint report is not that of one process, a line each.

    Where activations are cut along their units, shapes and units are those of no process.
    """
    found = [] if list(whole.layers) == list(joint.layers) else ["other layers"]
    if not math.isclose(whole.loss or 0.0, joint.loss or 0.0, rel_tol=1e-6):
        found.append(f"loss {joint.loss} is not {whole.loss}")
    names = ("samples", "batches", "model_type", "given", "notes", "errors")
    found += _unequal(whole, joint, names)
    for name, record in whole.layers.items():
        found += [f"{name}: {text}" for text in _of_layer(record, joint.layers[name], is_cut)]
    return found


def _unequal(one: Any, other: Any, names: Iterable[str]) -> list[str]:
    pairs = ((name, getattr(one, name), getattr(other, name)) for name in names)
    return [f"{name} is {b}, not {a}" for name, a, b in pairs if a != b]


def _of_layer(whole: LayerRecord, joint: LayerRecord, is_cut: bool = False) -> list[str]:
    found = _unequal(whole, joint, ("type_name", "status", "calls", "options", "watched"))
    if joint.zero_slices and joint.zero_slices != whole.zero_slices:  # none of what is cut
        found.append("zero_slices differ")
    for role in ROLES:
        one, other = whole.tensors(role), joint.tensors(role)
        if one.keys() != other.keys():
            found.append(f"{role} {list(one)} {list(other)}")
            continue
        has_parts = is_cut and not (role.startswith("parameter") or role == "buffers")
        for name, seen in one.items():
            texts = _of_tensor(seen, other[name], role, has_parts)
            found += [f"{role} {name} {text}" for text in texts]
    return found


def _of_tensor(
    whole: TensorStatistics, joint: TensorStatistics, role: str, has_parts: bool = False
) -> list[str]:
    exact = ["count", "nan_count", "positive_inf_count", "negative_inf_count", "zero_count"]
    exact += ["dtype", "device", "first_nonfinite", *([] if has_parts else ["shape"])]
    found = _unequal(whole, joint, exact)
    near = 1e-5 * max(whole.rms, 1e-12)
    moments = [(getattr(whole, n), getattr(joint, n)) for n in ("mean", "std", "min", "max")]
    found += [f"{b} is not {a}" for a, b in moments if abs(a - b) > near]
    if joint.exponents.counts.sum() != np.abs(whole.exponents.counts).sum():
        found.append("the histogram has another number of values")
    if role != "inputs" and whole.units is not None and not has_parts:
        one, other = whole.units, joint.units
        if other is None or other.observations != one.observations:
            return [*found, f"units are {other}, not {one}"]
        pairs = (
            (one.alive, other.alive),
            (one.minimum, other.minimum),
            (one.maximum, other.maximum),
        )
        if not all(np.allclose(*pair, atol=1e-6, equal_nan=True) for pair in pairs):
            found.append("units are others")
    return found


@pytest.mark.parametrize(
    ("size", "engines"),
    [(2, ("ddp", "fsdp", "tp", "sp")), (4, ("ddp", "fsdp", "hsdp", "fsdp+tp", "tp"))],
)
def test_report_is_that_of_one_process_and_the_same_on_all_ranks(
    size: int, engines: tuple[str, ...]
) -> None:
    """Counts, shapes and units exactly, moments to rounding; no bit differs between ranks."""
    ranks = on_ranks(size, both, engines, SAMPLES)
    whole = plain_report()
    for engine in engines:
        joint = pickle.loads(ranks[0][engine][0])
        is_cut = engine in ("tp", "sp", "fsdp+tp")
        assert differences(whole, joint, is_cut) == [], engine
        assert all(rank[engine][1] == ranks[0][engine][1] for rank in ranks), engine
        assert joint.ranks.ranks == tuple(range(size))
        assert joint.layers["first"].activations.shape == (SAMPLES, 4, 16)


def outcome(act: Any) -> Any:
    """Return what `act` returns, or the error that it raises, with its type."""
    try:
        return act()
    except Exception as error:  # noqa: BLE001 - it is what the test looks at
        return f"{type(error).__name__}: {error}"


def inspected_by_all(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Any:
    """Return what this rank is told of one batch."""
    inspector = Inspector(model, **options)
    return outcome(lambda: inspector.run_inspection(x, y, loss=loss).observation)


class Branching(Net):
    """The model, with a layer that only some batches reach, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(6, 6)
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.extra(x) if x.sum() > 0 else x)


def interrupted(model: nn.Module, x: Tensor, y: Tensor) -> str:
    """Return what this rank is told where rank 1 gets Ctrl-C."""

    def interrupting(output: Tensor, target: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            # which is ignored in what `nohup ... &` started, as this process may be
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.raise_signal(signal.SIGINT)
        return loss(output, target)

    try:
        Inspector(model).run_inspection(x, y, loss=interrupting)
    except (InspectionError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def rough() -> dict[str, Any]:
    """Return what this rank is told where ranks do not do the same."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = share(batch(), rank, size)
    found: dict[str, Any] = {}
    model = DistributedDataParallel(net())

    def raising(output: Tensor, target: Tensor) -> Tensor:
        if rank == 1:
            raise ValueError("only here")
        return loss(output, target)

    found["raised"] = outcome(lambda: Inspector(model).run_inspection(x, y, loss=raising))

    found["interrupted"] = interrupted(model, x, y)
    found["models"] = inspected_by_all(net(width=16 + 4 * rank), x, y, ranks=True)
    batches = [(x, y)] * (3 - rank)
    found["uneven"] = outcome(lambda: Inspector(model).run_batches(batches, loss=loss))

    def failing() -> Any:
        yield x, y
        if rank == 0:
            raise OSError("disk gone")
        yield x, y

    found["loader"] = outcome(lambda: Inspector(model).run_batches(failing(), loss=loss))
    if rank == 0:
        found["missing"] = inspected_by_all(model, x, y, rank_timeout=0.5)
    dist.barrier()
    if rank == 1:
        found["missing"] = inspected_by_all(model, x, y)
    ill = x.clone()
    ill[0, 0, 0] = math.nan if rank == 1 else 0.0
    nan = inspected_by_all(model, ill, y)
    found["nan"] = nan.layers["first"].ill_ranks["activations"], told(nan)
    found["first nan"] = nan.layers["first"].inputs.first_nonfinite
    torch.manual_seed(0)
    branching = Branching()
    torch.manual_seed(0)
    above, below = x.abs() + 1, -x.abs()
    unused = DistributedDataParallel(branching, find_unused_parameters=True)
    branched = inspected_by_all(unused, above if rank else below, y)
    found["branch"] = pickle.dumps(branched), told(branched)
    found["uneven samples"] = pickle.dumps(
        inspected_by_all(model, *(part.split([5, 3])[rank] for part in batch()))
    )
    found["alone"] = inspected_by_all(model, x, y, ranks=False).ranks
    many = [share(batch(samples), rank, size) for samples in (8, 4)]
    found["many"] = pickle.dumps(Inspector(model).run_batches(many, loss=loss).observation)
    found["grads"] = all(p.grad is None for p in model.parameters())
    dist.destroy_process_group()
    found["destroyed"] = inspected_by_all(model, x, y)
    found["no group"] = inspected_by_all(net(), x, y, ranks=True)
    return found


def test_ranks_that_do_not_do_the_same_are_told_so() -> None:
    """Each gets one error that names the rank; after it all inspect together as before."""
    first, second = on_ranks(2, rough)
    assert second["raised"] == "ValueError: only here"
    assert first["raised"].startswith("InspectionError: rank 1 of 2 raised ValueError: only here")
    assert second["interrupted"] == "KeyboardInterrupt: "
    assert "rank 1 of 2 raised KeyboardInterrupt in its run" in first["interrupted"]
    assert first["models"] == second["models"]
    assert (
        "rank 1 came to the run with something else than rank 0: first: Linear(in_features=6, "
        "out_features=20" in first["models"]
    )
    assert first["uneven"] == second["uneven"]
    assert "rank 1 was before the end of its inspection, after 2 batches" in first["uneven"]
    assert first["loader"].startswith("OSError: disk gone")
    assert "rank 0 of 2 raised OSError: disk gone in its batches" in second["loader"]
    assert first["missing"] == second["missing"]
    assert "rank 1 did not come within 0.5 s: rank 0 waited before the run" in first["missing"]
    assert first["nan"] == second["nan"]
    assert first["nan"][0] == (1,)
    assert first["first nan"] == (0, 0, 0)
    assert first["alone"] is None
    assert first["grads"]
    assert second["grads"]
    assert "its process group was destroyed" in first["destroyed"]
    assert "there is none" in first["no group"]
    assert first["branch"][1] == second["branch"][1]
    _require_branch(pickle.loads(first["branch"][0]))
    uneven = pickle.loads(first["uneven samples"])
    assert uneven.samples == 8
    whole = plain_report()
    for name in ("first", "act", "norm", "head"):
        assert _of_tensor(whole.layers[name].activations, uneven.layers[name].activations, "") == []
    _require_batches(pickle.loads(first["many"]))


def _require_branch(joint: Observation) -> None:
    """A layer that one rank reached was seen on it alone; its gradient is half of that."""
    extra = joint.layers["extra"]
    assert extra.calls == 1
    x = share(batch(), 1, 2)[0].abs() + 1
    torch.manual_seed(0)
    model = Branching()
    loss(model(x), share(batch(), 1, 2)[1]).backward()
    assert model.extra.weight.grad is not None
    expected = model.extra.weight.grad.double().pow(2).mean().sqrt().item() / 2
    assert math.isclose(extra.parameter_gradients["weight"].rms, expected, rel_tol=1e-5)
    assert extra.activations is not None
    assert extra.activations.shape == (4, 4, 6)
    assert not joint.layers["spare"].parameter_gradients


def _require_batches(joint: Observation) -> None:
    whole = Inspector(net()).run_batches([batch(8), batch(4)], loss=loss).observation
    assert joint.batches == 2
    assert joint.samples == 12
    for name, record in whole.layers.items():
        assert _of_layer(record, joint.layers[name]) == []
        largest, other = record.largest, joint.layers[name].largest
        assert {r: e.batch for r, e in largest.items()} == {r: e.batch for r, e in other.items()}
        assert all(math.isclose(e.value, other[r].value, rel_tol=1e-5) for r, e in largest.items())
