"""Follows units through a run: by the operations that torch carries out, with their arguments.

The recorded flow has no arguments (of a `view` the sizes, of a `mean` the dimensions), and a weight
is cut only where they say that units stay apart. So the model runs once more, and every operation
below autograd is looked at. One that is not known to act unit by unit is a reason to cut nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.layers import named_modules
from pytest_modelhealth.removal.kinds import how_computed, kind_of
from pytest_modelhealth.removal.marks import Group, Mark, Parameter, Reading, Slot, Source, laid_out
from pytest_modelhealth.removal.operations import (
    ALONG,
    BATCH_NORMS,
    BY_MEMORY,
    LIKE,
    POOLS,
    SAID,
    SAME_PLACES,
    UNIT_BY_UNIT,
    Functions,
    Operations,
    arguments,
    layout,
)

Key = tuple[Any, ...]


class Followed:
    """What one run showed of units: the groups, and how often each parameter was used.

    Args:
        model: a copy of the model, which is run.
        pairs: by layer, the pairs of its units that are said to be equal.

    Attributes:
        groups: what is known of units that go together.
        uses: how often a parameter was used, by name.
    """

    def __init__(self, model: nn.Module, pairs: Mapping[str, Iterable[tuple[int, int]]]) -> None:
        self._pairs = {name: list(each) for name, each in pairs.items()}
        self._marks: dict[Key, tuple[Mark, ...]] = {}
        self._held: list[Tensor] = []
        self._around: list[tuple[str, nn.Module]] = []
        self._modules = {named.name: named.module for named in named_modules(model)}
        self._joined: dict[int, int] = {}
        self._by_layer: dict[str, int] = {}
        self._all: list[Group] = []
        self.uses: dict[str, int] = {}
        for parameter, tensor in _parameters(self._modules):
            sizes = [(axis, size) for axis, size in enumerate(tensor.shape) if size > 1]
            marks = [Mark((parameter, axis), axis, torch.arange(size)) for axis, size in sizes]
            self._mark(tensor, marks)

    @property
    def groups(self) -> list[Group]:
        """The groups, in execution order."""
        return [group for number, group in enumerate(self._all) if number not in self._joined]

    def group_of(self, layer: str) -> Group | None:
        """Return the group that the units of a layer are in; ``None`` if it was not seen."""
        number = self._by_layer.get(layer)
        return None if number is None else self._group(number)

    def run(self, function: Callable[[], Any]) -> None:
        """Run the model and follow units to its outputs."""
        with self._watched():
            output = function()
        for tensor in find_tensors(output):
            for mark in self._units(tensor):
                self._refuse(mark, "it is part of the output of the model")
        self._marks.clear()
        self._held.clear()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self._modules.items():
                if not isinstance(module, torch.jit.ScriptModule):
                    before = module.register_forward_pre_hook(self._entering(name, module))
                    after = module.register_forward_hook(self._leaving, always_call=True)
                    stack.callback(before.remove)
                    stack.callback(after.remove)
            stack.enter_context(Functions(self._leaves))
            stack.enter_context(Operations(self._see))
            yield

    def _entering(self, name: str, module: nn.Module) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._around.append((name, module))

        return enter

    def _leaving(self, *_: Any) -> None:
        self._around.pop()

    # Marks and groups.

    def _mark(self, tensor: Tensor, marks: Iterable[Mark]) -> None:
        if (key := _key(tensor)) is not None:
            self._marks[key] = tuple(marks)
            self._held.append(tensor)  # so that its memory is not another's meanwhile

    def _of(self, tensor: Tensor) -> tuple[Mark, ...]:
        key = _key(tensor)
        return () if key is None else self._marks.get(key, ())

    def _units(self, tensor: Tensor) -> list[Mark]:
        return [mark for mark in self._of(tensor) if isinstance(mark.source, int)]

    def _parts(self, tensor: Tensor) -> dict[Parameter, dict[int, Mark]]:
        """Return the parameters that a tensor is, by dimension of theirs."""
        found: dict[Parameter, dict[int, Mark]] = {}
        for mark in self._of(tensor):
            if not isinstance(mark.source, int):
                parameter, dimension = mark.source
                found.setdefault(parameter, {})[dimension] = mark
        return found

    def _group(self, source: Source) -> Group:
        return self._all[self._root(source)]

    def _root(self, source: Source) -> int:
        """Return the number of the group that units are in by now."""
        assert isinstance(source, int)  # a parameter is in no group
        while source in self._joined:
            source = self._joined[source]
        return source

    def _join(self, one: Mark, other: Mark) -> None:
        """Let the units of two marks go together."""
        kept, gone = sorted((self._root(one.source), self._root(other.source)))
        if kept != gone:
            self._joined[gone] = kept
            self._all[kept].absorb(self._all[gone])

    def _refuse(self, mark: Mark, reason: str) -> None:
        reasons = self._group(mark.source).reasons
        if reason not in reasons:
            reasons.append(reason)

    def _refuse_all(self, tensors: Iterable[Tensor], reason: str) -> None:
        for tensor in tensors:
            for mark in self._units(tensor):
                self._refuse(mark, reason)

    def _leaves(self, tensor: Tensor, function: str) -> None:
        reason = f"its values leave for NumPy or Python (`{function}`{self._place()})"
        self._refuse_all([tensor], reason)

    def _place(self) -> str:
        """Return ``" in encoder"``: the module that an operation belongs to."""
        name, module = self._around[-1] if self._around else ("", None)
        if isinstance(module, nn.Module) and name:
            return f" in {name} ({module._get_name()})"
        return f" in {module._get_name()}" if module is not None else ""

    # Operations.

    def _see(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        taken = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        marked = [tensor for tensor in taken if self._of(tensor)]
        if not marked:
            return
        name = function.overloadpacket.__name__
        made = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        rule = self._rule(function, name)
        if rule != self._lay_out:
            for parameter in {p for tensor in marked for p in self._parts(tensor)}:
                self.uses[parameter.name] = self.uses.get(parameter.name, 0) + 1
        if any(map(self._units, marked)) or rule in (self._multiply, self._convolve, self._lay_out):
            given = arguments(function, args, kwargs)
            rule(function, name, given, taken, made)

    def _rule(self, function: Any, name: str) -> Callable[..., None]:
        if name in ("addmm", "mm", "linear"):
            return self._multiply
        if name == "convolution":
            return self._convolve
        if name in BATCH_NORMS:
            return self._normalise
        if name in SAME_PLACES or (function.is_view and name not in BY_MEMORY):
            return self._lay_out
        if name in LIKE:
            return self._take_form
        if torch.Tag.pointwise in function.tags or name in UNIT_BY_UNIT:
            return self._take_each
        if name in ALONG:
            return self._go_along
        return self._pool if name in POOLS or name == "constant_pad_nd" else self._unknown

    def _unknown(self, function: Any, name: str, given: Any, taken: Any, made: Any) -> None:
        what = SAID.get(name, f"`{name}`{{}} is not known to act unit by unit")
        self._refuse_all(taken, what.format(self._place()))

    def _lay_out(
        self, function: Any, name: str, given: dict[str, Any], taken: list[Tensor], made: Any
    ) -> None:
        (tensor, *_), (argument, *_) = taken, given
        others = {key: value for key, value in given.items() if key != argument}
        others = {} if name in ("clone", "_to_copy", "contiguous") else others
        marks: list[list[Mark]] = [[] for _ in made]
        for mark in self._of(tensor):
            for number in range(len(made)):
                lay_out = layout(function, argument, others, number)
                try:
                    found = laid_out(mark, tensor.shape, lay_out)
                except (RuntimeError, TypeError):
                    found = None
                if found is not None:
                    marks[number].append(found)
                elif isinstance(mark.source, int):
                    self._refuse(mark, self._why_lost(name, tensor, made[number]))
        for new, found_marks in zip(made, marks, strict=True):
            self._mark(new, found_marks)

    def _why_lost(self, name: str, before: Tensor, after: Tensor) -> str:
        if after.numel() < before.numel():
            return f"`{name}`{self._place()} takes a part of its units"
        return f"`{name}`{self._place()} lays its units out in several dimensions"

    def _take_form(self, function: Any, name: str, given: Any, taken: Any, made: Any) -> None:
        (tensor, *_), (new, *_) = taken, made
        if new.ndim == tensor.ndim:
            marks = self._units(tensor)
            self._mark(new, [m for m in marks if new.shape[m.axis] == len(m.ids)])

    def _take_each(self, function: Any, name: str, given: Any, taken: Any, made: Any) -> None:
        ndim = max(tensor.ndim for tensor in taken)
        found = [
            (mark.at(mark.axis + ndim - tensor.ndim), tensor)
            for tensor in taken
            for mark in self._units(tensor)
        ]
        first, _ = found[0]
        is_product = name in ("mul", "mul_")
        if function._schema.is_mutable and not self._units(taken[0]):
            self._refuse_all(taken, f"it is written into another tensor{self._place()}")
            return
        for mark, _ in found[1:]:
            is_one = self._root(mark.source) == self._root(first.source)
            if not (mark.is_same(first) and (is_product or is_one)):
                self._refuse_all(taken, self._why_mixed(name))
                return
        slots = []
        for tensor in taken:
            axis = first.axis - ndim + tensor.ndim
            if axis < 0 or tensor.shape[axis] == 1 or self._units(tensor):
                continue
            slot = self._slot(tensor, first.at(axis))
            if slot is None:
                self._refuse_all(taken, self._why_mixed(name, tensor))
                return
            slots.append(slot)
        for mark, _ in found[1:]:
            self._join(first, mark)
        self._group(first.source).slots += slots
        for new in made:
            self._mark(new, [first] if new.ndim == ndim else [])

    def _slot(self, tensor: Tensor, units: Mark) -> Slot | None:
        """Return where units stand in a vector of a known layer: a bias, a slope of each."""
        for parameter, marks in self._parts(tensor).items():
            kind = kind_of(parameter.module)
            if kind is None or parameter.own not in kind.vectors or len(marks) != 1:
                return None
            ((dimension, mark),) = marks.items()
            if mark.axis == units.axis and torch.equal(mark.ids, units.ids):
                return Slot(parameter, dimension, mark.ids)
        return None

    def _why_mixed(self, name: str, tensor: Tensor | None = None) -> str:
        parameters = () if tensor is None else self._parts(tensor)
        for parameter in parameters:
            whose = f"a parameter of {type(parameter.module).__name__}"
            return f"`{name}`{self._place()} takes '{parameter.name}', {whose}, unit by unit"
        if name.rstrip("_") in ("add", "sub", "rsub"):
            return f"it is added to other values (`{name}`{self._place()})"
        return f"`{name}`{self._place()} takes other values beside its units"

    def _go_along(self, function: Any, name: str, given: Any, taken: Any, made: Any) -> None:
        (tensor, *_) = taken
        dims = given.get("dim")
        along = [] if dims is None else [dims] if isinstance(dims, int) else list(dims)
        for mark in self._units(tensor):
            gone = {dim % tensor.ndim for dim in along}
            if not gone or mark.axis in gone:
                self._refuse(mark, f"`{name}`{self._place()} runs over its units")
                continue
            for new in made:
                before = sum(dim < mark.axis for dim in gone)
                axis = mark.axis if new.ndim == tensor.ndim else mark.axis - before
                self._mark(new, [mark.at(axis)])

    def _pool(self, function: Any, name: str, given: Any, taken: Any, made: Any) -> None:
        (tensor, *_) = taken
        dimensions = POOLS.get(name) or len(given["pad"]) // 2
        for mark in self._units(tensor):
            if mark.axis >= tensor.ndim - dimensions:
                self._refuse(mark, f"`{name}`{self._place()} runs over its units")
                continue
            for new in made:
                self._mark(new, [mark])

    def _normalise(self, function: Any, name: str, given: Any, taken: Any, made: Any) -> None:
        tensor = taken[0]
        layer, module = self._around[-1] if self._around else ("", nn.Module())
        kind = kind_of(module)
        for mark in self._units(tensor):
            slots = [self._slot(other, mark.at(0)) for other in taken[1:]]
            fits = (
                mark.axis == 1
                and mark.is_whole
                and all(slot is not None and slot.parameter.module is module for slot in slots)
            )
            if kind is None or not kind.is_norm or not fits:
                self._refuse(mark, f"`{name}`{self._place()} is no batch norm of its units alone")
                continue
            group = self._group(mark.source)
            group.slots += [slot for slot in slots if slot is not None]
            group.norms[layer] = module
            self._mark(made[0], [mark])

    def _multiply(
        self, function: Any, name: str, given: dict[str, Any], taken: Any, made: Any
    ) -> None:
        """See ``x @ weight.T + bias``."""
        if name == "linear":
            inputs, weight, bias = given["input"], given["weight"], given.get("bias")
        elif name == "mm":
            inputs, weight, bias = given["self"], given["mat2"], None
        else:
            inputs, weight, bias = given["mat1"], given["mat2"], given["self"]
        rows, columns = (0, 1) if name == "linear" else (1, 0)
        used = self._weight(weight, rows, columns, "linear")
        self._read(inputs, inputs.ndim - 1, weight, used)
        self._refuse_all([weight], f"it is a factor of a matrix product (`{name}`{self._place()})")
        if bias is not None:
            self._refuse_all([bias], f"it is added to other values (`{name}`{self._place()})")
        if used is not None:
            self._begin(used, made[0], made[0].ndim - 1, bias)

    def _convolve(self, function: Any, name: str, given: Any, taken: Any, made: Any) -> None:
        inputs, weight, bias = given["input"], given["weight"], given["bias"]
        is_transposed, groups = given["transposed"], given["groups"]
        rows, columns = (1, 0) if is_transposed else (0, 1)
        used = self._weight(weight, rows, columns, "convolution")
        self._refuse_all([weight], "it is a weight itself")
        if groups == 1:
            self._read(inputs, 1, weight, used)
        elif used is None or is_transposed or groups != weight.shape[0] or weight.shape[1] != 1:
            self._refuse_all([inputs], f"it is read by a grouped convolution{self._place()}")
        elif self._pass_through(used, inputs, made[0], bias):
            return
        if used is not None:
            mark = self._begin(used, made[0], 1, bias)
            if groups > 1 and mark is not None:
                self._refuse(mark, "it is a grouped convolution: its channels go by groups")

    def _pass_through(
        self, weight: Parameter, inputs: Tensor, output: Tensor, bias: Tensor | None
    ) -> bool:
        """See a depthwise convolution, channel by channel; return whether it is one of units."""
        for mark in self._units(inputs):
            if mark.axis != 1 or not mark.is_whole:
                continue
            begun = self._begin(weight, output, 1, bias)
            if begun is None:
                return False
            self._join(mark, begun)
            self._group(mark.source).ends = [weight.owner]
            self._mark(output, [mark])
            return True
        return False

    def _weight(self, tensor: Tensor, rows: int, columns: int, what: str) -> Parameter | None:
        """Return the parameter that a weight is, if it is one of a known layer, as it stands."""
        found = self._parts(tensor)
        if len(found) != 1:
            return None
        ((parameter, marks),) = found.items()
        kind = kind_of(parameter.module)
        if kind is None or kind.what != what or parameter.own != "weight":
            return None
        there = {dimension: mark.axis for dimension, mark in marks.items()}
        expected = {kind.rows: rows, kind.columns: columns}
        fits = all(there[dimension] == expected.get(dimension, dimension) for dimension in there)
        return parameter if fits and all(mark.is_whole for mark in marks.values()) else None

    def _read(self, inputs: Tensor, axis: int, weight: Tensor, used: Parameter | None) -> None:
        """See units being read by a weight."""
        for mark in self._units(inputs):
            if mark.axis != axis:
                self._refuse(mark, f"its units are no columns where it is read{self._place()}")
            elif used is None:
                self._refuse(mark, self._why_not_read(weight))
            else:
                group, kind = self._group(mark.source), kind_of(used.module)
                assert kind is not None
                slot = Slot(used, kind.columns, mark.ids)
                pairs = [pair for name in group.layers for pair in self._pairs.get(name, ())]
                group.readings.append(_reading(slot, kind.rows, inputs, mark, pairs, group.units))

    def _why_not_read(self, weight: Tensor) -> str:
        parameter = next(iter(self._parts(weight)), None)
        if parameter is None:
            layer, module = self._around[-1] if self._around else ("", None)
            if module is not None and (how := how_computed(module)):
                return f"it is read by '{layer}', whose weight is {how}"
            return f"it goes into a product{self._place()} with what is no weight of a layer"
        name, kind = parameter.name, type(parameter.module).__name__
        if len(parameter.names) > 1:
            shared = " and ".join(map(repr, parameter.names))
            return f"it is read by {shared}, which are one shared tensor"
        if isinstance(parameter.module, torch.jit.ScriptModule):
            return f"it is read by '{name}' of a script, whose weights cannot be replaced"
        if kind_of(parameter.module) is None:
            return f"it is read by '{name}' of {kind}, which is no plain layer of torch"
        return f"it is read by '{name}' in another way than {kind} has"

    def _begin(
        self, weight: Parameter, output: Tensor, axis: int, bias: Tensor | None
    ) -> Mark | None:
        """See units being made; return their mark."""
        units = output.shape[axis]
        kind = kind_of(weight.module)
        if units < 2 or kind is None:
            return None
        number = self._by_layer.get(weight.owner)
        if number is None:
            number = self._by_layer[weight.owner] = len(self._all)
            self._all.append(Group(units, [weight.owner], [weight.owner]))
        mark = Mark(number, axis, torch.arange(units))
        group = self._group(number)
        if not any(slot.parameter == weight for slot in group.slots):
            group.slots.append(Slot(weight, kind.rows, mark.ids))
        if bias is not None:
            slot = self._slot(bias, mark.at(0))
            if slot is None:
                self._refuse(mark, f"what is added to it{self._place()} is no bias of a layer")
            else:
                group.slots.append(slot)
        self._mark(output, [mark])
        return mark


def _reading(slot: Slot, rows: int, inputs: Tensor, mark: Mark, pairs: Any, units: int) -> Reading:
    """Return what a weight reads of each unit."""
    with torch.no_grad():
        values = inputs.detach().movedim(mark.axis, 0).reshape(len(mark.ids), -1)
        is_zero = (values == 0).all(1).cpu()
        zero = torch.ones(units, dtype=torch.bool)
        zero[mark.ids[~is_zero]] = False
        largest = float(values.abs().max()) if pairs and values.numel() else 1.0
        twins = {}
        for one, other in pairs:
            ours, theirs = values[mark.ids == one].double(), values[mark.ids == other].double()
            gap = float((ours - theirs).abs().max()) if ours.numel() else 0.0
            twins[one, other] = gap / largest if largest else gap
    return Reading(slot, rows, zero, twins)


def _parameters(modules: Mapping[str, nn.Module]) -> Iterator[tuple[Parameter, Tensor]]:
    """Yield each parameter and buffer, once for all that share memory."""
    found: dict[Any, list[tuple[str, str, nn.Module, Tensor]]] = {}
    for name, module in modules.items():
        own_parameters = module.named_parameters(recurse=False)
        for own, tensor in (*own_parameters, *module.named_buffers(recurse=False)):
            if (key := _key(tensor)) is not None:
                found.setdefault(key[0], []).append((name, own, module, tensor))
    for held in found.values():
        names = tuple(f"{name}.{own}" if name else own for name, own, _, _ in held)
        name, own, module, tensor = held[0]
        yield Parameter(name, own, module, names), tensor


def _key(tensor: Tensor) -> Key | None:
    """Return what tells a tensor from others: its memory and its form; ``None`` without any."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return None
    try:
        memory = tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None
    return memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
