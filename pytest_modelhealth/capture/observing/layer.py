"""`Layer`: what is kept of one layer while a model runs, and how it is set up."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth.layers import ACTIVATION_MODULES, ATTENTION
from pytest_modelhealth.report import Option, ZeroSlices
from pytest_modelhealth.report.parts import Placement
from pytest_modelhealth.statistics import Entries, Entry, TensorStatistics


@dataclass(init=False, eq=False)
class Layer:
    """One layer: what it is, what its calls took and gave, and why that may be missing.

    What has the name of a field of `LayerRecord` is that, in the making. What is not set is read
    off the class: a run makes a layer for each module.
    """

    name: str
    type_name: str  # the class of its module, or its function
    roles: frozenset[str]  # that are observed
    module: nn.Module | None = None  # of a function none, and none when the run is over
    kind: type | None = None  # the class of its module, as the user wrote it
    aliases: tuple[str, ...] = ()  # further names
    functional: bool = False
    activation: str | None = None
    is_torchs_own: bool = False  # a module of torch that calls no functional layer
    replays: bool = False  # a CUDA graph, which writes to memory without a new version
    is_packed: bool = False  # its parameters are, as torch keeps quantised ones
    frozen: frozenset[str] = frozenset()  # parameters that required no gradient before the forward
    opaque: str = ""  # why it cannot be observed
    holds: bool = False  # parameters or buffers of its own
    unsupported: str = ""  # what kept a tensor of it from being read
    calls: int = 0
    entered: int | None = None
    completed: int | None = None
    returned_own: bool = False  # a tensor that it was not given
    returned_input: bool = False  # one that it was
    why_empty: str = ""  # what a call did that returned no tensor
    requires_grad: bool = False  # of something that it returned
    grad_off: bool = False
    passed_with_graph: bool = False  # gradients came in a pass that builds a graph
    traced: bool = False  # called while a trace was made
    place: tuple[CodeType, int] | None = None  # where the user's code first called it
    source: str = ""
    equal_samples: bool | None = None
    equal_input_samples: bool | None = None
    # in tensors of its calls, by role: an entry, or several; most layers are called once
    seen: dict[str, Entry | list[Entry]] = field(init=False)
    options: Mapping[str, Option] = field(init=False)
    # of most layers none; another mapping takes the place of these
    tied: Mapping[str, str] = field(init=False)
    # parameters on which no output depends; whether a function was given their values all the same
    unreached: Mapping[str, bool] = field(init=False)
    zero_slices: Mapping[str, ZeroSlices] = field(init=False)
    placements: Mapping[str, Placement] = field(init=False)

    def __init__(self, name: str, type_name: str, roles: frozenset[str]) -> None:
        self.name, self.type_name, self.roles, self.seen = name, type_name, roles, {}
        # what most layers have is set at once: objects that get attributes later, after others of
        # their class were made, have a dictionary each, which takes as long as all the rest
        self.module = self.kind = self.entered = self.completed = self.place = None
        self.is_torchs_own = self.returned_own = self.requires_grad = self.holds = False
        self.calls, self.equal_samples, self.options = 0, None, _NONE

    def add(self, role: str, entry: Entry) -> None:
        """Take what was found in one more tensor of its calls."""
        known = self.seen.get(role)
        if known is None:
            self.seen[role] = entry
        elif not isinstance(known, list):
            self.seen[role] = [known, entry]
        else:
            known.append(entry)
            if len(known) > _MOST_ENTRIES:
                self.merge()

    def entries(self, role: str) -> list[Entry]:
        """Return what was found in the tensors of its calls, in order."""
        known = self.seen.get(role, [])
        return known if isinstance(known, list) else [known]

    def statistics(self, role: str) -> TensorStatistics | None:
        """Return the statistics of the tensors of its calls together, ``None`` of none."""
        known = self.seen.get(role)
        if isinstance(known, list):
            return reduce(TensorStatistics.merge, [entry.statistics for entry in known])
        return None if known is None else known.statistics

    def merge(self) -> None:
        """Merge what was found so far, which takes less memory."""
        for role in self.seen:
            if len(self.entries(role)) > 1 and (merged := self.statistics(role)):
                self.seen[role] = [Entry.of(merged)]

    @property
    def label(self) -> str:
        """The name for people."""
        return self.name or self.type_name

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters of its module by their own names."""
        held = {} if self.module is None else self.module._parameters
        return {name: tensor for name, tensor in held.items() if tensor is not None}


_MOST_ENTRIES = 256
"""A layer that is called more often has what was found in its calls merged meanwhile."""


_NONE: Mapping[str, Any] = MappingProxyType({})
# no defaults of the data class, which takes them for mutable
Layer.options = Layer.tied = Layer.unreached = Layer.zero_slices = Layer.placements = _NONE

Given = tuple[Tensor, int | None, Entry | None]
"""A tensor that a layer was called with, its version then, and what was found if it was read."""


class Own(NamedTuple):
    """What was found in parameters, their gradients or buffers."""

    layers: Sequence[Layer] = ()  # of which each is
    names: Sequence[str] = ()  # its own there
    entries: Entries = Entries([])

    def places(self) -> Iterator[tuple[Layer, str]]:
        """Return layer and name of each."""
        return zip(self.layers, self.names, strict=True)


Held = tuple[Layer, str, Tensor]
"""A parameter, a buffer or a gradient: the layer that has it, and its own name there."""


_PLAIN = frozenset({bool, int, float, str})


@cache
def _positional(function: str) -> tuple[str, ...]:
    """Return the names of a function's arguments after its input, in order."""
    if function == ATTENTION:
        return "key", "value", "attn_mask", "dropout_p", "is_causal"
    try:
        return tuple(inspect.signature(getattr(F, function)).parameters)[1:]
    except (AttributeError, ValueError):  # a builtin; its module takes the same
        kind = next((kind for kind, name in ACTIVATION_MODULES.items() if name == function), object)
        return tuple(inspect.signature(kind).parameters)


FUNCTIONAL_DROPOUT: dict[Callable[..., Any], str] = {
    F.alpha_dropout: "alpha_dropout",
    F.dropout: "dropout",
    F.dropout1d: "dropout",
    F.dropout2d: "dropout",
    F.dropout3d: "dropout",
    F.feature_alpha_dropout: "alpha_dropout",
    torch.dropout: "dropout",
}
"""Functions whose calls are no layers, but a setting of the module that makes them."""


def module_options(
    module: nn.Module, public: dict[type, tuple[list[str], list[str]]]
) -> dict[str, Option]:
    """Return the plain public attributes of a module: `training`, `eps`, `p`, `num_embeddings`.

    `public` takes the names of a class's attributes and those of them that are public: they are the
    same in its next module, as a rule.
    """
    attributes, kind = module.__dict__, type(module)
    names = [*attributes]
    if kind not in public or public[kind][0] != names:
        public[kind] = names, [name for name in names if name[0] != "_"]
    return {n: value for n in public[kind][1] if type(value := attributes[n]) in _PLAIN}


def call_options(
    function: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Option]:
    """Return the plain arguments of a functional call by name, those left out not among them."""
    named = [*zip(_positional(function), args[1:], strict=False), *kwargs.items()]
    # ``_stacklevel`` is for warnings
    return {name: v for name, v in named if type(v) in _PLAIN and name[0] != "_"}


def with_dropout(
    options: Mapping[str, Option],
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Mapping[str, Option]:
    """Return options of a layer with those of a functional dropout that it calls.

    They are `dropout_p` and `dropout_training`; of several calls, of the one that drops the most.
    """
    function = FUNCTIONAL_DROPOUT[call]
    is_on = function == "dropout"  # by default
    said = {"p": 0.5, "training": is_on} | call_options(function, args, kwargs)
    dropout = {f"dropout_{name}": said[name] for name in ("p", "training")}
    rates = [
        one["dropout_p"]
        if one.get("dropout_training") is True and isinstance(one["dropout_p"], int | float)
        else 0.0
        for one in (dropout, options)
    ]
    return {**options, **dropout} if rates[0] >= rates[1] else options
