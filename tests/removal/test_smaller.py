"""Smaller copies of trained and planted networks, and what they promise."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from pytest_modelhealth import InspectionError, Inspector
from tests.removal.blind import DEAD, mlp, set_, vectors
from tests.removal.trained import digits, trained


@pytest.fixture(scope="module")
def model():
    """The trained network, with a duplicate added; tests leave it as it is."""
    model = trained().eval()
    with torch.no_grad():
        model.conv2.weight[3], model.conv2.bias[3] = model.conv2.weight[0], model.conv2.bias[0]
    return model


@pytest.fixture(scope="module")
def images():
    """All digits."""
    return digits()[0]


@pytest.fixture(scope="module")
def units(model, images):
    """Its removable units, found and proven on all digits."""
    return Inspector(model).removable(images.split(64), held_out=[images])


@pytest.fixture(scope="module")
def made(units):
    """Its smaller copy."""
    return units.smaller_copy()


def multiply_adds(model, images):
    """Multiply-adds of a forward, counted by torch."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    return counter.get_total_flops() // 2


def dead_mlp():
    """A small network with two dead units of 16, and batches."""
    model = mlp(nn.ReLU())
    set_(model[0].bias, [3, 7], DEAD)
    return model, vectors()


def test_a_trained_network_is_cut_by_every_unit_that_can_go(model, images, units, made):
    """Outputs on all data are those of the model; the duplicate and dead units are gone."""
    assert dict(made.cut) == units.indices
    assert 3 in made.cut["conv2"]
    assert not made.refused
    ours, theirs = model(images), made.model(images)
    gap = (ours - theirs).abs().max() / ours.abs().max()
    assert float(gap.detach()) == pytest.approx(made.difference)
    assert 0 < made.difference <= made.limit < 1e-4
    assert made.difference_in_training < 1e-4


def test_sizes_and_costs_are_those_that_torch_counts(model, images, made):
    """Attributes, parameters and multiply-adds, counted in another way."""
    left = {name: made.sizes[name] - len(gone) for name, gone in made.cut.items()}
    smaller = made.model
    assert smaller.conv2.out_channels == smaller.conv2.weight.shape[0] == left["conv2"]
    assert smaller.fc1.in_features == smaller.fc1.weight.shape[1] == 16 * left["conv2"]
    assert smaller.head.in_features == left["fc1"]
    assert (
        str(smaller.fc1)
        == f"Linear(in_features={16 * left['conv2']}, out_features={left['fc1']}, bias=True)"
    )
    counts = tuple(sum(p.numel() for p in one.parameters()) for one in (model, smaller))
    assert made.parameters == counts
    samples = len(images)
    assert made.multiply_adds == tuple(
        multiply_adds(one, images) // samples for one in (model, smaller)
    )


def test_the_copy_is_a_model_like_any_other(model, images, made):
    """It has the same names, goes through files and pickles, is inspected, and trains."""
    smaller = copy.deepcopy(made.model)
    assert list(smaller.state_dict()) == list(model.state_dict())
    file = io.BytesIO()
    torch.save(smaller, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    pickled = pickle.loads(pickle.dumps(smaller))
    pickled.load_state_dict(loaded.state_dict())
    assert torch.equal(pickled(images), made.model(images))
    assert Inspector(smaller).run_inspection(images[:64]).layers
    smaller.train()
    optimizer = torch.optim.SGD(smaller.parameters(), lr=1e-3)
    before = F.cross_entropy(smaller(images), digits()[1])
    before.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in smaller.parameters())
    optimizer.step()
    assert F.cross_entropy(smaller(images), digits()[1]) < before
    assert not set(map(id, smaller.parameters())) & set(map(id, model.parameters()))


def test_nothing_of_the_model_changes_and_no_number_is_drawn():
    """Parameters, gradients, buffers, mode, hooks, flags and torch's generator stay."""
    model = nn.Sequential(
        nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 4)
    )
    set_(model[1].bias, 5, DEAD)
    model.train()
    model[4].bias.requires_grad_(False)
    model(vectors()[0]).sum().backward()
    calls = []
    model[2].register_forward_hook(lambda *_: calls.append(1))
    units = Inspector(model).removable(vectors())
    before = copy.deepcopy((model.state_dict(), [p.grad for p in model.parameters()]))
    kept = list(model.parameters())
    state = torch.get_rng_state()
    smaller = units.smaller()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(now is then for now, then in zip(model.parameters(), kept, strict=True))
    after = (model.state_dict(), [p.grad for p in model.parameters()])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert smaller.training
    assert [p.requires_grad for p in smaller.parameters()] == [p.requires_grad for p in kept]
    assert smaller[1].running_mean.shape == smaller[1].bias.shape == (15,)
    assert smaller[1].num_features == 15
    del calls[:]
    smaller(vectors()[0])
    assert calls == [1]  # its hooks came along
    assert not smaller[0]._forward_hooks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    """Parameters keep their dtype, and the proof takes its rounding into account."""
    model, batches = dead_mlp()
    model, batches = model.to(dtype), [x.to(dtype) for x in batches]
    made = Inspector(model).removable(batches).smaller_copy()
    assert dict(made.cut) == {"0": (3, 7)}
    assert {p.dtype for p in made.model.parameters()} == {dtype}


def test_weights_keep_their_layout_in_memory():
    """Channels last, as convolutions run fastest on some devices."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3))
    set_(model[0].bias, 1, DEAD)
    model = model.to(memory_format=torch.channels_last)
    smaller = Inspector(model).removable([torch.randn(4, 3, 8, 8) for _ in range(3)]).smaller()
    assert smaller[2].weight.shape == (4, 5, 3, 3)
    assert smaller[2].weight.is_contiguous(memory_format=torch.channels_last)


def test_a_compiled_model_gives_a_plain_copy():
    """Layers have the names inside the wrapper, and nothing is compiled."""
    model, batches = dead_mlp()
    compiled = torch.compile(model, backend="eager")
    made = Inspector(compiled).removable(batches).smaller_copy()
    assert dict(made.cut) == {"0": (3, 7)}
    assert type(made.model) is nn.Sequential


def test_a_layer_that_is_not_made_for_training_is_cut_all_the_same():
    """The copy says that it was not run in training mode."""

    class Only(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, _ = dead_mlp()

        def forward(self, x):
            assert not self.training
            return self.inner(x)

    made = Inspector(Only()).removable(vectors()).smaller_copy()
    assert dict(made.cut) == {"inner.0": (3, 7)}
    assert made.difference_in_training is None
    assert "in which the model fails" in str(made)


def test_a_healthy_model_has_nothing_to_cut():
    """The error says so."""
    units = Inspector(mlp(nn.Tanh())).removable(vectors())
    with pytest.raises(InspectionError, match="nothing to cut: no unit of Sequential"):
        units.smaller()


def test_a_model_that_branches_is_refused_with_the_layer_and_the_operation():
    """All of it, where nothing can be cut."""

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(10, 8), nn.Linear(10, 8)
            self.out = nn.Linear(16, 2)

        def forward(self, x):
            return self.out(torch.cat([F.relu(self.left(x)), F.relu(self.right(x))], 1))

    model = Branching()
    set_(model.left.bias, 2, DEAD)
    units = Inspector(model).removable(vectors())
    with pytest.raises(InspectionError) as caught:
        units.smaller()
    assert str(caught.value).splitlines() == [
        "no unit can be cut out, so there is no smaller copy; masks() takes them out too:",
        "  left: it is concatenated with other values (`cat` in Branching)",
    ]


def test_a_way_that_other_batches_take_is_not_forgotten():
    """The held-out batch reads units by one head, a batch before by another one."""

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body, self.left, self.right = (
                nn.Linear(10, 8), nn.Linear(8, 2), nn.Linear(8, 2)
            )  # fmt: skip

        def forward(self, x):
            hidden = F.relu(self.body(x))
            return self.left(hidden) if x[0, 0] > 0 else self.right(hidden)

    model = Routed()
    set_(model.body.bias, 2, DEAD)
    batches = vectors()
    batches[0][0, 0], batches[-1][0, 0] = -1.0, 1.0
    units = Inspector(model).removable(batches)
    assert units.indices == {"body": (2,)}
    with pytest.raises(InspectionError, match=r"body: it is read by 'right.weight' in other"):
        units.smaller()


@pytest.mark.parametrize(
    ("pad", "value", "goes"),
    [((1, 2, 0, 1), 0.0, True), ((1, 1), 2.0, False), ((0, 0, 0, 0, 1, 1), 0.0, False)],
)
def test_padding_of_other_dimensions_leaves_units_in_place(pad, value, goes):
    """With zeros they can go; a constant in their channels is read, and one more channel too."""

    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Conv2d(2, 6, 3)
            self.head = nn.Conv2d(6 + (len(pad) > 4) * 2, 3, 3)

        def forward(self, x):
            return self.head(F.pad(F.relu(self.body(x)), pad, value=value))

    model = Padded().eval()
    set_(model.body.bias, 2, DEAD)
    batches = torch.randn(12, 2, 6, 6, generator=torch.Generator().manual_seed(1)).split(4)
    units = Inspector(model).removable(batches)
    assert units.indices == {"body": (2,)}
    if goes:
        smaller = units.smaller()
        assert (smaller.body.out_channels, smaller.head.in_channels) == (5, 5)
        torch.testing.assert_close(smaller(batches[0]), model(batches[0]))
    else:
        with pytest.raises(InspectionError, match="no unit can be cut out"):
            units.smaller()


def test_a_model_that_cannot_be_copied_is_refused():
    """With what the copy says."""

    class Locked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, _ = dead_mlp()

        def __deepcopy__(self, memo):
            raise TypeError("cannot pickle '_thread.lock' object")

        def forward(self, x):
            return self.inner(x)

    units = Inspector(Locked()).removable(vectors())
    with pytest.raises(InspectionError, match=r"no smaller copy: .*cannot be copied.*_thread.lock"):
        units.smaller()


def test_a_batch_that_does_not_fit_raises_what_the_model_raises():
    """It is not taken for a fault of the copy."""
    model, batches = dead_mlp()
    units = Inspector(model).removable(batches)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        units.smaller(torch.randn(4, 11))
    assert units.smaller(torch.randn(4, 10))[0].out_features == 14


def test_outputs_that_rounding_throws_about_prove_nothing():
    """A proof up to such a limit would let anything pass."""

    class Chaotic(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, _ = dead_mlp()

        def forward(self, x):
            return torch.sin(1e7 * self.inner(x))

    units = Inspector(Chaotic()).removable(vectors())
    with pytest.raises(InspectionError, match="nothing can be proven"):
        units.smaller()


def test_what_is_printed(units, made):
    """One line first, then the table, and nothing of a name reaches the terminal as it is."""
    lines = str(made).splitlines()
    assert lines[0] == repr(made)
    assert lines[0].startswith("Digits: a smaller copy with ")
    assert lines[2].split() == ["layer", "units", "left", "cut"]
    assert [line.split()[0] for line in lines[3:5]] == ["conv2", "fc1"]

    model = nn.Sequential()
    model.add_module("\x1b[31mred", dead_mlp()[0])
    text = str(Inspector(model).removable(vectors()).smaller_copy())
    assert "\\x1b[31mred.0" in text
    assert "\x1b" not in text


def test_a_loader_of_pairs(model, images):
    """With a loss batches are pairs, and the proof takes their inputs."""
    pairs = DataLoader(list(zip(images, digits()[1], strict=True)), batch_size=256)
    units = Inspector(model).removable(pairs, loss=F.cross_entropy)
    assert units.smaller_copy().parameters[1] < units.smaller_copy().parameters[0]
