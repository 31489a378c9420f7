"""One run of a model with every tensor kept, and further runs measured against it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pytest_modelhealth.alignment.result import Alignment
from pytest_modelhealth.capture.observing.tensors import (
    KnownTensors,
    TensorStore,
    contents,
    find_tensors,
    pairs,
    version,
)
from pytest_modelhealth.report import LayerRecord, Observation
from pytest_modelhealth.statistics import UnsupportedTensorError
from pytest_modelhealth.statistics.dense import dense_values

Modules = Mapping[str, nn.Module]


class Key(NamedTuple):
    """Names one tensor of a run: the `number`-th that a layer showed in a role."""

    layer: str
    role: str
    tensor: str = ""
    number: int = 0


class KeptTensor(NamedTuple):
    """What is kept of a tensor."""

    slot: int  # its number in the store; a tensor seen again, unchanged, has the same
    moment: int  # its place in the order in which the tensors of the run appeared
    shape: tuple[int, ...]  # its shape, complex and sparse ones as real and dense
    dtype: torch.dtype  # its dtype, likewise


@dataclass
class Trace:
    """Everything that one run showed."""

    observation: Observation  # the statistics
    entries: dict[Key, KeptTensor]  # the tensors, by their names
    output: str  # how the output is built, for people: ``"tuple(tensor 4x3, tensor 4)"``
    # whether the tensors of the output stand in a row, however the model nested them
    is_flat: bool = False
    shows_functions: bool = True  # whether functions that a forward calls are seen as layers
    in_torch: bool = True  # whether torch computed it
    rounds: bool = False  # whether its layers compute with quantised numbers
    names_layers: bool = True  # whether its layers have the names of the model that it was made of

    @property
    def layers(self) -> Mapping[str, LayerRecord]:
        """The layers by their names."""
        return self.observation.layers

    @property
    def model_type(self) -> str:
        """Class name of the model."""
        return self.observation.model_type

    @cached_property
    def of_role(self) -> Mapping[tuple[str, str], list[Key]]:
        """The names of the tensors of each layer and role, in order of appearance."""
        found: dict[tuple[str, str], list[Key]] = defaultdict(list)
        for key in self.entries:
            found[key.layer, key.role].append(key)
        return found

    @cached_property
    def depths(self) -> dict[int, int]:
        """How many layers have computed something when each tensor appears, by its moment."""
        depth, seen, found = 1, set(), {}
        for key, entry in self.entries.items():
            found[entry.moment] = depth
            if key.role in ("activations", "gradients") and entry.slot not in seen:
                seen.add(entry.slot)
                depth += 1
        return found


@dataclass(frozen=True)
class TwoRuns:
    """The runs of both models, and which layer of one is which of the other."""

    a: Trace  # the reference's run
    b: Trace  # the candidate's run
    alignment: Alignment  # which layer is which
    modules: tuple[Modules, Modules]  # the modules of both, by name
    store: TensorStore  # holds the tensors of both


class Watcher:
    """A visitor that names each tensor and hands it on; `take` may raise what is unsupported."""

    def __init__(self, take: Callable[[Key, Tensor], None]) -> None:
        self._take = take
        self._counts: dict[tuple[str, str, str], int] = defaultdict(int)

    def see(self, layer: str, role: str, tensor: str, value: Tensor) -> None:
        """Name a tensor by its layer, role and how many there were before it."""
        name = layer, role, tensor
        number = self._counts[name]
        self._counts[name] += 1
        self._see(Key(layer, role, tensor, number), value)

    def see_output(self, output: Any) -> None:
        """Take what the model returned as tensors of the role ``outputs``."""
        for number, tensor in enumerate(find_tensors(output)):
            self._see(Key("", "outputs", "", number), tensor)

    def forget(self) -> None:
        """Take no tensor for one seen before."""

    def _see(self, key: Key, value: Tensor) -> None:
        # That a tensor has no values to read, the recorder has said of this layer.
        with suppress(UnsupportedTensorError), torch.no_grad(), torch._C.DisableTorchFunction():
            self._take(key, value)


class Keeper(Watcher):
    """Keeps every tensor in a store."""

    def __init__(self, store: TensorStore) -> None:
        super().__init__(self._keep)
        self.store = store
        self.entries: dict[Key, KeptTensor] = {}
        self.output = ""  # how it is built, for people: "tuple(tensor 4x3, tensor 4)"
        self._slots = KnownTensors[KeptTensor]()
        self._memory_is_reused = False

    def see_output(self, output: Any) -> None:
        """Keep what the model returned, and how it is built."""
        self.output = structure(output)
        super().see_output(output)

    def forget(self) -> None:
        """Keep every tensor anew."""
        self._slots = KnownTensors[KeptTensor]()
        self._memory_is_reused = True

    def _keep(self, key: Key, value: Tensor) -> None:
        """Keep a tensor, once if it is shown several times unchanged."""
        if self._memory_is_reused and key.role == "gradients":  # which come without a word
            self._slots = KnownTensors[KeptTensor]()
        now = version(value)
        known = self._slots.get(value, now)
        if known is None:
            values = dense_values(value).values
            known = KeptTensor(self.store.put(values), 0, tuple(values.shape), values.dtype)
            if now is not None:  # a write would not show
                self._slots.put(value, now, known)
        self.entries[key] = known._replace(moment=len(self.entries))


def structure(value: Any) -> str:
    """Return how an output is built, its tensors by shape."""
    kind = type(value)
    if issubclass(kind, Tensor):
        return "tensor " + ("x".join(map(str, value.shape)) or "scalar")
    if issubclass(kind, Mapping):
        keys = (
            (k if type(k) in (str, int) else type(k).__name__, part) for k, part in pairs(value)
        )
        parts = (f"{key}: {structure(part)}" for key, part in keys)
        return f"{kind.__name__}({', '.join(parts)})"
    if issubclass(kind, tuple | list):
        return f"{kind.__name__}({', '.join(map(structure, contents(value, kind)))})"
    return kind.__name__


def container(value: str) -> str:
    """Return what `structure` says without the names of classes, which a refactor may change."""
    for name in ("OrderedDict(", "ModelOutput(", "list("):
        value = value.replace(name, "(")
    return value
