"""`align` reads two models' layers and says which is which."""

from __future__ import annotations

import cProfile

import pytest
import torch
from torch import Tensor, nn

from corpus.models.aligned import CASES, linear, mlp, named
from pytest_modelhealth import Inspector
from pytest_modelhealth.alignment.matching import align
from pytest_modelhealth.alignment.result import Alignment, Change, Reason
from pytest_modelhealth.report import LayerRecord, Status
from tests.builders import layer, observation


def seen(model: nn.Module, batch: Tensor | None = None) -> dict[str, LayerRecord]:
    """Return the layers of a model that was run once."""
    batch = torch.randn(4, 8) if batch is None else batch
    return dict(Inspector(model).run_inspection(batch).layers)


def changes(alignment: Alignment) -> dict[str, str]:
    """Return what became of each layer, by the name in the reference or the inserted name."""
    return {p.name: f"{p.change} {p.candidate or ''}".rstrip() for p in alignment.pairs if p.name}


@pytest.mark.parametrize("case", CASES)
def test_which_layer_is_which(case: str) -> None:
    """Each ends renamed, moved, retyped, inserted, removed or as it was; and the root is the root.

    Every layer of both sides is in exactly one pair.
    """
    reference, candidate, expected = CASES[case]
    sides = seen(reference), seen(candidate)
    alignment = align(*sides)
    found = changes(alignment)
    assert {name: found.get(name) for name in expected} == expected
    assert alignment.by_reference[""].candidate == ""
    pairs = alignment.pairs
    assert sorted(p.reference for p in pairs if p.reference is not None) == sorted(sides[0])
    assert sorted(p.candidate for p in pairs if p.candidate is not None) == sorted(sides[1])


def test_a_model_aligned_with_itself_matches_in_every_layer() -> None:
    """Nothing is renamed, moved, inserted or removed between a model and itself."""
    layers = seen(mlp())
    alignment = align(layers, layers)
    assert alignment.of(Change.MATCHED) == alignment.pairs
    assert [pair.reference for pair in alignment.pairs] == [*layers]


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("count", [1, 2])
def test_layers_inserted_into_a_sequential_shift_no_match(place: int, count: int) -> None:
    """The numbers behind an inserted layer move by one, and mean other layers than before."""
    inserted = [(place, nn.Identity()) for _ in range(count)]
    alignment = align(seen(mlp()), seen(mlp(*inserted)))
    expected = {i: i if i < place else i + count for i in range(5)}
    assert alignment.to_candidate == {"": ""} | {str(i): str(j) for i, j in expected.items()}
    new = [pair.candidate for pair in alignment.of(Change.INSERTED)]
    assert new == [str(place + i) for i in range(count)]
    assert not alignment.of(Change.REMOVED, Change.MOVED, Change.RETYPED)


@pytest.mark.parametrize("is_fresh", [False, True])
def test_a_batch_norm_folded_into_a_convolution_is_said(is_fresh: bool) -> None:
    """The convolution gives what the norm gave, and both say so.

    A fresh norm divides by the root of 1.00001: five digits of the weight's extremes may stay.
    """
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
    if not is_fresh:
        norm.running_mean.normal_()
    folded = nn.utils.fuse_conv_bn_eval(conv.eval(), norm.eval())
    reference, candidate, dropped = (
        seen(named(**sides, act=nn.ReLU()).eval(), torch.randn(2, 3, 8, 8))
        for sides in ({"conv": conv, "bn": norm}, {"conv": folded}, {"conv": conv})
    )
    alignment = align(reference, candidate)
    assert alignment.by_reference["conv"].output_of == "bn"
    assert alignment.by_reference["bn"].change is Change.REMOVED
    assert alignment.by_reference["bn"].reason == Reason("folded", "conv", ("bn",))
    assert alignment.by_reference["bn"].note == "is folded into conv"
    assert alignment.to_candidate["act"] == "act"
    assert align(reference, dropped).by_reference["bn"].reason is None


def test_an_activation_in_the_layer_before_it_is_said() -> None:
    """What a layer has taken over is told by what it gives: a batch norm and the ReLU behind."""

    class Fused(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return (y + y.abs()) / 2  # a ReLU that is no function of torch's

    torch.manual_seed(0)
    conv, norm = nn.Conv2d(3, 4, 3).eval(), nn.BatchNorm2d(4).eval()
    norm.running_mean.normal_()
    fused, batch = Fused(3, 4, 3), torch.randn(2, 3, 8, 8)
    fused.load_state_dict(nn.utils.fuse_conv_bn_eval(conv, norm).state_dict())
    reference = seen(named(conv=conv, bn=norm, act=nn.ReLU()).eval(), batch)
    alignment = align(reference, seen(named(conv=fused), batch))
    assert alignment.by_reference["act"].reason == Reason("folded", "conv", ("bn", "act"))
    assert alignment.by_reference["conv"].output_of == "act"


def test_layers_never_called_are_matched_too() -> None:
    """What no batch reaches still ends in one pair, by its name or else by its parameters."""
    weight = {"weight": torch.arange(4.0)}
    idle = {"status": Status.NOT_CALLED, "parameters": weight}
    reference, again, other = (
        observation(layer("a"), layer(name, **idle)).layers
        for name in ("unused", "unused", "spare")
    )
    alignment = align(reference, again)
    assert alignment.of(Change.MATCHED) == alignment.pairs
    assert align(reference, other).by_reference["unused"].candidate == "spare"


def renamed_blocks(count: int) -> tuple[dict[str, LayerRecord], dict[str, LayerRecord]]:
    """Return two sides of as many blocks, all renamed, each with a weight of its own."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(4, generator=generator) for _ in range(count)]

    def side(prefix: str) -> dict[str, LayerRecord]:
        records = []
        for index, weight in enumerate(weights):
            records.append(layer(f"{prefix}{index}.fc", parameters={"weight": weight}))
            records.append(layer(f"{prefix}{index}.act", type_name="ReLU", activation="relu"))
        return dict(observation(*records).layers)

    return side("block"), side("layer")


def test_a_thousand_renamed_layers_are_aligned() -> None:
    """The work grows with the gaps between sure matches, not with the square of the model."""
    calls = []
    for count in (250, 500):
        profile = cProfile.Profile()
        alignment = profile.runcall(align, *renamed_blocks(count))
        calls.append(sum(entry.callcount for entry in profile.getstats()))
    assert len(alignment.of(Change.RENAMED)) == 1000
    assert alignment.to_candidate["block77.act"] == "layer77.act"
    assert calls[1] < 2.5 * calls[0]


def test_equal_values_tell_which_of_several_like_layers_is_which() -> None:
    """The first layer was unrolled: three stand for it before those of the others."""
    reference = seen(named(a=linear(0), b=linear(1), c=linear(2)))
    found = align(reference, seen(nn.Sequential(*map(linear, (0, 0, 0, 1, 1, 2, 2)))))
    partners = [found.by_reference[name].candidate for name in "abc"]
    assert all(one in some for one, some in zip(partners, ("012", "34", "56"), strict=True))
