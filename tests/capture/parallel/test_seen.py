"""What is seen of a model on several ranks: the plain model's layers, with this rank's numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from corpus.ranks.engines import WIDTH, Net, Sequence, loss_of
from pytest_modelhealth.capture.engine import Request, find_engine
from pytest_modelhealth.report import Observation
from pytest_modelhealth.statistics import TensorStatistics
from tests.capture.parallel import seeing
from tests.ranks.launching import on_ranks

ENGINES = ["DDP", "FSDP2", "HSDP", "tensor parallel", "sequence parallel"]


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Observation]]:
    """What two ranks see of each engine."""
    return on_ranks(2, seeing.seen, ENGINES)


def one_process(engine: str) -> Observation:
    """Return what one process sees of the plain model and the batches of both ranks."""
    torch.manual_seed(3)
    parallel = "parallel" in engine
    model = Sequence() if engine.startswith("sequence") else Net(hidden=12 if parallel else 7)
    ranks = [0] if engine == "tensor parallel" else [0, 0] if parallel else [0, 1]
    batches = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(9900 + rank)
        x = torch.randn(4, WIDTH, generator=generator)
        batches.append((x, torch.randint(0, 3, (4,), generator=generator)))
    x, y = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    # ranks of a sequence add up the gradients of their own losses
    loss = loss_of if engine != "sequence parallel" else lambda o, t: 2 * loss_of(o, t)
    return find_engine(model).run(Request(model.eval(), x, y, loss))


def merged(engine: str, parts: Iterable[Any], role: str, name: str) -> TensorStatistics:
    """Merge what ranks saw, each piece of a tensor once."""
    pieces = {}
    for rank, (layer, statistics) in enumerate(parts):
        key = role if role in ("activations", "inputs", "gradients") else f"{role}.{name}"
        placement = layer.placements.get(key)
        if placement is not None:
            pieces[placement.offset if placement.is_cut else 0] = statistics
        else:
            shares_batch = engine != "tensor parallel" and key == "activations"
            pieces[rank if shares_batch else 0] = statistics
    first, *others = pieces.values()
    for one in others:
        first = first.merge(one)
    return first


@pytest.mark.parametrize("engine", ENGINES)
def test_merged_over_ranks_it_is_what_one_process_sees(
    engine: str, seen: list[dict[str, Observation]]
) -> None:
    """Names, classes, parameters, their gradients and activations."""
    whole = one_process(engine).layers
    ranks = [one[engine].layers for one in seen]
    assert {n: one.type_name for n, one in ranks[0].items()} == {
        n: one.type_name for n, one in whole.items()
    }
    compared = 0
    for name, layer in whole.items():
        own = [one[name] for one in ranks]
        for role in ("parameters", "parameter_gradients"):
            for tensor, expected in getattr(layer, role).items():
                parts = [(one, getattr(one, role)[tensor]) for one in own]
                alike(merged(engine, parts, role, tensor), expected)
                compared += 1
        parts = [(one, one.activations) for one in own]
        alike(merged(engine, parts, "activations", ""), layer.activations)
    assert compared >= 10


def alike(found: TensorStatistics, expected: TensorStatistics | None) -> None:
    """Check that they are of the same numbers, up to the order of sums."""
    assert expected is not None
    assert found.count == expected.count
    for number in ("min", "max", "mean", "std"):
        assert getattr(found, number) == pytest.approx(getattr(expected, number), 1e-4, 1e-6)


def test_no_false_alarms() -> None:
    """No engine has parameters without gradients, leaves that nobody knows, or errors of ours."""
    fine: tuple[Any, ...] = ([], (), set())
    for found in on_ranks(2, seeing.violations_and_errors):
        assert {engine: said for engine, said in found.items() if said != fine} == {}


def test_the_inspection_adds_no_collective() -> None:
    """FSDP2 and tensor parallelism take those of a step with its optimizer, and DDP none at all."""
    for found in on_ranks(2, seeing.collectives):
        bare, inspected = found.pop("DDP")
        assert bare
        assert inspected == {}
        for engine, (bare, inspected) in found.items():
            assert bare == inspected != {}, engine


def test_one_rank_alone_inspects_ddp() -> None:
    """It waits for nobody."""
    assert on_ranks(2, seeing.one_alone, seconds=60) == ["went on", "went on"]


def test_what_cannot_be_put_back_is_refused() -> None:
    """Before anything runs; DDP that has settled is run as often as you like."""
    flat, original, early, hook, sharded, settled, hidden = on_ranks(2, seeing.refused)[0]
    assert flat == original
    assert "fully_shard(module)" in flat
    assert "train for two steps first" in early
    assert "communication hook with a state" in hook
    assert "plain model, in one process" in sharded
    assert settled == "runs"
    assert hidden == flat


def test_summaries_and_probes_leave_no_trace() -> None:
    """Sizes are those of the whole model."""
    wide = sum(p.numel() for p in Net(hidden=12).parameters())
    size = sum(p.numel() for p in Net().parameters())
    assert on_ranks(2, seeing.beside)[0] == {
        "DDP": f"{size} True",
        "DDP, static_graph": f"{size} True",
        "FSDP2": f"{size} True",
        "tensor parallel": f"{wide} True",
    }


def test_a_loss_on_shards_of_the_classes() -> None:
    """It is the loss of one process, without an error."""
    expected = seeing.plain_loss_of_rank_0()
    for errors, loss in on_ranks(2, seeing.parallel_loss):
        assert errors == ()
        assert loss == pytest.approx(expected, 1e-5)
