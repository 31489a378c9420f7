"""Names of layers, which of them a pattern selects, and where their units lie."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelhealth.layers import (
    ACTIVATION_MODULES,
    FUNCTIONAL_LAYERS,
    UnitDimensions,
    activation_of,
    has_forward,
    named_modules,
)
from pytest_modelhealth.operations import _TABLE, TRAITS, having, name_of


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 2)


def names(model: nn.Module) -> list[str]:
    """Return the names of a model's layers."""
    return [named.name for named in named_modules(model)]


def test_a_module_under_two_names_is_one_layer() -> None:
    """The first name is its own, the others are aliases; a child that holds its parent is none."""
    model = Model()
    model.encoder.append(model.head)
    model.again, model.encoder.parent = model.head, model
    aliases = {named.name: named.aliases for named in named_modules(model)}
    assert list(aliases) == ["", "encoder", "encoder.0", "encoder.1", "encoder.2"]
    assert aliases["encoder.2"] == ("head", "again")


def test_wrappers_leave_no_trace_in_names() -> None:
    """A compiled or data-parallel model has the names of the model inside, as torch has them.

    Only torch's own wrappers are looked through.
    """
    expected = [name for name, _ in Model().named_modules()]
    nested = Model()
    nested.encoder = torch.compile(nested.encoder, backend="eager")
    for model in (torch.compile(Model(), backend="eager"), nn.DataParallel(Model()), nested):
        assert names(model) == expected
    own = type("DataParallel", (Model,), {})
    assert names(own()) == expected


@pytest.mark.parametrize("module", ACTIVATION_MODULES, ids=lambda m: m.__name__)
def test_every_activation_module_has_its_functional_twin(module: type[nn.Module]) -> None:
    """The function of the same name is a layer, under the same canonical name."""
    name = ACTIVATION_MODULES[module]
    assert name in FUNCTIONAL_LAYERS.values()
    function = getattr(F, name, None) or getattr(torch, name)
    assert FUNCTIONAL_LAYERS[function] == name


def test_subclasses_of_activations_are_activations() -> None:
    """A user's subclass computes the same."""
    assert activation_of(type("Mine", (nn.GELU,), {})()) == "gelu"
    assert activation_of(nn.Linear(2, 2)) is None


@pytest.mark.parametrize(
    ("module", "shape", "dimension"),
    [
        (nn.Conv2d(3, 4, 3), (2, 4, 5, 5), 1),
        (nn.Conv1d(3, 4, 3), (2, 4, 5), 1),
        (nn.BatchNorm1d(4), (2, 4), 1),
        (nn.Linear(3, 4), (2, 5, 4), 2),
        (nn.LayerNorm(4), (2, 5, 5, 4), 3),
        (nn.Linear(3, 4), (4,), None),
        (nn.ReLU(), (2, 4, 5, 5), 1),
        (nn.ReLU(), (2, 5, 4), 2),
    ],
)
def test_units_by_type(module: nn.Module, shape: tuple[int, ...], dimension: int | None) -> None:
    """Channels come second after convolutions, features last after linear layers."""
    assert UnitDimensions().of(type(module), torch.empty(shape)) == dimension


def test_an_activation_takes_the_units_of_what_came_before() -> None:
    """An activation's units lie where those of the latest layer of the same shape lay."""
    units, shape = UnitDimensions(), torch.empty(2, 5, 7)
    assert units.of(nn.ReLU, shape) == 2
    units.of(nn.Conv1d, shape)
    assert units.of(nn.ReLU, shape) == 1
    units.of(nn.Linear, shape)
    assert units.of(None, shape) == 2


def test_modules_that_only_hold_others_have_no_forward() -> None:
    """A forward set on the instance counts."""
    holder = nn.Module()
    assert not has_forward(nn.ModuleList())
    assert not has_forward(holder)
    holder.forward = lambda x: x
    assert has_forward(holder)
    assert has_forward(nn.Linear(2, 2))


# ---- operations ----------------------------------------------------------------------------------


def test_each_name_stands_once():
    """So that what is known of an operation is read off one row."""
    operations = [row.split(" : ")[0] for row in _TABLE.splitlines() if row]
    names = Counter(name for cell in operations for name in cell.replace("/", ", ").split(", "))
    assert [name for name, times in names.items() if times > 1] == []


@pytest.mark.parametrize("trait", TRAITS)
def test_each_trait_is_borne(trait: str):
    """One that no operation has any longer goes."""
    assert having(trait)


def test_an_unknown_trait_is_no_empty_answer():
    """A misspelt query would find nothing, and a check would be silent."""
    with pytest.raises(KeyError):
        having("vieew")


def test_spellings_are_one_operation():
    """By an operator, in place, batched or not; what the table does not have is its own name."""
    assert {name_of(spelling) for spelling in ("iadd", "radd", "add")} == {"add"}
    assert name_of("bmm") == name_of("matmul") == "mm"
    assert name_of("my_function") == "my_function"
    assert having("whole") < having("view")
