"""What the fixture of a test probes unasked, and where positions, order and shifts are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import Inspector

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


def test_the_fixture_probes_and_a_script_does_not(inspector: Any) -> None:
    """Two forwards more, of a language model too, none if the probes are off."""
    model, batch = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(64, 20)
    assert inspector(model).run_inspection(batch).observation.probes.forwards == 2
    causal = inspector(Reader()).run_inspection(IDS, target=NEXT, loss=language)
    assert causal.observation.probes.forwards == 2
    assert not inspector(model).run_inspection(batch, probes=False).observation.probes.records
    assert not Inspector(model).run_inspection(batch).observation.probes.records
