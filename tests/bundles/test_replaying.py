"""An inspection that is run again gives the same report, bit for bit, and leaves no trace."""

from __future__ import annotations

import copy
import json
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import Check, Inputs, InspectionError, Setting, replay
from pytest_modelhealth.bundles.file import read
from pytest_modelhealth.report import HealthReport

from .conftest import Save


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

    def forward(self, ids: Tensor, weight: Tensor) -> Tensor:
        x = self.embedding(ids) * self.scale + self.shift
        x = x + torch.rand(x.shape, generator=self.noise)
        x = self.still(self.frozen(self.dropout(self.norm(x)))) * weight[:, None]
        return self.head(x * float(np.random.rand()) * random.random())


def batch_of(samples: int = 64) -> dict[str, Tensor]:
    """Return a mapping batch that no seed gives again."""
    return {"ids": torch.randint(11, (samples,)), "weight": torch.rand(samples)}


def plain(report: HealthReport) -> dict[str, Any]:
    """Return all that a report says but what a replay adds."""
    data = json.loads(report.render("json"))
    del data["replayed"], data["notes"]
    return data


def same(report: HealthReport) -> HealthReport:
    """Return a report that is the one of then, bit for bit."""
    assert report.observation.replayed is not None
    assert report.observation.replayed.same, report.observation.replayed.differences
    return report


def bits(model: nn.Module) -> list[bytes]:
    """Return every tensor that a model holds, as bytes."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor)]
    return [t.detach().contiguous().numpy().tobytes() for t in tensors]


def test_a_replay_is_the_same_bit_for_bit(saved: Save) -> None:
    """On another model, after other random numbers; a bare run gives the same loss."""
    model, batch, target = Everything(), batch_of(), torch.randint(11, (64,))
    bare = copy.deepcopy(model)
    bare.noise = torch.Generator()
    bare.noise.set_state(model.noise.get_state())
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    expected = F.cross_entropy(bare(**batch), target).item()
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
    then, folder = saved(model, batch, target, loss=F.cross_entropy)
    assert then.loss == expected

    torch.rand(7)
    np.random.rand(7)
    random.random()
    other = Everything()
    again = same(replay(folder, other))
    assert again.observation.replayed.differences == ()
    assert plain(again) == plain(then)
    assert again.loss == expected
    assert again.verdict == then.verdict
    assert "bit for bit" in again.observation.notes[0]


def test_a_replay_leaves_no_trace(saved: Save) -> None:
    """Model, random numbers and torch's switches are as they were, after an exception too."""
    _, folder = saved(Everything(), batch_of(), torch.randint(11, (64,)), loss=F.cross_entropy)
    other = Everything().eval()
    other.head.requires_grad_(False)
    other.noise.manual_seed(1)

    def seen() -> list[Any]:
        return [
            bits(other),
            [m.training for m in other.modules()],
            [p.requires_grad for p in other.parameters()],
            [p._version for p in other.parameters()],
            other.noise.get_state().tolist(),
            torch.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),
            random.getstate(),
            torch.get_num_threads(),
            torch.get_default_dtype(),
        ]

    before = seen()
    replay(folder, other)
    assert seen() == before

    def broken(*_: object) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replay(folder, other, loss=broken)
    assert seen() == before


def test_a_transformer_of_a_library(saved: Save) -> None:
    """A tiny BERT in training mode, its own loss, keywords and masks."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=12,
    )  # fmt: skip
    ids = torch.randint(50, (16, 12))
    mask = (torch.arange(12) < torch.randint(3, 12, (16, 1))).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(2, (16,))}
    then, folder = saved(BertForSequenceClassification(config), batch, probes="repeatability")
    again = same(replay(folder, lambda: BertForSequenceClassification(config)))
    assert plain(again)["layers"] == plain(then)["layers"]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_images_in_either_order_of_memory(saved: Save, memory_format: Any) -> None:
    """The order in memory comes back, of weights too: convolutions compute by it."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())

    seen: list[tuple[Any, ...]] = []
    images = torch.randn(8, 3, 9, 9).to(memory_format=memory_format)
    _, folder = saved(make().to(memory_format=memory_format), images)
    model = make()
    model[0].register_forward_pre_hook(
        lambda module, args: seen.append((args[0].stride(), module.weight.stride()))
    )
    strides = model[0].weight.stride()
    same(replay(folder, model))
    first = torch.empty(8, 3, 3, 3).to(memory_format=memory_format)
    assert (images.stride(), first.stride()) in seen
    assert model[0].weight.stride() == strides


def test_several_batches_each_under_its_own_random_numbers(saved: Save) -> None:
    """A loader that draws between batches is not asked again."""
    batches = [(batch_of(16), torch.randint(11, (16,))) for _ in range(3)]
    drawn = (pair for pair in batches if torch.rand(5).sum() > -1)
    then, folder = saved(Everything(), drawn, batches=True, loss=F.cross_entropy)
    again = same(replay(folder, Everything()))
    assert again.observation.batches == then.observation.batches == 3
    with pytest.raises(InspectionError, match=r"has 3 batches, and one is given"):
        replay(folder, Everything(), inputs=batch_of())


@pytest.mark.parametrize(
    "inside",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        torch.no_grad,
    ],
    ids=["autocast", "no_grad"],
)
def test_what_was_switched_on_around_it(saved: Save, inside: Any) -> None:
    """Autocast and gradients are as they were around the inspection."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with inside():
        then, folder = saved(model, torch.randn(16, 8))
    again = same(replay(folder, nn.Sequential(nn.Linear(8, 8), nn.Tanh())))
    assert again["0"].activations.dtype == then["0"].activations.dtype
    assert again.observation.backward == then.observation.backward


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
    ("make", "again"),
    [
        (filled, Grows),
        (lambda: nn.LSTM(4, 4, 2, dropout=0.2), lambda: nn.LSTM(4, 4, 2, dropout=0.2)),
        (lambda: torch.compile(small(), backend="eager"), small),
        (lambda: nn.DataParallel(small()), small),
        (lambda: nn.Sequential(nn.LazyLinear(3)), lambda: nn.Sequential(nn.LazyLinear(3))),
        (lambda: torch.fx.symbolic_trace(small()), lambda: torch.fx.symbolic_trace(small())),
        (
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        ),
    ],
    ids=["grown buffer", "LSTM", "compiled", "data parallel", "lazy", "fx", "parametrised"],
)
def test_models_of_all_sorts(saved: Save, make: Any, again: Any) -> None:
    """Wrappers leave no trace in names, and a buffer may be filled or not."""
    _, folder = saved(make(), torch.randn(16, 4))
    same(replay(folder, again()))


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    """A loss that no bundle holds."""
    return F.cross_entropy(output, target)


@pytest.mark.parametrize(
    "options",
    [
        {"loss": F.cross_entropy},
        {"loss": nn.CrossEntropyLoss(torch.tensor([0.2, 1.0, 3.0]), label_smoothing=0.1)},
        {"loss": nn.NLLLoss(reduction="sum", ignore_index=1)},
        {"loss": partial(F.cross_entropy, label_smoothing=0.2, weight=torch.tensor([1, 2.0, 0.5]))},
        {"loss": {"a": F.cross_entropy, "b": nn.MultiMarginLoss(p=2)}},
        {"loss": F.cross_entropy, "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**11)},
    ],
    ids=["function", "module", "plain module", "partial", "tasks", "scaler"],
)
def test_losses_and_scalers_of_torch_are_data(saved: Save, options: dict[str, Any]) -> None:
    """They are in the bundle with their arguments and state."""
    then, folder = saved(nn.Linear(4, 3), torch.randn(16, 4), torch.randint(3, (16,)), **options)
    again = same(replay(folder, nn.Linear(4, 3)))
    assert plain(again) == plain(then)


def own_backward(loss: Tensor) -> None:
    """A backward pass that no bundle holds."""
    (2 * loss).backward()


@pytest.mark.parametrize(
    "given",
    [
        {"loss": own_loss},
        {"loss": {"a": F.cross_entropy, "b": own_loss}},
        {"loss": F.cross_entropy, "backward": own_backward},
    ],
    ids=["loss", "task", "backward"],
)
def test_a_function_of_ones_own_is_asked_for(saved: Save, given: dict[str, Any]) -> None:
    """It is named with the line that defines it, and given it does."""
    _, folder = saved(nn.Linear(4, 3), torch.randn(16, 4), torch.randint(3, (16,)), **given)
    name, own = ("backward", own_backward) if "backward" in given else ("loss", own_loss)
    told = rf"own_{name} \(.*:{own.__code__.co_firstlineno}\), which no bundle.*replay\(.*{name}="
    with pytest.raises(InspectionError, match=told):
        replay(folder, nn.Linear(4, 3))
    same(replay(folder, nn.Linear(4, 3), **given))


def test_settings_watch_and_waivers_are_those_of_then(saved: Save) -> None:
    """With the origin of each, so that a failure says who set the limit."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].bias.fill_(-10)
    then, folder = saved(
        model,
        torch.randn(64, 8),
        watch={"pattern": "*", "types": nn.ReLU, "what": "activations"},
        settings={
            "max_dead_fraction": 0.25,
            "severity": {"finite": "warn"},
            "thresholds": {"2": {"max_grad_norm": 3}},
            "layers": ["0", "1"],
        },
        probes=("repeatability",),
    )
    again = same(replay(folder, nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))))
    assert dict(again._settings) == dict(then._settings)
    assert again._settings["max_dead_fraction"].origin == "argument of inspector"
    assert again.verdict == then.verdict == "unhealthy"
    assert again["0"].activations is None


class NoBias(Check):
    """A check of one's own."""

    name = "no_bias"
    settings = (Setting("most_layers", int, 3, "how many layers there may be", minimum=0),)

    def run(self, observation: Any, settings: Any) -> Any:
        return iter(())


def test_checks_of_ones_own_are_asked_for(saved: Save) -> None:
    """Without them the report says who did not judge."""
    _, folder = saved(
        nn.Linear(4, 3), torch.randn(16, 4), settings={"own_checks": [NoBias], "most_layers": 2}
    )
    lacking = replay(folder, nn.Linear(4, 3))
    assert any("own checks" in n and "NoBias" in n for n in lacking.observation.notes)
    again = replay(folder, nn.Linear(4, 3), own_checks=[NoBias])
    assert again._settings["most_layers"].value == 2
    assert not any("own checks" in note for note in again.observation.notes)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 2)), r"'0.weight' was 8x4 .*, is 9x4"),
        (lambda: nn.Sequential(nn.Linear(4, 8)), r"it has no '1.weight'"),
        (
            lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2), nn.PReLU()),
            r"'2.weight' is not in the bundle",
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double(),
            r"float32, is .*float64",
        ),
        (lambda: nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 2)), r"'0.weight'.*no shape yet"),
        (lambda: "a string", r"must be a torch.nn.Module"),
    ],
    ids=["shape", "fewer", "more", "dtype", "lazy", "none"],
)
def test_another_model_is_refused(saved: Save, other: Any, told: str) -> None:
    """With the names that differ; nothing is loaded."""
    _, folder = saved(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(8, 4))
    model = other()
    before = None if isinstance(model, str) else [id(p) for p in model.parameters()]
    with pytest.raises(InspectionError, match=told):
        replay(folder, model)
    assert before is None or before == [id(p) for p in model.parameters()]


@pytest.mark.parametrize("part", ["weights", "inputs"])
def test_a_part_may_be_left_out(saved: Save, part: str) -> None:
    """Weights are then the model's own, and a batch is asked for."""
    model, batch, target = nn.Linear(4, 3), torch.randn(16, 4), torch.randint(3, (16,))
    _, folder = saved(model, batch, target, loss=F.cross_entropy, without=(part,))
    if part == "weights":
        same(replay(folder, copy.deepcopy(model)))
        other = replay(folder, nn.Linear(4, 3)).observation.replayed
        assert other is not None
        assert not other.same
        assert any("weight" in difference for difference in other.differences)
    else:
        with pytest.raises(InspectionError, match=r"inputs .*left out.*give inputs="):
            replay(folder, nn.Linear(4, 3))
        same(replay(folder, nn.Linear(4, 3), inputs=batch, target=target))


def test_over_the_limit_weights_go_first(saved: Save) -> None:
    """Of 4,000 bytes of weights and 1,600 of inputs, 2,000 hold the inputs, 1,000 neither."""
    for limit, kept in ((6000, ("model", "inputs")), (2000, ("inputs",)), (1000, ())):
        _, folder = saved(nn.Linear(10, 100, bias=False), torch.randn(40, 10), limit=limit)
        missing = {lacking.path: lacking.reason for lacking in read(folder).content["missing"]}
        assert set(missing) == {"model", "inputs"} - set(kept)
        assert all("over its limit" in reason for reason in missing.values())
        folder.rename(folder.with_name(f"bundle {limit}"))


def test_own_state_instead(saved: Save) -> None:
    """`state=False` runs the batch on the model's own weights: is the fault in these?"""
    sick = nn.Linear(4, 3)
    with torch.no_grad():
        sick.weight[0, 0] = float("nan")
    _, folder = saved(sick, torch.randn(16, 4))
    assert replay(folder, nn.Linear(4, 3)).verdict == "unhealthy"
    assert replay(folder, nn.Linear(4, 3), state=False).verdict != "unhealthy"


def test_a_batch_that_was_written_to_is_told(saved: Save) -> None:
    """What is kept is then what the run left, and the replay says so."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return self.linear(x)

    _, folder = saved(Writes(), Inputs(torch.randn(16, 4)))
    notes = replay(folder, Writes()).observation.notes
    assert any("the run wrote to it" in note for note in notes)


def test_what_cannot_be_kept_is_asked_for(saved: Save) -> None:
    """An object in the batch is named with its path and type."""

    class Scale:
        by = 2.0

    class Scales(nn.Linear):
        def forward(self, x: Tensor, scale: Scale) -> Tensor:  # type: ignore[override]
            return super().forward(x) * scale.by

    batch = Inputs(torch.randn(16, 4), scale=Scale())
    _, folder = saved(Scales(4, 3), batch)
    with pytest.raises(InspectionError, match=r"lacks inputs\['scale'\] \(.*Scale\): .*inputs="):
        replay(folder, Scales(4, 3))
    same(replay(folder, Scales(4, 3), inputs=batch))
