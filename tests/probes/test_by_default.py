"""What the fixture of a test probes unasked, and where positions, order and shifts are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.report import Outcome

IDS = torch.randint(1, 30, (8, 12), generator=torch.Generator().manual_seed(0))


class Reader(nn.Module):
    """Ids to logits of each step, with positions along the steps, the samples or not at all."""

    def __init__(self, places: str = "steps", causal: bool = True) -> None:
        super().__init__()
        self.places, self.causal = places, causal
        self.words, self.table = nn.Embedding(30, 16), nn.Embedding(32, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 30)

    def forward(self, ids: Tensor) -> Tensor:
        x, (samples, steps) = self.words(ids), ids.shape
        placed = x + self.table(torch.arange(steps))
        if self.places == "samples":
            placed = x + self.table(torch.arange(samples)).unsqueeze(1)
        if self.places == "centred":
            placed = placed - placed.mean(0)
        mask = nn.Transformer.generate_square_subsequent_mask(steps) if self.causal else None
        return self.head(self.block(x if self.places == "unused" else placed, src_mask=mask))


def constant(reader: Reader) -> Reader:
    """Return a model whose positions start as one, and part by training."""
    nn.init.ones_(reader.table.weight)
    return reader


def language(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of each step."""
    return F.cross_entropy(output.transpose(1, 2), target)


class WithLoss(Reader):
    """Returns its loss beside the logits, as models of transformers do."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = super().forward(ids)
        return {"loss": shifting(logits, labels), "logits": logits}


class Noisy(nn.Linear):
    """Draws numbers for each sample in every mode."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x))


class Filling(Reader):
    """Returns the loss of hidden words beside the logits: at their own places."""

    def forward(self, ids: Tensor, labels: Tensor, kept: Tensor) -> dict[str, Tensor]:
        logits = super().forward(ids * kept)
        return {"loss": language(logits, labels), "logits": logits}


def shifting(output: Tensor, target: Tensor) -> Tensor:
    """Return the same, one step ahead."""
    return language(output[:, :-1], target[:, 1:])


NEXT, BEFORE = IDS.roll(-1, 1), IDS.roll(1, 1)


@pytest.mark.parametrize(
    ("model", "target", "loss", "word", "probes"),
    [
        (Reader, NEXT, language, "", "applicable"),
        (Reader, IDS, shifting, "", "applicable"),
        (lambda: Reader(causal=False), IDS.clone(), language, "", "applicable"),
        (lambda: Reader(causal=False), NEXT, language, "sees the future", "applicable"),
        (Reader, IDS.clone(), language, "what it is given", "applicable"),
        (Reader, BEFORE, language, "one step before", "applicable"),
        (Reader, NEXT, shifting, "2 steps later", "applicable"),
        (lambda: Reader("samples"), NEXT, language, "their place in the batch", "applicable"),
        (lambda: Reader("centred"), NEXT, language, "samples see each other", "applicable"),
        (lambda: Reader("unused", False), NEXT, language, "no effect", "position_effect"),
        (lambda: Reader(causal=False), NEXT, language, "", "position_effect"),
        (lambda: constant(Reader(causal=False)), NEXT, language, "", "position_effect"),
    ],
)
def test_what_is_seen_is_said(
    model: Callable[[], nn.Module], target: Tensor, loss: Any, word: str, probes: str
) -> None:
    """A healthy neighbour beside each fault."""
    torch.manual_seed(0)
    report = Inspector(model()).run_inspection(IDS, target=target, loss=loss, probes=probes)
    names = ("causality", "sample_independence", "position_effect")
    said = [f.message for f in (*report.violations, *report.warnings) if f.check in names]
    assert len(said) == bool(word), said
    assert all(word in message for message in said)


class Centred(nn.Module):
    """Takes a mean off every second step, over the samples or the steps, or joins samples."""

    def __init__(self, over: int) -> None:
        super().__init__()
        self.rnn, self.last, self.over = nn.GRU(12, 16, batch_first=True), nn.Linear(16, 3), over

    def forward(self, x: Tensor, pairs: Tensor | None = None) -> Tensor:
        h = self.rnn(x)[0]
        if pairs is not None:
            return self.last((pairs @ h.flatten(1)).view_as(h))
        odd = torch.arange(x.shape[1]).remainder(2).view(1, -1, 1)
        return self.last(h - odd * h.mean(self.over, keepdim=True))


class Joined(nn.Module):
    """Joins six channels of one recurrence and two of another, which may run from behind."""

    def __init__(self, from_behind: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.GRU(12, n, batch_first=True) for n in (6, 2))
        self.from_behind = from_behind

    def forward(self, x: Tensor) -> Tensor:
        second = self.second(x.flip(1))[0].flip(1) if self.from_behind else self.second(x)[0]
        return torch.cat([self.first(x)[0], second], 2)


SQUARE = torch.randn(8, 8, 12, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("model", "inputs", "said", "options"),
    [
        (lambda: Centred(0), SQUARE, ["samples see each other"], {}),
        (lambda: Centred(1), SQUARE, [], {}),
        (lambda: Centred(0), (SQUARE, SQUARE[..., 0]), [], {}),
        (lambda: Joined(True), SQUARE, ["sees the future"], {"causal": True, "time_dim": 1}),
        (lambda: Joined(False), SQUARE, [], {"causal": True, "time_dim": 1}),
    ],
)
def test_sizes_that_coincide_hide_nothing(
    model: Callable[[], nn.Module], inputs: Any, said: list[str], options: dict[str, Any]
) -> None:
    """Eight samples of eight steps or channels are told apart by fewer, unless rows are pairs."""
    torch.manual_seed(0)
    report = Inspector(model()).run_inspection(inputs, probes="applicable", **options)
    probes = ("causality", "sample_independence")
    found = [f for f in (*report.violations, *report.warnings) if f.check in probes]
    assert [word in f.message for word, f in zip(said, found, strict=True)] == [True] * len(said)
    assert not [one for one in report.inconclusive if one.check in probes]


@pytest.mark.parametrize(("refused", "ran"), [(7, [8, 7, 7, 8, 4]), (0, [8, 7, 7, 3])])
def test_a_model_is_run_as_it_can_be(refused: int, ran: list[int]) -> None:
    """With a graph where it differentiates inside, and whole where it takes no fewer samples."""

    class Bound(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            assert len(x) != refused
            slope = torch.autograd.grad(super().forward(x.requires_grad_()).sum(), x)[0]
            return super().forward(x) + slope.sum(1, keepdim=True)

    sizes: list[int] = []
    report = Inspector(Bound(12, 3)).run_inspection(
        SQUARE[0], target=torch.arange(8) % 3, loss=F.cross_entropy, probes="applicable"
    )
    assert report.observation.probes["sample_independence"].outcome is Outcome.JUDGED
    assert sizes == ran


def test_the_fixture_probes_and_a_script_does_not(inspector: Any) -> None:
    """Two forwards more, of a language model or a sampler too, none if the probes are off.

    So where it computes its loss itself, of labels that are the very tensor of its inputs.
    """
    model, batch = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(64, 20)
    assert inspector(model).run_inspection(batch).observation.probes.forwards == 2
    causal = inspector(Reader()).run_inspection(IDS, target=NEXT, loss=language)
    assert causal.observation.probes.forwards == 2
    own = inspector(WithLoss()).run_inspection({"ids": IDS, "labels": IDS})
    assert own.observation.probes.forwards == 2
    assert own.observation.probes["causality"].outcome is Outcome.JUDGED
    noisy = inspector(Noisy(20, 3)).run_inspection(batch).observation.probes
    assert (noisy.forwards, noisy["sample_independence"].outcome) == (2, Outcome.NOT_APPLICABLE)
    sees = Inspector(WithLoss(causal=False)).run_inspection(
        {"ids": IDS, "labels": IDS}, probes="applicable"
    )
    assert [one.check for one in sees.violations] == ["causality"]
    hidden = IDS.clone()  # none of them the last: the loss is flat there, and shifts nothing
    hidden[:, -1] = hidden[:, ::3] = -100
    filling = Inspector(Filling(causal=False), probes="causality")
    fills = filling.run_inspection({"ids": IDS, "labels": hidden, "kept": torch.ones_like(IDS)})
    assert fills.observation.probes["causality"].outcome is Outcome.NOT_APPLICABLE
    assert not inspector(model).run_inspection(batch, probes=False).observation.probes.records
    assert not Inspector(model).run_inspection(batch).observation.probes.records
