"""Layers: their names, which of them a pattern selects, what they are and where their units lie."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelhealth.errors import InspectionError, LayerNotFoundError, suggest
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import ROLES

_SPELLED = {"LeakyReLU": "leaky_relu", "LogSoftmax": "log_softmax", "Softmax2d": "softmax"}

ACTIVATION_MODULES: dict[type[nn.Module], str] = {
    getattr(nn, name): _SPELLED.get(name, name.lower())
    for name in nn.modules.activation.__all__
    if name != "MultiheadAttention"
}
"""The activation modules of torch and the canonical name of what each computes."""

ATTENTION = "scaled_dot_product_attention"
"""The functional layer that is no activation."""


FUNCTIONAL_LAYERS: dict[Callable[..., Any], str] = {}
"""Functions that count as layers when a module's forward calls them, and their canonical names.

`torch.nn.functional`, `torch` and `torch.Tensor` spell the same function in several ways, some of
them with a trailing underscore for the in-place one. Exported programs call the operators of
`torch.ops.aten`.
"""
for _name in {*ACTIVATION_MODULES.values(), ATTENTION}:
    for _spelling in (_name, f"{_name}_", f"_{_name}"):
        for _home in (F, torch, torch.Tensor, torch.special):
            if not _spelling.startswith("_") and hasattr(_home, _spelling):
                FUNCTIONAL_LAYERS[getattr(_home, _spelling)] = _name
        if (_packet := getattr(torch.ops.aten, _spelling, None)) is not None:
            FUNCTIONAL_LAYERS[_packet] = _name
            FUNCTIONAL_LAYERS |= {getattr(_packet, o): _name for o in _packet.overloads()}


class UnitDimensions:
    """Decides in which dimension of an activation the units lie, in execution order.

    A module whose type fixes it decides: dimension 1 after convolution, batch, instance and group
    normalisation, pooling; the last after linear layers, layer normalisation, embeddings, recurrent
    layers and attention. Any other layer (an activation, a container, the user's own) takes the
    dimension of the latest such layer before it whose output had the same shape. With none, it is
    dimension 1 from four dimensions on and the last otherwise. Tensors with fewer than two
    dimensions have no units.
    """

    def __init__(self) -> None:
        self._by_shape: dict[torch.Size, int] = {}
        self._by_kind: dict[type | None, int | None] = {None: None}

    def of(self, kind: type | None, tensor: torch.Tensor) -> int | None:
        """Return the dimension of the units of `tensor`, an output of a module of this class."""
        try:
            shape = tensor.shape
        except RuntimeError:  # a nested one
            return None
        dimensions = len(shape)
        if dimensions < 2 or (type(tensor) is not torch.Tensor and tensor.is_nested):
            return None
        if kind is not None and kind not in self._by_kind:  # counted from the end if < 0
            bases = (base for base in kind.__mro__ if base.__module__.startswith("torch.nn."))
            names = {base.__name__ for base in bases}
            is_last = not names.isdisjoint(having("features"))
            channels = not names.isdisjoint(having("channels"))
            self._by_kind[kind] = 1 if channels else -1 if is_last else None
        settled = self._by_kind[kind]
        if settled is None:
            return self._by_shape.get(shape, 1 if dimensions >= 4 else dimensions - 1)
        self._by_shape[shape] = settled = settled % dimensions
        return settled


def activation_of(module: nn.Module | type) -> str | None:
    """Return the canonical name of the activation that a module, or one of a class, is."""
    kind = module if isinstance(module, type) else original_class(module)
    return next(
        (ACTIVATION_MODULES[base] for base in kind.__mro__ if base in ACTIVATION_MODULES), None
    )


class NamedModule(NamedTuple):
    """A distinct module of a model."""

    name: str  # its first
    module: nn.Module
    aliases: tuple[str, ...] = ()  # further names
    opaque: str = ""  # why no hook can reach it, if none can


def is_simple(kind: type) -> bool:
    """Whether a class is torch's: a module of it, without others in it, calls no functional layer.

    Activations do, and in an activation none counts. Losses call functions that are recorded.
    """
    home = kind.__module__
    return home.startswith("torch.nn.modules.") and home != "torch.nn.modules.loss"


def type_name(module: nn.Module) -> str:
    """Return the name of the class that the user wrote, where torch put another around it."""
    return _original_name(module).rpartition(".")[2]


def original_class(module: nn.Module) -> type:
    """Return the class that the user wrote, where torch put another around it and it is loaded."""
    kind = _unsharded(type(module))
    if not kind.__module__.startswith(_STAND_INS):
        return kind
    home, _, name = _original_name(module).rpartition(".")
    original = getattr(sys.modules.get(home), name, kind)
    is_module = isinstance(original, type) and issubclass(original, nn.Module)
    return original if is_module else kind


def _unsharded(kind: type) -> type:
    """Return the user's class where torch made one of its own and that, as `fully_shard` does."""
    is_torchs = kind.__module__.startswith("torch.distributed.") and len(kind.__bases__) == 2
    return kind.__bases__[1] if is_torchs and issubclass(kind.__bases__[1], nn.Module) else kind


_STAND_INS = ("torch.jit.", "torch.export.", "pytest_modelhealth.capture.deployed.")
_MANGLED = re.compile(r"^__torch__\.|___torch_mangle_\d+\.")


def _original_name(module: nn.Module) -> str:
    """Return the qualified name of the class that the user wrote."""
    kind = _unsharded(type(module))
    if isinstance(module, torch.jit.ScriptModule) and kind.__module__.startswith("torch.jit."):
        return _MANGLED.sub("", module._c._type().qualified_name())
    if kind.__module__.startswith(_STAND_INS) and isinstance(getattr(module, "_ty", None), str):
        return module._ty  # type: ignore[return-value]
    return f"{kind.__module__}.{kind.__name__}"


def has_forward(module: nn.Module | None) -> bool:
    """Whether calling this module means anything; a `ModuleList` only holds others."""
    if module is None or "forward" in vars(module):
        return True
    kind = original_class(module)
    if issubclass(kind, torch.jit.ScriptModule):  # its own class is not loaded
        script: Any = module._c
        return bool(script._has_method("forward"))
    return next(base for base in kind.__mro__ if "forward" in vars(base)) is not nn.Module


_QUANTISED = ("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.")


def is_quantised(module: nn.Module) -> bool:
    """Whether a module of torch computes with quantised numbers, which have no gradient."""
    return type(module).__module__.startswith(_QUANTISED)


_ROUNDS_INPUTS = ("act_quant_kwargs", "activation_quantization")
"""What weights of torchao keep where the layer rounds what it takes, too."""


def stop_gradients(modules: Sequence[nn.Module]) -> bool:
    """Whether one of modules rounds what it takes to a grid, and so passes no gradient on."""
    of_kinds = {type(module): module for module in modules}
    if any(map(is_quantised, of_kinds.values())):
        return True
    held = chain.from_iterable([module._parameters.values() for module in modules])
    others = [p for p in held if type(p) is not nn.Parameter]  # torchao has classes of its own
    return any(getattr(p, name, None) is not None for p in others for name in _ROUNDS_INPUTS)


def own_parameters(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the parameters of a module by their own names, those that torch keeps packed too.

    They are read from the module's own dictionary, a copy of what a script keeps in C++: a
    parametrised attribute computes when read.
    """
    held: dict[str, Any] = module._parameters
    if held or not is_quantised(module):
        return held
    packed: Any = module
    if hasattr(module, "get_weight"):  # a recurrent layer
        held = {**packed.get_weight(), **packed.get_bias()}
    else:
        methods = (n for n in ("weight", "bias") if callable(getattr(type(module), n, None)))
        held = {name: getattr(packed, name)() for name in methods}
    if getattr(getattr(module, "_packed_params", None), "dtype", None) is torch.float16:
        held["weight"] = held["weight"].half()  # unpacked as float32
    return {name: None if one is None else one.detach() for name, one in held.items()}


def replays_cuda_graph(module: nn.Module) -> bool:
    """Whether a module replays a CUDA graph in the mode it is in.

    `torch.cuda.make_graphed_callables` gives it a forward that knows the mode of the capture.
    """
    forward = vars(module).get("forward")
    if type(forward) is not FunctionType or forward.__module__ != "torch.cuda.graphs":
        return False
    held = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    mode = held.get("graph_training_state")
    return mode is not None and mode.cell_contents == module.training


_GRAPHED = (
    "a CUDA graph replays it with the module that torch.cuda.make_graphed_callables was given, and "
    "no hook fires; inspected before that, it is seen"
)
_SCRIPTED = "TorchScript calls no hooks inside; inspected by itself, the script shows its layers"
_INLINED = "torch.fx inlined it: what it called is observed, itself is not"


def named_modules(model: nn.Module) -> list[NamedModule]:
    """Return each distinct module once, in registration order, under its canonical name.

    Wrappers that only forward to one module (`torch.compile`, data parallel, activation
    checkpointing) are no layers, and leave no trace in the names below them.

    Raises:
        InspectionError: a module cannot be hashed.
    """
    modules: dict[nn.Module, NamedModule] = {}
    try:
        _add(model, "", (), "", modules)
    except Exception as error:
        raise InspectionError(
            f"cannot list the layers of {type(model).__name__}: a module in it has no hash "
            f"({type(error).__name__}: {error}), so torch cannot list its parameters either; keep "
            "nn.Module's own __hash__ and __eq__, which a data class does with eq=False"
        ) from error
    return list(modules.values())


def _add(
    module: nn.Module,
    path: str,
    around: tuple[nn.Module, ...],
    why: str,
    modules: dict[nn.Module, NamedModule],
) -> None:
    """Add `module`, which may be opaque as `why` says, and those in it."""
    if type(module).__name__ in _WRAPPER_ATTRIBUTES and (inner := _wrapped(module)) is not None:
        _add(inner, path, (*around, module), _why_inside(module, why), modules)
        return
    first = modules.get(module)
    if first is None:
        is_run = why == _INLINED and has_forward(module)
        opaque = str(module.__dict__.get("_opaque") or ("" if is_run else why))
        modules[module] = NamedModule(path, module, (), opaque)
    else:
        modules[module] = first._replace(aliases=(*first.aliases, path))
    children = module._modules
    if not children or is_quantised(module):  # there they hold packed weights
        return
    inside, why = (*around, module), _why_inside(module, why)
    ids, stem = set(map(id, inside)), path and f"{path}."
    for name, child in children.items():
        if child is not None and id(child) not in ids:
            _add(child, stem + name, inside, why, modules)


def _why_inside(module: nn.Module, why: str) -> str:
    """Return why a module inside `module` may be opaque, given why that itself may be."""
    if why == _GRAPHED or replays_cuda_graph(module):
        return _GRAPHED
    if why == _SCRIPTED or isinstance(module, torch.jit.ScriptModule):
        return _SCRIPTED
    return _INLINED if isinstance(module, torch.fx.GraphModule) else why


_WRAPPER_ATTRIBUTES = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}


def _wrapped(module: nn.Module) -> nn.Module | None:
    """Return the module that one of torch's wrappers only forwards to."""
    attribute = _WRAPPER_ATTRIBUTES.get(type(module).__name__, "")
    inner = getattr(module, attribute, None) if attribute else None
    is_torchs = type(module).__module__.startswith("torch.")
    return inner if is_torchs and isinstance(inner, nn.Module) else None


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the layer in a module, itself if it is no wrapper."""
    inner = _wrapped(module)
    return module if inner is None else unwrapped(inner)


Pattern = str | re.Pattern[str]

_ALL_ROLES = frozenset(ROLES)


@dataclass(frozen=True)
class Rule:
    """One call of `watch`: which layers, and which roles of them."""

    pattern: Pattern
    roles: frozenset[str]
    types: tuple[type[nn.Module], ...] | None = None

    def matches(self, name: str, module: nn.Module | None) -> bool:
        """Whether a layer is meant; a functional layer has no module and so no type."""
        if self.types is not None:
            kinds = () if module is None else (type(module), original_class(module))
            if not any(issubclass(kind, self.types) for kind in kinds):
                return False
        if isinstance(self.pattern, re.Pattern):
            return self.pattern.search(name) is not None
        return fnmatchcase(name, self.pattern)

    def __str__(self) -> str:
        pattern = self.pattern.pattern if isinstance(self.pattern, re.Pattern) else self.pattern
        if self.types is None:
            return repr(pattern)
        return f"{pattern!r} with types={', '.join(type_.__name__ for type_ in self.types)}"


@dataclass(frozen=True)
class Selection:
    """Which roles of which layers are observed: all of them, unless rules say otherwise."""

    rules: tuple[Rule, ...] = ()

    def roles(self, name: str, module: nn.Module | None) -> frozenset[str]:
        """Return the roles to observe of a layer."""
        if not self.rules:
            return _ALL_ROLES
        return frozenset().union(*(r.roles for r in self.rules if r.matches(name, module)))

    def add(self, rule: Rule, model: nn.Module) -> Selection:
        """Return the selection with one more rule.

        Raises:
            LayerNotFoundError: the rule matches no module of `model` and could not mean a
                functional layer, which has no name before the model runs.
        """
        pattern = rule.pattern if isinstance(rule.pattern, str) and rule.types is None else ""
        function = re.sub(r"_\d+$", "", pattern.rpartition(".")[2])
        if function not in FUNCTIONAL_LAYERS.values():
            ensure_match([rule], [(n.name, n.module) for n in named_modules(model)], model)
        return Selection((*self.rules, rule))


def ensure_match(
    rules: Iterable[Rule], layers: Iterable[tuple[str, nn.Module | None]], model: nn.Module
) -> None:
    """Do nothing if each rule matches a layer.

    Raises:
        LayerNotFoundError: one matches none; the message names the nearest layer.
    """
    for rule in rules:
        layers = list(layers)
        if not any(rule.matches(name, module) for name, module in layers):
            names = [name for name, _ in layers if name]
            nearest = suggest(str(rule.pattern), names)
            raise LayerNotFoundError(
                f"{rule} matches no layer of {type_name(model)}{nearest} "
                f"Layers are named as named_modules() spells them, for example "
                f"{', '.join(map(repr, names[:3])) or repr('')}."
            )
