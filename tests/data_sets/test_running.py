"""Runs over whole data sets: workers, modes, parts, chance, and what is left behind: nothing."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from corpus.models.loaded import Frozen, Numbers, Stream, net
from pytest_modelhealth import InspectionError, Inspector
from tests.capture.oracle import changes, fingerprint


def left_behind() -> tuple[int, set[str]]:
    """Return how many child processes there are, and the shared memory of this process."""
    gc.collect()
    shared = Path("/dev/shm")
    held = {p.name for p in shared.glob(f"torch_{os.getpid()}_*")} if shared.is_dir() else set()
    return len(multiprocessing.active_children()), held


LOADERS = {
    "no workers": lambda: DataLoader(Numbers(), batch_size=32),
    "two workers": lambda: DataLoader(Numbers(), batch_size=32, num_workers=2),
    "a stream": lambda: DataLoader(Stream(), batch_size=32, num_workers=1),
    "a stream without workers": lambda: DataLoader(Stream(), batch_size=32),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_loaders_of_every_kind_give_the_same(kind: str) -> None:
    """All samples are seen, the smaller last batch too, and no process stays."""
    before = left_behind()
    report = Inspector(net().eval()).run_batches(LOADERS[kind](), loss=F.cross_entropy)
    assert (report.observation.batches, report.observation.samples) == (4, 100)
    truth = net().eval()[0](Numbers().x).detach().double()
    assert report["0"].activations.mean == pytest.approx(float(truth.mean()), rel=1e-5)
    assert report.observation.part is None
    assert left_behind() == before


class Generating:
    """Gives pairs by a generator, and says whether that has ended."""

    is_open = False

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.is_open = True
        try:
            yield from DataLoader(Stream(), batch_size=32)
        finally:
            self.is_open = False


@pytest.mark.parametrize("how", ["early", "dataset", "loss", "ctrl-c", "ctrl-c in a generator"])
@pytest.mark.usefixtures("ctrl_c")
def test_workers_end_however_the_run_ends(how: str) -> None:
    """Stopped early, by an exception of a worker or of the loss, or by Ctrl-C: all is as before."""
    before, calls, model = left_behind(), [], net()
    as_it_was = fingerprint(model, None)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(output))
        if how == "loss" and len(calls) == 2:
            raise ZeroDivisionError("my loss")
        if "ctrl-c" in how and len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return F.cross_entropy(output, target)

    bad = 70 if how == "dataset" else -1
    loader = DataLoader(Numbers(bad=bad), batch_size=16, num_workers=2)
    if how == "early":
        report = Inspector(model).run_batches(loader, loss=loss, max_batches=2)
        part = report.observation.part
        assert part is not None
        assert (part.batches, part.of, part.ended_by) == (2, 7, "max_batches=2")
    else:
        kind = KeyboardInterrupt if "ctrl-c" in how else ZeroDivisionError
        own = Generating()
        with pytest.raises(kind) as caught:
            Inspector(model).run_batches(own if "generator" in how else loader, loss=loss)
        assert not own.is_open
        assert caught.tb  # it keeps the frames of the run alive, as a notebook does
    assert left_behind() == before
    assert set(changes(as_it_was, fingerprint(model, None))) <= {"torch"}  # a loader draws a seed


def test_workers_that_persist_are_the_users() -> None:
    """They stay for the next iteration, and a run that stopped early does no harm to it."""
    loader = DataLoader(Numbers(), batch_size=32, num_workers=1, persistent_workers=True)
    Inspector(net()).run_batches(loader, loss=F.cross_entropy, max_batches=1)
    workers = {child.pid for child in multiprocessing.active_children()}
    assert len(workers) >= 1
    assert sum(len(x) for x, _ in loader) == 100
    assert {child.pid for child in multiprocessing.active_children()} == workers
    del loader
    gc.collect()


def states() -> list[Any]:
    """Return the state of all global random generators."""
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


def seeded() -> None:
    """Begin all random numbers anew."""
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


def test_chance_goes_on_as_it_does_without_the_run() -> None:
    """A run moves the random state as iterating over the loader does, and no further."""
    loader = DataLoader(Numbers(draws=True), batch_size=20, shuffle=True)
    seeded()
    alone = [x for x, _ in loader]
    after = states()
    seen: list[Tensor] = []

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.detach().clone())
            return self.net(x + torch.randn_like(x))

    model = Keeping()
    seeded()
    Inspector(model).run_batches(loader, loss=F.cross_entropy, training=True)
    assert states() == after
    assert all(torch.equal(a, b) for a, b in zip(alone, seen, strict=True))


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_set_for_the_run_and_put_back(training: bool) -> None:
    """However the run ends, and every buffer gets its bits back; figures are of the mode."""
    model = net()
    model[1].eval()
    before = fingerprint(model, None)
    batches = [Numbers().x[:50] * 3, Numbers().x[50:]]
    report = Inspector(model).run_batches(batches, training=training)
    with pytest.raises(RuntimeError, match="shapes"):
        Inspector(model).run_batches([torch.ones(4, 5)], training=training)
    assert changes(before, fingerprint(model, None)) == []
    assert report["1"].options["training"] is training
    assert Inspector(model).run_batches(batches)["1"].options["training"] is False
    reference = copy.deepcopy(model).train(training)
    with torch.no_grad():
        whole = torch.cat([copy.deepcopy(reference)[:2](batch).double() for batch in batches])
    assert report["1"].activations.std == pytest.approx(float(whole.std(correction=0)), rel=1e-5)


def test_a_train_of_the_users_own_is_called_and_undone() -> None:
    """What it decides holds for the run; what it changed is changed back."""
    model = Frozen()
    model.norm.train()
    model.norm.requires_grad_(True)
    model.norm.weight.data.fill_(1.0)
    model.calls = 0
    report = Inspector(model).run_batches([torch.randn(8, 6)], training=True)
    assert report["norm"].options["training"] is False
    assert model.norm.training
    assert model.calls == 0
    assert torch.equal(model.norm.weight, torch.ones(6))
    assert model.norm.weight.requires_grad


def test_models_of_one_mode_are_refused_another() -> None:
    """What was exported or scripted stays in the mode that it was made in."""
    made = net().eval()
    program = torch.export.export(made, (torch.ones(4, 6),))
    for model in (program, program.module(), torch.jit.script(made)):
        with pytest.raises(InspectionError, match="for good: leave training out"):
            Inspector(model).run_batches([torch.ones(4, 6)], training=True)


def test_a_run_that_ends_early_says_so() -> None:
    """The report says of how many batches it is, and so does its verdict."""
    report = Inspector(net().eval()).run_batches(
        DataLoader(Numbers(), batch_size=10), max_batches=1, loss=F.cross_entropy
    )
    part = report.observation.part
    assert part is not None
    assert (part.batches, part.of, part.ended_by) == (1, 10, "max_batches=1")
    assert "1 of 10 batches" in report.render("line")
    assert "1 of 10 batches" in str(report).splitlines()[0]
    assert report.to_dict()["part"] == {"batches": 1, "of": 10, "ended_by": "max_batches=1"}
    stream = Inspector(net().eval()).run_batches(
        DataLoader(Stream(), batch_size=10), max_batches=1, loss=F.cross_entropy
    )
    assert stream.observation.part is not None
    assert stream.observation.part.of is None
    assert "1 batch" in str(stream).splitlines()[0]
    enough = Inspector(net()).run_batches(Numbers().x.split(50), max_batches=2)
    assert enough.observation.part is None


def test_what_is_no_batch_says_which_it_is() -> None:
    """Before anything is run; an exception of the model's passes, with a note on the batch."""
    ran, model, batch = [], net(), torch.ones(4, 6)
    hook = model.register_forward_hook(lambda *_: ran.append(1))
    small = DataLoader(Numbers(5), 32, drop_last=True)  # than a batch that must be full
    with pytest.raises(InspectionError, match=r"no batch.*drop_last"):
        Inspector(model).run_batches(small, loss=F.cross_entropy)
    assert not ran
    hook.remove()
    with pytest.raises(RuntimeError, match="shapes") as caught:
        Inspector(net()).run_batches([batch, batch, torch.ones(4, 5)])
    assert any("batch 2" in note for note in caught.value.__notes__)
    with pytest.raises(InspectionError, match="batch 1 is a Tensor, not a pair"):
        Inspector(net()).run_batches([(batch, torch.zeros(4).long()), batch], loss=F.cross_entropy)


@pytest.mark.parametrize("size", [16, 24, 32])
def test_a_sorted_folder_is_no_fault_in_evaluation(size: int) -> None:
    """Batches of one class each hold several together; in training they are no good."""
    torch.manual_seed(size)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(288, 5))
    labels, x = torch.arange(5).repeat_interleave(32), torch.randn(160, 3, 8, 8)
    for y, training, is_told in (
        (labels, False, False),
        (labels, True, True),
        (0 * labels, False, True),
    ):
        pairs = zip(x.split(size), y.split(size), strict=True)
        report = Inspector(model).run_batches(pairs, loss=F.cross_entropy, training=training)
        assert report.healthy or not y.any()
        assert any("are class 0" in v.message for v in report.warnings) is is_told
