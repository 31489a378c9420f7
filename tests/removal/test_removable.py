"""`Inspector.removable` on a trained network, and what it promises."""

import copy
import multiprocessing
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

from corpus.removal import CASES, DEAD, Units, digits, mlp, set_, trained, vectors
from pytest_modelhealth import InspectionError, Inspector
from tests.capture.oracle import changes, fingerprint


@pytest.mark.parametrize("name", CASES)
def test_what_was_planted_is_found_and_nothing_else(name):
    """Each unit that can go, of each sort, in each layer; and why look-alikes stay."""
    case = CASES[name]()
    result = Inspector(case.model).removable(case.batches, **case.options)
    found = {
        layer.name: Units(layer.inactive, layer.duplicates) for layer in result.layers.values()
    }
    assert found == case.expected
    assert set(result.refused) == case.refused


@pytest.fixture(scope="module")
def model():
    """The trained network; tests leave it as it is."""
    return trained()


@pytest.fixture(scope="module")
def images():
    """Some of the digits."""
    return digits()[0][:500]


@pytest.fixture(scope="module")
def result(model, images):
    """Its removable units."""
    return Inspector(model).removable(DataLoader(images, batch_size=64))


def without(model, layer, unit, norms=()):
    """A copy in which one unit gives nothing: its weights and those of its norm are zero."""
    model = copy.deepcopy(model).eval()
    for name in (layer, *norms):
        for parameter in model.get_submodule(name).parameters():
            with torch.no_grad():
                parameter[unit] = 0.0
    return model


def test_a_trained_network_loses_the_units_that_nothing_would_miss(result, model, images):
    """Each unit by itself is taken away by hand: outputs stay on all data if and only if listed."""
    expected = model.eval()(images)
    for layer, norms in (("conv1", ["norm1"]), ("conv2", []), ("fc1", [])):
        units = model.get_submodule(layer).weight.shape[0]
        missed = [
            unit
            for unit in range(units)
            if torch.equal(without(model, layer, unit, norms)(images), expected)
        ]
        assert list(result.indices.get(layer, ())) == missed
    assert sum(map(len, result.indices.values())) > 3


def test_masked_for_good_it_computes_the_same(result, model, images):
    """The masks are for torch's pruning, and `prune.remove` makes them stay."""
    pruned = copy.deepcopy(model).eval()
    expected = pruned(images)
    for name, mask in result.masks().items():
        owner, _, own = name.rpartition(".")
        prune.custom_from_mask(pruned.get_submodule(owner), own, mask)
        prune.remove(pruned.get_submodule(owner), own)
        assert (pruned.get_parameter(name) == 0).sum() >= (mask == 0).sum() > 0
    assert torch.equal(pruned(images), expected)


def test_the_norm_is_masked_too():
    """Masked in the convolution alone, a channel would give what the norm's shift makes of zero."""
    case = CASES["dead_channels_behind_batch_norm"]()
    result = Inspector(case.model).removable(case.batches)
    assert {n for n in result.masks() if n.startswith("bn1")} == {"bn1.weight", "bn1.bias"}
    expected = case.model.eval()(case.batches[0])
    with torch.no_grad():
        for name, mask in result.masks().items():
            case.model.get_parameter(name).mul_(mask)
    assert torch.equal(case.model(case.batches[0]), expected)


def test_the_model_is_as_it_was():
    """Bit for bit: values, versions, gradients, modes, hooks, frozen parameters, random numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(), nn.Flatten(),
        nn.Linear(8 * 36, 4), nn.ReLU(), nn.Linear(4, 2),
    )  # fmt: skip
    set_(model[1].bias, [1, 2], DEAD)
    model[5].weight.requires_grad_(False)
    model[3].eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    batches = [torch.randn(8, 3, 8, 8) for _ in range(3)]
    before, versions = fingerprint(model, batches), [p._version for p in model.parameters()]
    result = Inspector(model).removable(batches)
    assert result.indices["0"] == (1, 2)
    assert changes(before, fingerprint(model, batches)) == []
    assert [p._version for p in model.parameters()] == versions


def test_an_interrupted_search_leaves_no_mask():
    """Ctrl-C, as the model runs masked, and everything is put back."""

    class Interrupted(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp(nn.ReLU())
            set_(self.inner[0].bias, 3, DEAD)

        def forward(self, x):
            if self.inner[0].bias[3] == 0.0:
                raise KeyboardInterrupt
            return self.inner(x)

    model = Interrupted()
    before = pickle.dumps(model.state_dict())
    with pytest.raises(KeyboardInterrupt):
        Inspector(model).removable(vectors())
    assert pickle.dumps(model.state_dict()) == before


def test_watched_layers_alone_and_those_of_a_compiled_model():
    """`watch` limits what is looked at; compiled code runs uncompiled, under the names inside."""
    case = CASES["dead_before_functional_relu"]()
    assert set(Inspector(case.model).watch("fc2").removable(case.batches).indices) == {"fc2"}
    case = CASES["dead_by_bias"]()
    result = Inspector(torch.compile(case.model)).removable(case.batches)
    assert result.indices == {"0": (3, 7)}


def test_one_batch_in_five_is_held_out():
    """The first among them and eight at most, of a generator too: it is read once."""
    case = CASES["dead_by_bias"]()
    batches = vectors(count=11)
    result = Inspector(case.model).removable(batch for batch in batches)
    assert result.indices == {"0": (3, 7)}
    assert (result.samples, result.held_out_samples) == (8 * 32, 3 * 32)
    result = Inspector(case.model).removable(batches * 5)
    assert (result.samples, result.held_out_samples) == (47 * 32, 8 * 32)


def test_a_unit_that_fires_on_held_out_batches_stays():
    """The other one of its layer goes."""
    model, batches = mlp(nn.ReLU()), vectors()
    set_(model[0].weight, [4, 5], torch.eye(10)[0])
    set_(model[0].bias, [4, 5], torch.tensor([-6.0, -60.0]))
    batches[0][0, 0] = 8.0
    result = Inspector(model).removable(batches)
    assert result.indices == {"0": (5,)}
    assert result.refused == {"0": "1 inactive over 128 samples, but not on held-out ones"}


def test_of_units_that_only_look_alike_each_is_proven():
    """One that is read where no gradient goes stays; what is dead beside it goes."""
    case = CASES["read_without_gradients"]()
    set_(case.model.fc1.weight, [1, 9], 0.0)
    set_(case.model.fc1.bias, [1, 9], 0.0)
    result = Inspector(case.model).removable(case.batches)
    assert result.indices == {"fc1": (1, 9)}
    assert result.refused["fc1"] == "7 inactive over 128 samples, but masking moves an output"


def test_pairs_with_a_loss():
    """As from a loader of a labelled data set; the report has the loss."""
    case = CASES["dead_by_bias"]()
    data = TensorDataset(torch.cat(vectors()), torch.zeros(192, dtype=torch.long))
    result = Inspector(case.model).removable(DataLoader(data, batch_size=32), loss=F.cross_entropy)
    assert result.indices == {"0": (3, 7)}
    assert result.report.loss is not None
    assert (result.samples, result.held_out_samples) == (128, 64)


def test_few_samples_and_no_units_judge_nothing():
    """Of four samples many a unit is silent by chance: the check says so, and the text.

    So it does where no layer but the last makes units.
    """
    nothing = Inspector(nn.Sequential(nn.Linear(10, 3), nn.ReLU())).removable(vectors())
    assert "no units to look at" in repr(nothing)
    case = CASES["dead_by_bias"]()
    result = Inspector(case.model, max_removable_fraction=0.1).removable([x[:4] for x in vectors()])
    (found,) = result.report.inconclusive
    assert (found.check, found.layer) == ("removable_units", "0")
    assert "16 samples say nothing about units" in found.reason
    assert "16 samples are few" in str(result)


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        ("constant_behind_a_norm", "0", "masking moves an output"),
        ("restless", "inner.0", "gives another output each time"),
    ],
)
def test_refused_units_have_a_reason(name, layer, reason):
    """What the proof was against."""
    case = CASES[name]()
    result = Inspector(case.model).removable(case.batches)
    assert result.indices == {}
    assert reason in result.refused[layer]


@pytest.mark.parametrize(
    ("batches", "arguments", "message"),
    [
        ([], {}, "takes two batches with samples at least, and has none"),
        (vectors()[:1], {}, "takes two batches with samples at least, and has 1"),
        (iter(vectors()[:1]), {}, "and has 1: units are found on some batches, and proven on ot"),
        ([vectors()[0], vectors()[0][:0]], {}, "and has 1"),
        (["one", "two"], {}, "and has none"),
        ({"x": 1}, {}, "batches must be batches to iterate over.*not a dict"),
        (vectors(), {"loss": F.mse_loss}, "batch 0 is a Tensor, not a pair"),
        (
            TensorDataset(vectors()[0]),
            {},
            "such as DataLoader.dataset, batch_size=64.*not a TensorDataset",
        ),
    ],
)
def test_batches_that_say_nothing_are_refused(batches, arguments, message):
    """The message says what was wrong, and what would do."""
    with pytest.raises(InspectionError, match=message):
        Inspector(mlp(nn.ReLU())).removable(batches, **arguments)


def test_models_without_weights_to_mask_are_refused():
    """A program has none of its own, a lazy model none yet, and some take no gradient."""
    program = torch.export.export(mlp(nn.ReLU()), (vectors()[0],))
    with pytest.raises(InspectionError, match=r"removable masks the weights of a torch\.nn\.Modul"):
        Inspector(program).removable(vectors())
    with pytest.raises(InspectionError, match="the model is lazy, and has no units yet"):
        Inspector(nn.Sequential(nn.LazyLinear(4), nn.ReLU())).removable(vectors())
    with torch.inference_mode():  # torch would say so of its own assignment, not of the model
        model = mlp(nn.ReLU())
    with pytest.raises(InspectionError, match=r"made under torch\.inference_mode"):
        Inspector(model).removable(vectors())


@pytest.mark.parametrize("wrong", [1, 0, 5], ids=["found on", "held out", "held out too"])
def test_a_note_says_which_batch_failed(wrong):
    """By its number in what was given, also where it comes later than it was read."""
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    batches = [torch.ones(4, 3 if number == wrong else 8) for number in range(7)]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        Inspector(net).removable(iter(batches))
    assert f"This was batch {wrong}, counted from 0, of removable." in caught.value.__notes__


def test_the_text_has_the_line_the_layers_and_the_proof(result):
    """Each number in it is one of the record's."""
    line, _, titles, *rows = str(result).splitlines()
    count = sum(map(len, result.indices.values()))
    assert line == repr(result)
    assert line.startswith(f"Digits: {count} of 112 units can go")
    assert titles.split() == ["layer", "units", "inactive", "duplicate", "go", "which"]
    for row, layer in zip(rows, result.layers.values(), strict=False):
        name, units, inactive, *_ = row.split()
        assert (name, int(units), int(inactive)) == (layer.name, layer.units, len(layer.inactive))
    assert (
        f"looked for on {result.samples:,} samples, and on {result.held_out_samples} held-out "
        "ones; with the inactive ones masked, each output there is the same, bit for bit"
    ) in str(result)


def test_a_name_full_of_markup():
    """It is escaped for the terminal and a notebook."""
    name = "<b>\n\x1b[31m$x^2$"
    model = nn.Sequential()
    model.add_module(name, nn.Linear(10, 8))
    model.add_module("relu", nn.ReLU())
    model.add_module("out", nn.Linear(8, 2))
    set_(model._modules[name].bias, 3, DEAD)
    result = Inspector(model).removable(vectors())
    assert 3 in result.indices[name]
    assert r"<b>\n\x1b[31m" in str(result)
    assert all(letter.isprintable() or letter == "\n" for letter in str(result))
    assert "<b>\\n" not in result._repr_html_()
    assert "&lt;b&gt;" in result._repr_html_()


class Broken(TensorDataset):
    """Its last sample cannot be read."""

    def __getitem__(self, index):
        if index == len(self) - 1:
            raise ValueError("unreadable")
        return super().__getitem__(index)[0]


@pytest.mark.parametrize("data", [Broken(vectors()[0]), torch.ones(8, 3)])
def test_what_fails_leaves_no_worker(data):
    """An exception of the data or of a layer keeps frames alive, and no process."""
    loader = DataLoader(data, batch_size=2, num_workers=1)
    with pytest.raises((ValueError, RuntimeError), match=r"unreadable|cannot be mult") as caught:
        Inspector(mlp(nn.ReLU())).removable(loader)
    assert caught.value.__traceback__ is not None
    assert not multiprocessing.active_children()
