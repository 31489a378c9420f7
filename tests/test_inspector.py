"""`Inspector`: what a user calls, and what bad input gets."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from corpus.models.branching import Net
from pytest_modelhealth import (
    HealthReport,
    Inputs,
    InspectionError,
    Inspector,
    LayerNotFoundError,
    TensorStatistics,
)


@pytest.fixture
def model():
    """A small model."""
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x():
    """A batch for it."""
    torch.manual_seed(1)
    return torch.randn(40, 8)


def test_layers_stand_in_execution_order_with_functional_ones(model, x):
    """Modules are named as named_modules() does, function calls after their caller."""
    report = Inspector(model).run_inspection(x)
    assert list(report.layers)[:8] == [
        "",
        "blocks",
        "blocks.0",
        "blocks.0.fc1",
        "blocks.0.norm",
        "blocks.0.relu",
        "blocks.0.fc2",
        "blocks.1",
    ]
    assert set(dict(model.named_modules())) <= set(report.layers)


def test_statistics_are_those_of_the_tensors(model, x):
    """What a report says of a layer equals NumPy's answer on the tensor itself."""
    kept = {}
    handle = model.head.register_forward_hook(lambda m, a, out: kept.update(out=out.detach()))
    report = Inspector(model).run_inspection(x)
    handle.remove()
    truth = kept["out"].double().numpy()
    seen = report["head"].activations
    assert seen.mean == pytest.approx(truth.mean(), rel=1e-12)
    assert seen.std == pytest.approx(truth.std(), rel=1e-12)
    assert seen.count == truth.size


@pytest.mark.parametrize(
    "inputs",
    [
        lambda x, m: Inputs(x, 2.0, mask=m),
        lambda x, m: {"x": x, "scale": 2.0, "mask": m},
        lambda x, m: Inputs(x, scale=2.0, mask=m),
    ],
)
def test_a_batch_goes_in_as_positionals_keywords_or_both(inputs, model, x):
    """Every spelling of the same call gives the same numbers."""
    mask = (torch.arange(8) % 2).float()
    expected = model(x, 2.0, mask=mask)
    report = Inspector(model).run_inspection(inputs(x, mask))
    assert report["head"].activations.mean == pytest.approx(expected.double().mean().item())
    unmasked = model(x, 2.0).double().mean().item()
    for batch in ((x, 2.0), [x, 2.0]):
        seen = Inspector(model).run_inspection(batch)["head"].activations.mean
        assert seen == pytest.approx(unmasked)


def test_loss_is_the_users_with_and_without_a_target(model, x):
    """`loss(output, target)` with a target, `loss(output)` without."""
    labels = torch.randint(0, 3, (40,))
    report = Inspector(model).run_inspection(x, labels, loss=F.cross_entropy)
    assert report.loss == pytest.approx(F.cross_entropy(model(x), labels).item())
    report = Inspector(model).run_inspection(x, loss=lambda out: out.square().mean())
    assert report.loss == pytest.approx(model(x).square().mean().item())


def test_without_a_loss_the_projection_is_fixed_and_passes_softmax(model, x):
    """Two inspections give the same gradients, and a softmax at the end does not hide them."""
    probabilities = nn.Sequential(model, nn.Softmax(dim=-1))
    one, two = (Inspector(probabilities).run_inspection(x) for _ in range(2))
    assert one["0.head"].gradients.norm == two["0.head"].gradients.norm > 1e-3
    assert one[""].gradients.norm == pytest.approx(1.0, abs=0.3)


def test_own_loss_of_a_model_is_taken(x):
    """An output with a `loss` is differentiated there."""

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 3)

        def forward(self, x):
            logits = self.fc(x)
            return {"logits": logits, "loss": logits.square().mean()}

    model = WithLoss()
    assert Inspector(model).run_inspection(x).loss == pytest.approx(model(x)["loss"].item())


def test_watch_restricts_what_is_observed(model, x):
    """Only the roles and layers that some `watch` names are observed."""
    inspector = Inspector(model).watch("blocks.0.*", what="activations")
    report = inspector.watch("head", what=("gradients", "parameters")).run_inspection(x)
    assert report["blocks.0.fc1"].activations is not None
    assert report["blocks.0.relu"].activations is not None
    assert report["blocks.0.fc1"].gradients is None
    assert report["blocks.1.fc1"].activations is None
    assert report["head"].activations is None
    assert report["head"].gradients is not None
    assert list(report["head"].parameters) == ["weight", "bias"]


def test_watch_by_regular_expression_and_type(model, x):
    """A compiled pattern is searched for; `types` selects modules by class."""
    report = Inspector(model).watch(re.compile(r"\.fc\d$"), "activations").run_inspection(x)
    assert [r.name for r in report if r.activations] == [
        "blocks.0.fc1",
        "blocks.0.fc2",
        "blocks.1.fc1",
        "blocks.1.fc2",
    ]
    report = Inspector(model).watch(types=nn.LayerNorm).run_inspection(x)
    assert [r.name for r in report if r.activations] == ["blocks.0.norm", "blocks.1.norm"]


def test_get_statistics_and_the_latest_report(model, x):
    """`get_statistics` reads the latest report, merged over a role's tensors."""
    inspector = Inspector(model)
    report = inspector.run_inspection(x)
    assert inspector.report is report
    assert inspector.get_statistics("head") is report["head"].activations
    merged = inspector.get_statistics("head", what="parameters")
    assert isinstance(merged, TensorStatistics)
    assert merged.count == 8 * 3 + 3


def test_run_batches_merges(model, x):
    """Statistics over batches are those of what the model returns for each batch, all together."""
    report = Inspector(model).run_batches(x.split(10))
    assert report.observation.batches == 4
    assert report.observation.samples == 40
    # batch by batch: a matrix product may round otherwise in one of another size
    with torch.no_grad():
        truth = torch.cat([model(batch) for batch in x.split(10)]).double().numpy()
    merged = report["head"].activations
    assert (merged.count, merged.min, merged.max) == (truth.size, truth.min(), truth.max())
    assert (merged.mean, merged.std) == pytest.approx((truth.mean(), truth.std()), rel=1e-6)
    assert report["head"].parameters["weight"].count == 24


def test_report_pickles_and_copies(model, x):
    """A report is data: it survives pickling, with its verdict."""
    report = Inspector(model).run_inspection(x)
    for other in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert isinstance(other, HealthReport)
        assert other.to_dict() == report.to_dict()
        assert other.verdict == report.verdict


def test_report_read_late_says_what_one_read_at_once_says(model, x):
    """What became of the model since does not show in records that nobody had asked for."""
    read, late = Inspector(model).run_inspection(x).to_dict(), Inspector(model).run_inspection(x)
    copied = copy.deepcopy(Inspector(model).run_inspection(x))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_().requires_grad_(False)
    model.head = nn.Linear(1, 1)
    Inspector(model.eval().blocks).run_inspection(torch.ones(2, 8))
    assert late.to_dict() == copied.to_dict() == read


def test_report_that_nobody_read_holds_no_model(x):
    """Its records are made later, from numbers alone."""
    model = Net()
    held = [weakref.ref(thing) for thing in (model, *model.modules(), *model.parameters())]
    report = Inspector(model).run_inspection(x)
    del model
    gc.collect()
    assert [reference() for reference in held if reference() is not None] == []
    assert report.layers["head"].parameters["weight"].count == 24


def test_pattern_that_matches_nothing(model, x):
    """`watch` names the nearest layer; a functional layer that never ran shows in the run."""
    with pytest.raises(LayerNotFoundError, match=r"did you mean 'blocks\.0\.norm'"):
        Inspector(model).watch("blocks.0.nrm")
    with pytest.raises(LayerNotFoundError, match=r"'blocks.0.gelu' matches no layer"):
        Inspector(model).watch("blocks.0.gelu").run_inspection(x)


def test_asking_for_what_was_not_seen(model, x):
    """The error says why there is nothing."""
    inspector = Inspector(model)
    inspector.run_inspection(x, backward=False)
    with pytest.raises(LayerNotFoundError, match="did you mean 'head'"):
        inspector.get_statistics("heads")
    with pytest.raises(InspectionError, match="no gradients were seen of layer 'head'"):
        inspector.get_statistics("head", what="gradients")


def test_demanding_a_backward_pass_that_cannot_be(model, x):
    """`backward=True` fails where there is no path; left to itself it is said and passed over."""
    with torch.no_grad():
        report = Inspector(model).run_inspection(x)
        assert "no backward pass" in report.observation.notes[0]
        with pytest.raises(InspectionError, match=r"torch\.no_grad"):
            Inspector(model).run_inspection(x, backward=True)
    with pytest.raises(InspectionError, match="depends on nothing that requires a gradient"):
        Inspector(nn.Tanh()).run_inspection(x, backward=True)


def test_run_batches_over_a_loader_of_pairs(model, x):
    """With a loss, parameter gradients and the loss are those of plain steps on each batch."""
    rows = [{"x": row, "mask": (row > -0.5).float()} for row in x]
    data = [*zip(rows, torch.randint(0, 3, (40,)), strict=True)]
    loader = torch.utils.data.DataLoader(data, batch_size=10)
    report = Inspector(model).run_batches(loader, loss=F.cross_entropy)
    losses, gradients = [], []
    for inputs, label in loader:
        model.zero_grad()
        loss = F.cross_entropy(model(**inputs), label)
        loss.backward()
        losses.append(loss.item())
        gradients.append(model.head.weight.grad.double())
    truth = torch.stack(gradients).numpy()
    seen = report["head"].parameter_gradients["weight"]
    assert report.loss == pytest.approx(sum(losses) / 4)
    assert seen.count == truth.size
    assert (seen.mean, seen.std) == pytest.approx((truth.mean(), truth.std()), rel=1e-6)


def test_max_batches_takes_no_more_from_an_iterator_that_goes_on(model, x):
    """What is left of an iterator of the user's can be taken afterwards."""
    batches = iter(x.split(10))
    Inspector(model).run_batches(batches, max_batches=3)
    assert len(list(batches)) == 1
