"""`Inspector.removable` on a trained network, and what it promises."""

import copy
import json
import multiprocessing
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

from corpus.removal import CASES, DEAD, Pooled, Units, digits, mlp, set_, trained, vectors
from pytest_modelhealth import InspectionError, Inspector


@pytest.mark.parametrize("name", CASES)
def test_what_was_planted_is_found_and_nothing_else(name):
    """Each unit that can go, of each sort, in each layer; and why look-alikes stay."""
    case = CASES[name]()
    result = Inspector(case.model).removable(case.batches, **case.options)
    found = {
        layer.name: Units(layer.inactive, layer.duplicates, layer.unread)
        for layer in result.layers.values()
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
    """`apply` puts on masks that torch's pruning knows, and `prune.remove` makes them stay."""
    pruned = copy.deepcopy(model).eval()
    expected = pruned(images)
    result.apply(pruned)
    assert prune.is_pruned(pruned)
    assert torch.equal(pruned(images), expected)
    for name, mask in result.masks().items():
        owner, _, own = name.rpartition(".")
        prune.remove(pruned.get_submodule(owner), own)
        assert (pruned.get_parameter(name) == 0).sum() >= (mask == 0).sum() > 0
    assert torch.equal(pruned(images), expected)


def test_the_norm_is_masked_too():
    """Masked in the convolution alone, a channel would give what the norm's shift makes of zero."""
    case = CASES["dead_channels_behind_batch_norm"]()
    result = Inspector(case.model).removable(case.batches)
    assert {n for n in result.masks() if n.startswith("bn1")} == {"bn1.weight", "bn1.bias"}
    expected = case.model.eval()(case.batches[0])
    result.apply(case.model)
    assert torch.equal(case.model(case.batches[0]), expected)


def test_what_units_cost_is_what_a_narrower_network_saves():
    """Parameters and multiply-adds are those of two networks written by hand."""
    model, x = mlp(nn.ReLU(), hidden=16), torch.randn(1, 10)
    set_(model[0].bias, [0, 5, 6], DEAD)
    result = Inspector(model).removable(vectors())
    wide, narrow = (mlp(nn.ReLU(), hidden=n) for n in (16, 13))
    sizes = [sum(p.numel() for p in m.parameters()) for m in (wide, narrow)]
    work = [Inspector(m).summary(x).totals["multiply_adds"] for m in (wide, narrow)]
    assert (result.parameters, result.multiply_adds) == (sizes[0] - sizes[1], work[0] - work[1])
    assert result.layers["0"].parameters == result.parameters


def test_rows_and_columns_of_one_weight_count_once():
    """A weight between two layers with units that go loses both, and the corner only once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    set_(model[0].bias, [1, 2], DEAD)
    set_(model[2].bias, slice(None), 1.0)
    set_(model[2].bias, 3, DEAD)
    result = Inspector(model).removable(vectors())
    wide, narrow = 10 * 8 + 8 + 8 * 6 + 6 + 6 * 2, 10 * 6 + 6 + 6 * 5 + 5 + 5 * 2
    assert result.parameters == wide - narrow
    assert result.multiply_adds == (80 + 48 + 12) - (60 + 30 + 10)


def test_merged_duplicates_move_outputs_by_no_more_than_rounding():
    """By hand: the twin takes the outgoing weights, and the outputs stay within the limit."""
    case = CASES["duplicate_rows"]()
    result = Inspector(case.model).removable(case.batches)
    merged = copy.deepcopy(case.model)
    with torch.no_grad():
        for unit, twin in result.layers["0"].duplicates:
            merged[2].weight[:, twin] += merged[2].weight[:, unit]
            merged[2].weight[:, unit] = 0.0
    expected = case.model(case.batches[-1])
    moved = ((merged(case.batches[-1]) - expected).abs().max() / expected.abs().max()).item()
    assert moved <= result.proof.limit < 1e-4
    assert result.masks() == {}
    assert result.proof.merged <= result.proof.limit


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
    gradient = model[0].weight.grad
    batches = [torch.randn(8, 3, 8, 8) for _ in range(3)]
    given = copy.deepcopy(batches)
    before = pickle.dumps(model)
    versions = [p._version for p in model.parameters()]
    generator = torch.get_rng_state()
    result = Inspector(model).removable(batches)
    assert result.indices["0"] == (1, 2)
    assert pickle.dumps(model) == before
    assert [p._version for p in model.parameters()] == versions
    assert model[0].weight.grad is gradient
    assert [m.training for m in model] == [True, True, True, False, True, True, True, True]
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(map(torch.equal, batches, given))


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


def test_without_a_length_some_batches_are_held_out_all_the_same():
    """A generator is read once; the last batch, and one in five before it, are for the proof."""
    case = CASES["dead_by_bias"]()
    batches = vectors(count=11)
    result = Inspector(case.model).removable(batch for batch in batches)
    assert result.indices == {"0": (3, 7)}
    assert (result.samples, result.held_out_samples) == (8 * 32, 3 * 32)


def test_batches_of_ones_own_for_the_proof():
    """They alone are proven on: there a unit fires that did not before."""
    model = mlp(nn.ReLU())
    set_(model[0].weight, [4, 5], torch.eye(10)[0])
    set_(model[0].bias, [4, 5], torch.tensor([-6.0, -60.0]))
    far = vectors()[0]
    far[0, 0] = 8.0
    result = Inspector(model).removable(vectors(), held_out=[far])
    assert result.indices == {"0": (5,)}
    assert (result.samples, result.held_out_samples) == (192, 32)
    assert result.refused == {
        "0": "1 unit was inactive over 192 samples but fires on held-out ones"
    }


def test_pairs_with_a_loss():
    """As from a loader of a labelled data set; the report has the loss."""
    case = CASES["dead_by_bias"]()
    data = TensorDataset(torch.cat(vectors()), torch.zeros(192, dtype=torch.long))
    result = Inspector(case.model).removable(
        DataLoader(data, batch_size=32), loss=F.cross_entropy, max_batches=3
    )
    assert result.indices == {"0": (3, 7)}
    assert result.report.loss is not None
    assert (result.samples, result.held_out_samples) == (64, 32)


def test_few_samples_judge_nothing():
    """Of four samples many a unit is silent by chance: the check says so, and the text."""
    case = CASES["dead_by_bias"]()
    result = Inspector(case.model, max_removable_fraction=0.1).removable([x[:4] for x in vectors()])
    (found,) = result.report.inconclusive
    assert (found.check, found.layer) == ("removable_units", "0")
    assert "16 samples say nothing about units" in found.reason
    assert "16 samples are few" in str(result)


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        ("duplicates_that_a_sum_reads", "a", "1 unit is a duplicate, but `add` reads it"),
        ("constant_behind_a_norm", "0", "masking moves an output by"),
        ("restless", "inner.0", "gives another output each time"),
    ],
)
def test_refused_units_have_a_reason(name, layer, reason):
    """What the proof was against."""
    case = CASES[name]()
    result = Inspector(case.model).removable(case.batches)
    assert result.indices == {}
    assert reason in result.refused[layer]


def test_watched_layers_alone():
    """`watch` limits the layers that are looked at."""
    case = CASES["dead_before_functional_relu"]()
    assert set(Inspector(case.model).watch("fc2").removable(case.batches).indices) == {"fc2"}


def test_a_compiled_model():
    """It runs uncompiled, and its layers have the names they have inside."""
    case = CASES["dead_by_bias"]()
    result = Inspector(torch.compile(case.model)).removable(case.batches)
    assert result.indices == {"0": (3, 7)}


@pytest.mark.parametrize(
    ("batches", "arguments", "message"),
    [
        ([], {}, "there was no batch to run: batches is empty"),
        (vectors(), {"max_batches": 0}, "there was no batch to run"),
        (vectors()[:1], {}, "there is one batch only.*or others as held_out="),
        (vectors(), {"max_batches": 1}, "there is one batch only"),
        (iter(vectors()[:1]), {}, "there is one batch only"),
        (vectors(), {"held_out": []}, "held_out has no batch"),
        (vectors(), {"held_out": 3}, "held_out must be batches to iterate over"),
        ([vectors()[0][:0]] * 2, {}, "no batch to run: batches is empty or without samples"),
        ([vectors()[0], vectors()[0][:0]], {}, "there is one batch only"),
        (vectors(), {"held_out": [vectors()[0][:0]]}, "held_out has no batch with samples"),
        (vectors(), {"max_batches": "3"}, "max_batches must be a whole number from 0 on, not '3'"),
        ({"x": 1}, {}, "batches must be batches to iterate over.*not a dict"),
        (["one", "two"], {}, "batch 0 is a str without any tensor"),
        (vectors(), {"loss": F.mse_loss}, "batch 0 is a Tensor, not a pair"),
        (vectors(), {"held_out": ["one"]}, "batch 0 of held_out is a str without any tensor"),
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
    with pytest.raises(InspectionError, match="the model is lazy"):
        Inspector(nn.Sequential(nn.LazyLinear(4), nn.ReLU())).removable(vectors())
    with torch.inference_mode():  # torch would say so of its own assignment, not of the model
        model = mlp(nn.ReLU())
    with pytest.raises(InspectionError, match=r"made under torch\.inference_mode"):
        Inspector(model).removable(vectors())


@pytest.mark.parametrize(
    ("batches", "held_out", "note"),
    [
        ([8, 3, 8], None, "This was batch 1, counted from 0, of removable."),
        (iter([8] * 4 + [3] + [8] * 7), None, "This was batch 4, counted from 0, of removable."),
        ([8, 8], [8, 3], "This was batch 1 of held_out, counted from 0, of removable."),
    ],
    ids=["found", "kept for the proof", "held out"],
)
def test_a_note_says_which_batch_failed(batches, held_out, note):
    """By its number in what was given, also where it comes later than it was read."""

    def made(widths):
        return None if widths is None else (torch.ones(4, width) for width in widths)

    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        Inspector(net).removable(made(batches), held_out=made(held_out))
    assert note in caught.value.__notes__


def test_masks_go_on_the_model_they_are_for(result, model):
    """Nothing is masked where one of them does not fit."""
    other = copy.deepcopy(model)
    other.fc1 = nn.Linear(512, 65)
    with pytest.raises(InspectionError, match=r"mask of 'fc1\.\w+' is of shape .*, and Digits has"):
        result.apply(other)
    assert not prune.is_pruned(other)
    with pytest.raises(InspectionError, match="takes the model to mask"):
        result.apply("digits")
    with pytest.raises(InspectionError, match="that the script was made of"):
        result.apply(torch.jit.script(model))


def test_the_text_has_the_line_the_layers_and_the_proof(result):
    """Each number in it is one of the record's."""
    line, _, titles, *rows = str(result).splitlines()
    count = sum(map(len, result.indices.values()))
    assert line == repr(result)
    assert line.startswith(f"Digits: {count} of 112 units can go: ")
    assert titles.split() == [
        "layer", "units", "inactive", "duplicate", "unread", "go", "params", "mult-adds", "which",
    ]  # fmt: skip
    for row, layer in zip(rows, result.layers.values(), strict=False):
        name, units, inactive, *_ = row.split()
        assert (name, int(units), int(inactive)) == (layer.name, layer.units, len(layer.inactive))
    assert f"found on {result.samples:,} samples" in str(result)
    assert f"on {result.held_out_samples:,} held-out ones is the same, bit for bit" in str(result)


@pytest.mark.parametrize(
    ("pool", "width", "reader"),
    [
        (lambda x: x, 1024, None),
        (lambda x: x.mean((2, 3)), 16, None),
        (lambda x: x.mean(2), 128, None),
        (lambda x: F.max_pool2d(x, 2).mean((2, 3)), 16, None),
        (lambda x: x.mean(1), 64, "head, behind a mean"),
        (lambda x: x.amax(1), 64, "`amax`"),
        (nn.GroupNorm(4, 16), 1024, "pool"),
    ],
    ids=["none", "pixels", "rows", "pooled", "mean of units", "maximum of units", "norm"],
)
def test_units_that_no_cut_takes_out_are_to_be_masked(pool, width, reader):
    """A norm, a mean and a maximum over units read them all, be they zero."""
    found = Inspector(Pooled(pool, width)).removable(torch.randn(320, 1, 8, 8).split(64))
    assert found.indices == {"conv": (0, 1, 2)}
    if reader is None:
        assert "Pooled: 3 of 16 units can go: " in str(found)
        assert "no effect" not in str(found)
    else:
        assert "can go" not in str(found)
        assert repr(found) == "Pooled: 3 of 16 units have no effect, to be masked"
        told = f"conv: 3 units have no effect; to be masked, not cut: read by {reader}"
        assert told in str(found)
        assert found.parameters == 0


def test_data_for_other_tools(result, tmp_path):
    """JSON says what the object says."""
    result.to_json(tmp_path / "units.json")
    data = json.loads((tmp_path / "units.json").read_text(encoding="utf-8"))
    assert {one["name"]: tuple(one["removable"]) for one in data["layers"]} == result.indices
    assert data["proof"]["samples"] == result.held_out_samples
    assert data["removable_parameters"] == result.parameters
    with pytest.raises(InspectionError, match="to_json takes the path"):
        result.to_json(3)


def test_the_figure_has_a_row_for_each_layer(result):
    """A run of colour for each run of units, the counts on the right."""
    figure = result.plot()
    texts = [text.get_text() for text in figure.axes[0].texts]
    sizes = {"conv1": 16, "conv2": 32, "fc1": 64}
    shown = [text for text in texts if text in sizes or " of " in text]
    assert shown[-6:] == [
        part
        for name, size in sizes.items()
        for part in (name, f"{len(result.indices.get(name, ()))} of {size}")
    ]
    runs = sum(sum(unit - 1 not in units for unit in units) for units in result.indices.values())
    assert len(figure.axes[0].patches) == len(sizes) + runs + 4  # rows, and what colours mean


def test_nothing_to_look_at_is_said():
    """Without linear layers and convolutions, and where all of them give outputs."""
    result = Inspector(nn.Sequential(nn.Linear(10, 3), nn.ReLU())).removable(vectors())
    assert "no units to look at" in repr(result)
    with pytest.raises(InspectionError, match="there is nothing to draw"):
        result.plot()


def test_a_name_full_of_markup():
    """It is escaped for the terminal, a notebook and a figure."""
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
    result.plot().draw_without_rendering()


class Broken(TensorDataset):
    """Its last sample cannot be read."""

    def __getitem__(self, index):
        if index == len(self) - 1:
            raise ValueError("unreadable")
        return super().__getitem__(index)[0]


@pytest.mark.parametrize("is_held_out", [False, True])
def test_a_loader_that_fails_leaves_no_worker(is_held_out):
    """Its exception, which keeps frames alive, keeps no process."""
    loader = DataLoader(Broken(vectors()[0]), batch_size=2, num_workers=1)
    arguments = {"held_out": loader} if is_held_out else {}
    with pytest.raises(ValueError, match="unreadable") as caught:
        Inspector(mlp(nn.ReLU())).removable(vectors() if is_held_out else loader, **arguments)
    assert caught.value.__traceback__ is not None
    assert not multiprocessing.active_children()
