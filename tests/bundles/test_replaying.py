"""An inspection that is run again gives the same report, bit for bit."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import Inputs, InspectionError
from pytest_modelhealth.bundles.inspecting import HookedInspector, Recording

from .conftest import Save, again

SAME = "replayed: the same verdict and numbers as then, bit for bit"


class Everything(nn.Module):
    """Tied and frozen weights, buffers of all sorts, dropout, batch norm, modes that differ."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.4)
        self.still = nn.Dropout(0.4).eval()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(8), persistent=False)
        self.shift = torch.rand(8)
        self.noise = torch.Generator().manual_seed(random.randrange(10**6))
        self.other_noise = np.random.default_rng(random.randrange(10**6))

    def forward(self, ids: Tensor, weight: Tensor) -> Tensor:
        x = self.embedding(ids) * self.scale + self.shift
        x = x + torch.rand(x.shape, generator=self.noise) + self.other_noise.random()
        x = self.still(self.frozen(self.dropout(self.norm(x)))) * weight[:, None]
        return self.head(x * float(np.random.rand()) * random.random())


def batch_of(samples: int = 64) -> dict[str, Tensor]:
    """Return a mapping batch that no seed gives again."""
    return {"ids": torch.randint(11, (samples,)), "weight": torch.rand(samples)}


def test_a_replay_is_the_same_bit_for_bit(saved: Save) -> None:
    """On another model and batch, after other random numbers; a bare run gives the same loss."""
    model, batch, target = Everything(), batch_of(), torch.randint(11, (64,))
    bare = copy.deepcopy(model)
    bare.noise = torch.Generator()
    bare.noise.set_state(model.noise.get_state())
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    expected = F.cross_entropy(bare(**batch), target).item()
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
    then, path = saved(model, batch, target, loss=F.cross_entropy)
    assert then.loss == expected

    torch.rand(7)
    np.random.rand(7)
    random.random()
    other = Everything().eval()
    other.head.requires_grad_(False)
    loss = {"loss": F.cross_entropy}
    report, told = again(path, other, batch_of(32), target=torch.randint(11, (32,)), **loss)
    assert told == SAME
    assert report.loss == expected
    assert report.verdict == then.verdict
    # the test goes on from there as it did then
    assert torch.equal(torch.get_rng_state(), states[0])
    assert F.cross_entropy(other(**batch), target).item() == expected


def test_a_transformer_of_a_library(saved: Save) -> None:
    """A tiny BERT in training mode, its own loss, keywords and masks, and a probe."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=12,
    )  # fmt: skip

    def batch() -> dict[str, Tensor]:
        mask = (torch.arange(12) < torch.randint(3, 12, (16, 1))).long()
        ids, labels = torch.randint(50, (16, 12)), torch.randint(2, (16,))
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    _, path = saved(BertForSequenceClassification(config), batch(), probes="repeatability")
    _, told = again(path, BertForSequenceClassification(config), batch(), probes="repeatability")
    assert told == SAME


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_images_in_either_order_of_memory(saved: Save, memory_format: Any) -> None:
    """The order in memory comes back, of weights too: convolutions compute by it."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())

    images = torch.randn(8, 3, 9, 9)
    first = make().to(memory_format=memory_format)
    _, path = saved(first, images.to(memory_format=memory_format))
    model = make()
    _, told = again(path, model, images)
    assert told == SAME
    assert model[0].weight.stride() == first[0].weight.stride()


class Grows(nn.Module):
    """A buffer that the first forward fills."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("cache", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = x.detach().mean(0)
        return self.linear(x) + self.cache


def filled() -> nn.Module:
    """Return one whose buffer is filled."""
    model = Grows()
    model(torch.randn(3, 4))
    return model


def small() -> nn.Module:
    """Return a plain one."""
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (filled, Grows),
        (lambda: nn.LSTM(4, 4, 2, dropout=0.2), lambda: nn.LSTM(4, 4, 2, dropout=0.2)),
        (lambda: torch.compile(small(), backend="eager"), small),
        (lambda: nn.DataParallel(small()), small),
        (lambda: torch.fx.symbolic_trace(small()), lambda: torch.fx.symbolic_trace(small())),
        (
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        ),
    ],
    ids=["grown buffer", "LSTM", "compiled", "data parallel", "fx", "parametrised"],
)
def test_models_of_all_sorts(saved: Save, make: Any, other: Any) -> None:
    """Wrappers leave no trace in names, and a buffer may be filled or not."""
    _, path = saved(make(), torch.randn(16, 4))
    assert again(path, other(), torch.randn(16, 4))[1] == SAME


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 2)), r"'0.weight' was 8x4 .*, is 9x4"),
        (lambda: nn.Sequential(nn.Linear(4, 8)), "'1' was a layer, is not there"),
        (
            lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2), nn.PReLU()),
            "'2.weight' was not there, is 1 float32",
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double(),
            "float32, is .*float64; and 1 more",
        ),
        (lambda: nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 2)), "'0.weight'.*no shape yet"),
    ],
    ids=["shape", "fewer", "more", "dtype", "lazy"],
)
def test_another_model_is_refused(saved: Save, other: Any, told: str) -> None:
    """With the names that differ; nothing is loaded."""
    _, path = saved(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(8, 4))
    model = other()
    before = [id(p) for p in model.parameters()]
    with pytest.raises(InspectionError, match=f"is of another model, Sequential: .*{told}"):
        again(path, model, torch.randn(8, 4))
    assert before == [id(p) for p in model.parameters()]


def test_what_differs_is_told(saved: Save) -> None:
    """The test has another loss by now: the first differences, and how many more."""
    _, path = saved(nn.Linear(4, 3), torch.randn(16, 4), loss=lambda output: output.mean())
    _, told = again(path, nn.Linear(4, 3), torch.randn(16, 4), loss=lambda output: output.sum())
    assert told.startswith("replayed, and not as then: loss was -0.") or "loss was 0." in told
    assert "the model gradients" in told
    assert "more" in told


def test_what_cannot_be_kept_is_the_tests_own(saved: Save) -> None:
    """An object in the batch is named with its path and type."""

    class Scale:
        by = 2.0

    class Scales(nn.Linear):
        def forward(self, x: Tensor, scale: Scale) -> Tensor:  # type: ignore[override]
            return super().forward(x) * scale.by

    _, path = saved(Scales(4, 3), Inputs(torch.randn(16, 4), scale=Scale()))
    _, told = again(path, Scales(4, 3), Inputs(torch.randn(16, 4), scale=Scale()))
    assert told.startswith(f"{SAME}\nnot in the bundle, so the test's own: inputs['kwargs']['scal")
    assert told.endswith("Scale)")


def test_a_batch_that_was_written_to_is_not_as_it_was() -> None:
    """What would be saved is what the run left."""

    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    batch = Inputs(torch.randn(16, 4))
    inspector = HookedInspector(Writes(4, 3))
    seen = []

    def hook(_: Any, run: Any, args: Any, options: Any) -> Any:
        seen.append(Recording(inspector, args, options))
        report = run(*args, **options)
        seen[-1].end()
        return report

    vars(inspector)["hook"] = hook
    inspector.run_inspection(batch)
    assert not seen[0].is_as_it_was()
