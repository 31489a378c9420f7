"""What the flow answers, on models built wrong and on their right twins."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.models import flowing
from corpus.models.flowing import Forgetful, Free, Net, Recurrent
from pytest_modelhealth import Inspector
from pytest_modelhealth.errors import InspectionError, LayerNotFoundError
from pytest_modelhealth.report import Flow, Kind


def flow_of(model: nn.Module, *inputs: Tensor, **options: Any) -> Flow:
    """Inspect a model on a batch and return its flow."""
    flow = Inspector(model).run_inspection(inputs, **options).flow
    assert flow is not None
    return flow


@pytest.fixture(scope="module")
def right() -> Flow:
    """The flow of the net that is right."""
    return flow_of(Net(), torch.randn(16, 4))


@pytest.fixture(scope="module")
def cut() -> Flow:
    """The flow of the net that detaches its trunk."""
    return flow_of(Net(detach=True), torch.randn(16, 4))


def test_who_stands_next_to_a_layer(right: Flow) -> None:
    """Operations between are passed, layers are not; a layer that holds others is all of them."""
    assert right.is_exact
    assert right.producers("stem") == right.inputs == ("input 0",)
    assert set(right.producers("head")) >= {"side", "blocks.4.fc2", "blocks.4.gate", "stem"}
    assert right.consumers("stem") == (*(f"blocks.{number}.fc1" for number in range(5)), "head")
    assert right.consumers("blocks.0.gate") == right.consumers("blocks.0.fc2")
    assert right.consumers("head") == ("output", "loss")
    assert right.producers("blocks.0") == ("stem", "blocks.0.gate")
    for end in ("output", "loss"):  # whether what a layer returned, or computed from it
        assert right.producers(end) == ("head",)
        assert {"head", "side", "blocks.4"} <= right.feeding(end)
        assert "unused" not in right.feeding(end)


def test_what_values_and_gradients_get_to(right: Flow, cut: Flow) -> None:
    """Behind a detach a layer reaches the loss by its values alone."""
    assert "loss" in right.reach("stem", by="gradient")
    assert "loss" in cut.reach("stem", by="value")
    assert "loss" not in cut.reach("stem", by="gradient")
    assert right.reach("unused") == frozenset()
    assert {"head", "stem", "blocks.2", "input 0"} <= right.used
    assert "unused" not in right.used == right.feeding("output", "loss")
    assert right.branch("blocks.0.fc2") == {"blocks.0.fc1", "blocks.0.gelu", "blocks.0.fc2"}
    assert "stem" in right.branch("blocks.0")
    assert right.last_of("stem", "blocks.3.fc1", "side") == ("blocks.3.fc1", "side")
    assert right.last_of("stem", "head") == ("head",)
    assert cut.last_of("stem", "head", by="gradient") == ("stem", "head")


def test_a_cut_is_named_with_its_operation_line_and_ends(right: Flow, cut: Flow) -> None:
    """Where all ways let gradients through there is none; what it costs ends in one place."""
    assert right.cut_between("blocks.1") == () == cut.cut_between("side")
    (found,) = cut.cut_between("blocks.1")
    assert (found.operation, found.source, found.target) == ("detach", "blocks.4", "head")
    path, _, line = found.line.rpartition(":")
    assert path == flowing.__file__
    assert "h.detach()" in Path(path).read_text().splitlines()[int(line) - 1]
    assert str(found) == f"`detach` at {found.line}, between blocks.4 and head"
    lost = ["stem", "blocks.0.fc1", "blocks.4.fc2"]
    endings = cut.endings([*lost, "unused"])  # what is computed in vain has no cut
    assert {name: ending.last for name, ending in endings.items()} == {
        **dict.fromkeys(lost, "blocks.4.fc2"),
        "unused": "unused",
    }
    assert (endings["stem"].cut, endings["unused"].cut) == (found, None)


def test_a_recurrence_that_is_cut_says_where() -> None:
    """A cut for each call but the last, made in it or outside; a way past it lets all through."""
    x = torch.randn(16, 5, 4)
    detached = Recurrent(lambda h: h.detach())
    (found,) = flow_of(detached, x).cut_recurrences()
    assert (found.layer, found.calls, found.takes_more) == ("cell", 5, True)
    assert [cut.operation for cut in found.cuts] == ["detach"] * 4
    detached.takes_steps = False
    assert not flow_of(detached, x[:, :1]).cut_recurrences()[0].takes_more
    model = Recurrent(lambda h: h)
    assert flow_of(model, x).cut_recurrences() == ()
    for keeps, cells in ((False, ["cell"]), (True, [])):
        model.cell = Forgetful(keeps=keeps)
        assert [one.layer for one in flow_of(model, x).cut_recurrences()] == cells


def test_vertices_are_asked_for_by_number(right: Flow) -> None:
    """What lies inside a layer, what comes of a vertex, what it is made of up to the next layer."""
    vertices = right.graph.vertices
    (stem,) = right.inside("stem")
    assert vertices[stem].name == "stem"
    assert right.inside("blocks.0.fc1") < right.inside("blocks.0")
    assert right.inside("head") < right.after(stem)
    assert right.inside("side").isdisjoint(right.after(stem))
    (given,) = right.calls("blocks.1")[0].inputs
    made_of = {vertices[number].name for number in right.origins(given)}
    assert made_of == {"stem", "blocks.0.gate", "blocks.0.fc2"}
    assert right.origins(stem) == {stem}
    (joined,) = (n for n, v in enumerate(vertices) if v.function == "cat")
    inputs = right.calls("head")[0].inputs
    assert joined not in right.origins(*inputs)
    assert right.origins(*inputs, others={joined}) == {joined}


def test_the_operations_between_two_layers_are_told_with_their_lines(right: Flow) -> None:
    """In order, whatever they are; what lies behind another layer is not between."""
    (joined,) = right.operations("side", "head")
    assert (joined.function, joined.kind) == ("cat", Kind.OPERATION)
    path, _, line = joined.line.rpartition(":")
    assert "torch.cat([h" in Path(path).read_text().splitlines()[int(line) - 1]
    names = [made.function for made in right.operations("blocks.3.fc2", "head")]
    assert names == ["mul", "add", "add", "cat"]
    assert right.operations("blocks.4", "head") == (joined,)
    assert right.operations("stem", "blocks.1.fc1", "side") == right.operations(
        "stem", "blocks.1.fc1"
    )
    assert right.operations("stem", "side") == () == right.operations("head", "stem")


IDS = torch.arange(20).reshape(4, 5) % 9


def test_sources_that_are_not_the_batch_are_seen(right: Flow) -> None:
    """A look-up of a constant, a gate of zero or learned, a mask, an input that nothing reads."""

    def run(net: Free, ids: Tensor, ignored: Tensor) -> Tensor:
        x = net.token(ids) + net.position(torch.zeros_like(ids))
        return (0 * net.lin(x) + x).masked_fill(~net.mask[None, :, None], 0.0)

    flow = flow_of(Free(run), IDS, torch.randn(4, 5))
    assert flow.producers("position") == ("zeros_like",)
    assert flow.producers("token") == ("input 0",)
    assert right.is_gated("blocks.1.fc2")
    assert flow.is_gated("lin")
    assert not right.is_gated("stem")
    assert "mask" in {vertex.name for vertex in flow.graph.vertices}
    assert flow.consumers("input 1") == ()


def test_a_sweep_tells_every_layer_what_comes_to_it(right: Flow, cut: Flow) -> None:
    """From before or from after it, next to it or from afar, by value or by gradient."""
    number = {layer: place for place, layer in enumerate(right.layers)}

    def nearest(layer: str, came: int | None) -> int | None:
        return number.get(layer, came)

    def least(layer: str, came: int | None) -> int:
        return min(number.get(layer, 99), 99 if came is None else came)

    before = right.sweep(nearest, max)
    for layer in right.layers:
        producers = [number[p] for p in right.producers(layer) if p in number]
        assert before.get(layer) == max(producers, default=None)
    after = right.sweep(nearest, max, back=True)
    assert after["stem"] == after["side"] == number["head"] == after["blocks.4.gate"]
    assert right.sweep(least, min)["head"] == number["stem"]
    assert cut.sweep(least, min, by="gradient")["head"] == number["side"]
    gone = cut.sweep(nearest, max, back=True, by="gradient")
    assert ("stem" in gone, "side" in gone) == (True, True)
    assert "blocks.4.fc2" in after
    assert "blocks.4.fc2" not in gone
    held = right.sweep(lambda layer, came: layer if layer == "blocks.1" else came, max)
    assert [layer for layer in right.layers if layer in held] == [
        *(f"blocks.{number}.{name}" for number in (2, 3, 4) for name in ("fc1", "gelu", "fc2")),
        "head",
    ]
    with pytest.raises(InspectionError, match='"value" or "gradient"'):
        right.sweep(nearest, max, by="both")  # type: ignore[arg-type]


def test_a_sweep_takes_the_operations_inside_a_layer_as_one() -> None:
    """What a layer computes of its own counts once, whichever of its operations takes it."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight) * 2 + x

    flow = flow_of(nn.Sequential(nn.Linear(4, 4), Plain(), nn.Linear(4, 4)), torch.randn(16, 4))
    came = flow.sweep(lambda layer, came: (came or 0) + 1, max)
    assert [came[layer] for layer in flow.layers] == [1, 2, 3]


@pytest.mark.parametrize(
    ("index", "is_whole"),
    [((slice(None), None), True), ((...,), True), ((slice(None, None, 2),), False)],
    ids=["axis", "all", "part"],
)
def test_indexing_that_takes_all_values_gives_them_as_they_are(index: Any, is_whole: bool) -> None:
    """As unsqueeze does; a part is no longer what the model was given."""
    flow = flow_of(Free(lambda net, x: net.lin(x[index])), torch.randn(16, 4))
    assert flow.consumers("input 0") == ("lin",)
    assert flow.consumers("input 0", as_it_is=True) == (("lin",) if is_whole else ())


def test_what_a_batch_or_a_buffer_that_is_a_view_is_called() -> None:
    """What it is a view of was made before the run."""
    placed = Free(lambda net, ids: net.token(ids) + net.position(net.places))
    flow = flow_of(placed, IDS.repeat(2, 1)[:4])
    assert flow.producers("token") == flow.inputs == ("input 0",)
    assert flow.producers("position") == ("places",)


def test_what_leaves_for_python_is_read_and_a_new_leaf_has_a_past() -> None:
    """An input of which a number is taken is not one that nothing reads."""

    def run(net: Free, x: Tensor, count: Tensor, flag: Tensor) -> Tensor:
        half = x * 0.5
        half.requires_grad_()
        return net.lin(half[: int(count)]) if flag else x

    flow = flow_of(Free(run), torch.randn(16, 4), torch.tensor(8), torch.tensor(True))
    read = [v for v in flow.graph.vertices if v.name == "item"]
    names = {flow.graph.vertices[operand].name for vertex in read for operand in vertex.operands}
    assert names == {"input 1", "input 2"}
    assert "lin" in flow.reach("input 0")
    assert "lin" not in flow.reach("input 0", by="gradient")


def test_values_that_are_made_alike_are_told_from_others() -> None:
    """By the same layers and functions of the same: not by another layer, nor of other values."""

    def run(net: Free, x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            again = F.relu(net.lin(x)).unsqueeze(0)
        return F.relu(net.lin(x)), again, F.relu(net.other(x)), F.relu(net.lin(2 * x))

    flow = flow_of(Free(run), torch.randn(16, 4))
    first, again, other, doubled = flow.graph.outputs
    assert flow.is_alike(first, again)
    assert not flow.is_alike(first, other)
    assert not flow.is_alike(first, doubled)


def test_names_that_nothing_has_are_refused_with_the_nearest(right: Flow) -> None:
    """As everywhere a layer is named."""
    with pytest.raises(LayerNotFoundError, match=r"'blocks\.0\.fc3'.*blocks\.0\.fc"):
        right.producers("blocks.0.fc3")
    with pytest.raises(InspectionError, match='"value" or "gradient", not \'both\''):
        right.reach("stem", by="both")  # type: ignore[arg-type]


def test_a_flow_is_data(right: Flow) -> None:
    """It survives pickling, prints a line a layer, and holds no tensor."""
    copy = pickle.loads(pickle.dumps(right))
    assert copy == right
    lines = str(copy).splitlines()
    assert lines[1] == "blocks.0.fc1 <- stem"
    assert "blocks.1.fc1 <- stem, blocks.0.fc2, blocks.0.gate by add, mul" in lines
    assert "blocks.4.fc1 <- blocks.2.gate, blocks.3.fc2, blocks.3.gate, 6 before them" in lines[13]
    assert repr(right).endswith("exact>")
