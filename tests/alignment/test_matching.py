"""`align` reads two models' layers and says which is which."""

from __future__ import annotations

import cProfile
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.alignment.matching import align
from pytest_modelhealth.alignment.result import Alignment, Change, Reason
from pytest_modelhealth.report import LayerRecord, Status
from tests.builders import layer, observation


def seen(model: nn.Module, batch: torch.Tensor | None = None) -> dict[str, LayerRecord]:
    """Return the layers of a model that was run once."""
    batch = torch.randn(4, 8) if batch is None else batch
    return dict(Inspector(model).run_inspection(batch).layers)


def changes(alignment: Alignment) -> dict[str, tuple[str | None, str]]:
    """Return what became of each layer, by the name in the reference or the inserted name."""
    return {p.name: (p.candidate, str(p.change)) for p in alignment.pairs if p.name}


def linear(seed: int, *sizes: int) -> nn.Linear:
    """Return a linear layer with weights of its own."""
    torch.manual_seed(seed)
    return nn.Linear(*(sizes or (8, 8)))


def mlp(*extra: tuple[int, nn.Module]) -> nn.Sequential:
    """Return a perceptron, with further layers at the given places."""
    layers: list[nn.Module] = [linear(0), nn.ReLU(), linear(1), nn.ReLU(), linear(2)]
    for place, module in extra:
        layers.insert(place, module)
    return nn.Sequential(*layers)


class Attributes(nn.Module):
    """The perceptron of `mlp`, written with attributes and functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = linear(0), linear(1), linear(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(F.relu(self.second(F.relu(self.first(x)))))


def test_a_model_aligned_with_itself_matches_in_every_layer():
    """Nothing is renamed, moved, inserted or removed between a model and itself."""
    layers = seen(mlp())
    alignment = align(layers, layers)
    assert alignment.of(Change.MATCHED) == alignment.pairs
    assert [pair.reference for pair in alignment.pairs] == [*layers]
    assert not alignment.splits


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("count", [1, 2])
def test_layers_inserted_into_a_sequential_shift_no_match(place, count):
    """The numbers behind an inserted layer move by one, and mean other layers than before."""
    inserted = [(place, nn.Identity()) for _ in range(count)]
    alignment = align(seen(mlp()), seen(mlp(*inserted)))
    expected = {i: i if i < place else i + count for i in range(5)}
    assert alignment.to_candidate == {"": ""} | {str(i): str(j) for i, j in expected.items()}
    new = [pair.candidate for pair in alignment.of(Change.INSERTED)]
    assert new == [str(place + i) for i in range(count)]
    assert not alignment.of(Change.REMOVED, Change.MOVED, Change.RETYPED)


def test_sequential_into_attributes_with_functional_activations():
    """A `Sequential` rewritten as a class keeps its layers under new names."""
    alignment = align(seen(mlp()), seen(Attributes()))
    assert changes(alignment) == {
        "0": ("first", "renamed"),
        "1": ("relu", "renamed"),
        "2": ("second", "renamed"),
        "3": ("relu_1", "renamed"),
        "4": ("third", "renamed"),
    }
    back = align(seen(Attributes()), seen(mlp()))
    assert back.to_candidate == {v: k for k, v in alignment.to_candidate.items()}


def test_a_name_is_not_believed_where_the_size_is_another():
    """Of other weights too, layers after a new bottleneck are found by their sizes."""
    reference = nn.Sequential(linear(0), linear(1))
    candidate = nn.Sequential(linear(2, 8, 16), linear(3, 16, 8), linear(4), linear(5))
    alignment = align(seen(reference), seen(candidate))
    assert alignment.to_candidate == {"": "", "0": "2", "1": "3"}


def test_a_wrapped_block_changes_prefixes_and_names_the_wrapper():
    """Around the same layers, only the wrapper is new."""
    reference = nn.Sequential(OrderedDict(body=mlp(), head=linear(3, 8, 2)))
    candidate = nn.Sequential(OrderedDict(body=nn.Sequential(mlp()), head=linear(3, 8, 2)))
    alignment = align(seen(reference), seen(candidate))
    assert alignment.to_candidate["body.2"] == "body.0.2"
    assert alignment.to_candidate["head"] == "head"
    assert len(alignment.of(Change.INSERTED)) == 1
    assert {
        pair.change for pair in alignment.pairs if (pair.reference or "").startswith("body.")
    } == {Change.RENAMED}


def test_another_type_under_one_name_is_retyped():
    """An activation that was exchanged is the same layer of another type."""
    candidate = mlp()
    candidate[1] = nn.GELU()
    alignment = align(seen(mlp()), seen(candidate))
    assert [(p.reference, p.candidate) for p in alignment.of(Change.RETYPED)] == [("1", "1")]
    candidate[1] = nn.Identity()
    assert [p.name for p in align(seen(mlp()), seen(candidate)).of(Change.RETYPED)] == ["1"]


def test_a_function_and_its_module_are_of_one_kind():
    """`F.relu` turned into `nn.ReLU` is renamed, not retyped."""
    alignment = align(seen(Attributes()), seen(mlp()))
    assert not alignment.of(Change.RETYPED)


class Ordered(nn.Module):
    """Three layers called in any order."""

    def __init__(self, *order: str) -> None:
        super().__init__()
        self.order = order
        self.a, self.b, self.c, self.norm = linear(0), linear(1), linear(2), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order:
            x = getattr(self, name)(x)
        return x


def test_the_number_of_a_function_is_no_name_of_a_module():
    """Where the first activation is gone, the function called ``relu`` is the second one."""

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = linear(2), linear(3)

        def forward(self, x):
            return F.relu(self.second(self.first(x)))

    names = ("first", "relu", "second", "act")
    plain = [nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.ReLU()]
    whole = nn.Sequential(OrderedDict(zip(names, plain, strict=True)))
    found = changes(align(seen(whole), seen(Fused())))
    assert found["relu"] == (None, "removed")
    assert found["act"] == ("relu", "renamed")


def test_layers_that_run_in_another_order_are_moved():
    """One layer that changed its place is moved; those it passed are not."""
    alignment = align(seen(Ordered("a", "norm", "b", "c")), seen(Ordered("a", "b", "c", "norm")))
    assert [pair.name for pair in alignment.of(Change.MOVED)] == ["norm"]
    assert alignment.to_candidate["norm"] == "norm"


def test_swapped_weights_are_no_swapped_layers():
    """Two layers that have each other's weights keep their names: the weights are what changed."""
    candidate = Ordered("a", "b", "c", "norm")
    candidate.a, candidate.b = linear(1), linear(0)
    reference = seen(Ordered("a", "b", "c", "norm"))
    alignment = align(reference, seen(candidate))
    assert alignment.of(Change.MATCHED) == alignment.pairs
    candidate.c.extra = nn.Identity()  # so that the two structures differ
    alignment = align(reference, seen(candidate))
    assert alignment.to_candidate["a"] == "a"
    assert alignment.to_candidate["b"] == "b"


class Projections(nn.Module):
    """Query, key and value, from one projection or from three."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        whole = linear(5, 8, 24)
        self.fused = fused
        self.before = linear(1)
        if fused:
            self.qkv = whole
        else:
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
            for part, weight, bias in zip(
                (self.q, self.k, self.v), whole.weight.chunk(3), whole.bias.chunk(3), strict=True
            ):
                part.weight.data, part.bias.data = weight.data.clone(), bias.data.clone()
        self.out = linear(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        q, k, v = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        return self.out(q * k.sigmoid() + v)


def test_a_split_projection_is_recognised_by_its_rows():
    """The parts of a fused projection are named, and all around them is aligned."""
    fused, split = seen(Projections(fused=True)), seen(Projections(fused=False))
    alignment = align(fused, split)
    assert alignment.splits == (Reason("split", "qkv", ("q", "k", "v")),)
    assert [pair.name for pair in alignment.of(Change.REMOVED)] == ["qkv"]
    assert alignment.to_candidate["out"] == "out"
    assert align(split, fused).splits == (Reason("fused", "qkv", ("q", "k", "v")),)


def test_other_weights_are_no_split():
    """Three layers with weights of their own are not the parts of a projection."""
    other = Projections(fused=False)
    nn.init.normal_(other.k.weight)
    assert align(seen(Projections(fused=True)), seen(other)).splits == ()


def test_a_batch_norm_folded_into_a_convolution_is_said():
    """The convolution gives what the batch norm gave, and both say so."""
    torch.manual_seed(0)
    reference = nn.Sequential(
        OrderedDict(conv=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4), act=nn.ReLU())
    ).eval()
    reference.bn.running_mean.normal_()
    folded = nn.utils.fuse_conv_bn_eval(reference.conv, reference.bn)
    candidate = nn.Sequential(OrderedDict(conv=folded, act=nn.ReLU())).eval()
    batch = torch.randn(2, 3, 8, 8)
    alignment = align(seen(reference, batch), seen(candidate, batch))
    assert alignment.by_reference["conv"].output_of == "bn"
    assert alignment.by_reference["bn"].change is Change.REMOVED
    assert alignment.by_reference["bn"].reason == Reason("folded", "conv", ("bn",))
    assert alignment.by_reference["bn"].note == "is folded into conv"
    assert alignment.to_candidate["act"] == "act"


def test_transposed_weights_are_the_same_weights():
    """A layer that keeps its weight transposed is found again under another name and type."""

    class Conv1D(nn.Module):
        def __init__(self, of: nn.Linear) -> None:
            super().__init__()
            self.weight = nn.Parameter(of.weight.detach().T.clone())
            self.bias = nn.Parameter(of.bias.detach().clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight + self.bias

    reference = nn.Sequential(OrderedDict(c_fc=Conv1D(linear(0, 8, 6)), out=linear(1, 6, 8)))
    candidate = nn.Sequential(OrderedDict(up=linear(0, 8, 6), out=linear(1, 6, 8)))
    alignment = align(seen(reference), seen(candidate))
    assert alignment.to_candidate["c_fc"] == "up"
    assert alignment.by_reference["c_fc"].change is Change.RETYPED


def test_models_without_a_layer_in_common_align_in_nothing_but_the_root():
    """Layers of other types and shapes are removed and inserted, not paired."""
    reference = seen(nn.Sequential(OrderedDict(a=nn.Linear(8, 3), b=nn.Tanh())))
    candidate = seen(nn.Sequential(OrderedDict(c=nn.Conv1d(4, 5, 3), d=nn.MaxPool1d(2))))
    alignment = align(reference, candidate)
    assert alignment.to_candidate == {"": ""}


def test_layers_never_called_are_matched_too():
    """What no batch reaches still ends in one pair, by its name or else by its parameters."""
    weight = {"weight": torch.arange(4.0)}
    idle = {"status": Status.NOT_CALLED, "parameters": weight}
    reference, again, other = (
        observation(layer("a"), layer(name, **idle)).layers
        for name in ("unused", "unused", "spare")
    )
    alignment = align(reference, again)
    assert alignment.of(Change.MATCHED) == alignment.pairs
    renamed = align(reference, other)
    assert renamed.by_reference["unused"].candidate == "spare"


def test_every_layer_of_both_sides_is_in_exactly_one_pair():
    """No layer passes silently, whatever the two models are."""
    torch.manual_seed(3)
    kinds = [nn.ReLU, nn.Tanh, nn.Identity, lambda: nn.LayerNorm(8), lambda: nn.Linear(8, 8)]
    for _ in range(30):
        chosen = torch.randint(len(kinds), (2, 9)).tolist()
        sides = [seen(nn.Sequential(*(kinds[i]() for i in side))) for side in chosen]
        pairs = align(*sides).pairs
        assert sorted(p.reference for p in pairs if p.reference is not None) == sorted(sides[0])
        assert sorted(p.candidate for p in pairs if p.candidate is not None) == sorted(sides[1])


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


def calls_to_align(count: int) -> int:
    """Return how many functions are called to align as many blocks."""
    sides = renamed_blocks(count)
    profile = cProfile.Profile()
    profile.runcall(align, *sides)
    return sum(entry.callcount for entry in profile.getstats())


def test_a_thousand_renamed_layers_are_aligned():
    """The work grows with the gaps between sure matches, not with the square of the model."""
    alignment = align(*renamed_blocks(500))
    assert len(alignment.of(Change.RENAMED)) == 1000
    assert alignment.to_candidate["block77.act"] == "layer77.act"
    assert calls_to_align(500) < 2.5 * calls_to_align(250)


def test_layers_that_only_share_a_shape_are_not_paired():
    """The weights of an attention and its output may have one shape, and are not the same thing."""

    class Head(nn.Module):
        def __init__(self, function: object) -> None:
            super().__init__()
            self.before, self.function, self.after = linear(0), function, linear(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(self.function(self.before(x)))

    reference = Head(lambda x: F.scaled_dot_product_attention(x, x, x))
    candidate = Head(lambda x: (x @ x.mT / 8**0.5).softmax(-1) @ x)
    batch = torch.randn(2, 8, 8)
    alignment = align(seen(reference, batch), seen(candidate, batch))
    assert [p.name for p in alignment.of(Change.REMOVED)] == ["scaled_dot_product_attention"]
    assert [p.name for p in alignment.of(Change.INSERTED)] == ["softmax"]


class Fresh(nn.Module):
    """A convolution and a batch norm that divides by the root of 1.00001."""

    def __init__(self, norm: nn.Module, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.act = nn.Conv2d(3, 4, 3, bias=False), norm, nn.ReLU()
        with torch.no_grad():
            self.conv.weight *= scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.bn(self.conv(x)))


def test_a_fold_that_hardly_changes_a_weight_is_one_all_the_same():
    """Five digits of its extremes may stay."""
    batch = torch.randn(2, 3, 6, 6)
    reference = seen(Fresh(nn.BatchNorm2d(4), 1.0).eval(), batch)
    candidate = seen(Fresh(nn.Identity(), (1 + 1e-5) ** -0.5).eval(), batch)
    assert align(reference, candidate).by_reference["bn"].reason == Reason(
        "folded", "conv", ("bn",)
    )
    dropped = seen(Fresh(nn.Identity(), 1.0).eval(), batch)
    assert align(reference, dropped).by_reference["bn"].reason is None


class Scaled(nn.Module):
    """A model with a parameter of its own, beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.first = nn.Parameter(linear(0).weight.detach()), linear(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.first(x), self.weight)


def test_the_model_is_the_model_though_a_layer_has_its_parameter():
    """A layer of the candidate may have what the model held by itself."""
    inside = nn.Sequential(OrderedDict(first=linear(1), second=linear(0)))
    inside.second.bias = None
    alignment = align(seen(Scaled()), seen(inside))
    assert alignment.by_reference[""].candidate == ""
    assert alignment.by_candidate["second"].reference is None


def test_equal_values_tell_which_of_several_like_layers_is_which():
    """The first layer was unrolled: three stand for it before those of the others."""
    reference = seen(nn.Sequential(OrderedDict(a=linear(0), b=linear(1), c=linear(2))))
    unrolled = [linear(0), linear(0), linear(0), linear(1), linear(1), linear(2), linear(2)]
    found = align(reference, seen(nn.Sequential(*unrolled)))
    partners = [found.by_reference[name].candidate for name in "abc"]
    assert partners[0] in "012"
    assert partners[1] in "34"
    assert partners[2] in "56"
