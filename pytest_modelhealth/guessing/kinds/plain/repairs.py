"""What to try next, after a forward that failed: the sizes that the failing layer asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod, sqrt

from torch import Tensor

from pytest_modelhealth.guessing.drawing import LENGTH
from pytest_modelhealth.guessing.kinds.plain.failures import Failure, failure_of, is_view
from pytest_modelhealth.guessing.kinds.plain.layers import CLIP, SIDE, Expected
from pytest_modelhealth.guessing.kinds.plain.slots import Slots
from pytest_modelhealth.guessing.trying import Outcome

_USUAL_SIDES = (28, 32, 64, 96, 128, 224, 256)
_WIDEST = 1_024


def repaired(slots: Slots, outcome: Outcome, model: object) -> Iterator[Slots]:
    """Yield batches that may run where this one failed, the likeliest first.

    Args:
        slots: what failed.
        outcome: how it failed.
        model: the model.
    """
    assert outcome.error is not None
    failure = failure_of(outcome.error)
    values = slots.tensors(outcome.args, outcome.kwargs)
    if failure.takes is not None and failure.arrived is not None:
        direct = [i for i, value in enumerate(values) if is_view(failure.arrived, value)]
        for index in direct:
            yield from _direct(slots, index, values[index], failure.arrived, failure.takes)
        if not direct:
            yield from _indirect(slots, failure.arrived, failure.takes)
    yield from _by_key(slots, outcome)
    yield from _by_text(slots, failure)
    yield from _larger(slots, failure)
    yield from _other_ranks(slots, failure)


def _direct(
    slots: Slots, index: int, value: Tensor, arrived: Tensor, takes: Expected
) -> Iterator[Slots]:
    """An input, or a view of it, is what reached the layer."""
    slot = slots.every[index]
    if takes.is_index:
        high = min(slot.high, takes.width) if slot.kind == "ids" else takes.width
        shape = slot.shape if slot.kind == "ids" else takes.shape
        changed = {"kind": "ids", "high": high, "low": takes.least, "why": takes.why}
        yield slots.with_slot(index, shape=shape, **changed)
        yield slots.with_slot(index, shape=(), **changed)
        return
    if slot.kind == "ids":
        yield slots.with_slot(index, kind="float", shape=takes.shape, why=takes.why)
    added = arrived.ndim - value.ndim
    wanted = len(takes.shape) + 1
    axis = _axis_of(value, arrived, takes.axis)
    if axis is not None:
        whole_shape = (*value.shape[:axis], takes.width, *value.shape[axis + 1 :])
        start = 0 if slot.is_whole else 1
        if axis >= start:
            yield slots.with_slot(index, shape=tuple(whole_shape[start:]), why=takes.why)
    elif arrived.shape[-1] == value[0].numel():
        yield from _flat_width(slots, arrived.shape[-1], takes.width)
    if added > 0 and arrived.ndim > wanted - 1 and takes.axis == 1:  # forward adds the channel
        yield slots.with_slot(index, shape=takes.shape[added:], why="forward adds the channel")
    if len(slot.shape) != len(takes.shape):
        yield slots.with_slot(index, shape=takes.shape, why=takes.why)


def _axis_of(value: Tensor, arrived: Tensor, axis: int) -> int | None:
    """Return which dimension of an input is this one of its view."""
    if arrived.ndim < 2:
        return None
    stride, size = arrived.stride(axis), arrived.shape[axis]
    for i in range(value.ndim - 1, -1, -1):
        if value.stride(i) == stride and value.shape[i] == size:
            return i
    return None


def _indirect(slots: Slots, arrived: Tensor, takes: Expected) -> Iterator[Slots]:
    """What reached the layer was computed before."""
    if takes.is_index:  # positions: a shorter sequence
        for index, slot in enumerate(slots.every):
            if slot.shape[:1] == (LENGTH,):
                yield _all_lengths(slots, min(LENGTH, takes.width))
                return
            if slot.kind == "ids" and slot.high > takes.width:
                yield slots.with_slot(index, high=takes.width)
        return
    axis = takes.axis if arrived.ndim > 1 else -1
    if arrived.shape[axis] != takes.width:
        yield from _summed(slots, arrived.shape[axis], takes.width)
        yield from _flat_width(slots, arrived.shape[axis], takes.width)
    if not arrived.is_floating_point():
        yield from _all_floating(slots)


def _all_floating(slots: Slots) -> Iterator[Slots]:
    for index, slot in enumerate(slots.every):
        if slot.kind == "ids":
            yield slots.with_slot(index, kind="float", why="")


def _all_lengths(slots: Slots, length: int) -> Slots:
    for index, slot in enumerate(slots.every):
        if slot.shape[:1] == (LENGTH,):
            slots = slots.with_slot(index, shape=(length, *slot.shape[1:]))
        elif slot.kind == "ids" and slot.high == LENGTH + 1:
            slots = slots.with_slot(index, high=length + 1)
    return slots


def _summed(slots: Slots, got: int, wanted: int) -> Iterator[Slots]:
    """Several are joined side by side: one of them, the last first, is wider or narrower."""
    for index, slot in reversed(list(enumerate(slots.every))):
        if slot.kind != "float" or not slot.shape:
            continue
        width = slot.shape[-1] + wanted - got
        is_image = len(slot.shape) > 2
        if len(slot.shape) == 2 and got and slot.shape[0] * wanted % got == 0:  # a spectrogram
            height = slot.shape[0] * wanted // got
            why = f"as high as {wanted} features need"
            yield slots.with_slot(index, shape=(height, slot.shape[1]), why=why)
        if 0 < width <= _WIDEST * 16 and not is_image:
            why = f"what is left of {wanted} features"
            yield slots.with_slot(index, shape=(*slot.shape[:-1], width), why=why)
        if not is_image and got and slot.shape[-1] * wanted % got == 0:
            width = slot.shape[-1] * wanted // got
            why = f"as wide as {wanted} features need"
            yield slots.with_slot(index, shape=(*slot.shape[:-1], width), why=why)
    yield from _shared_out(slots, wanted)


def _shared_out(slots: Slots, wanted: int) -> Iterator[Slots]:
    """Inputs that are joined share the features between them, where nothing says how."""
    joined = [i for i, s in enumerate(slots.every) if s.kind == "float" and len(s.shape) == 1]
    if not 1 < len(joined) <= wanted:
        return
    each, left = divmod(wanted, len(joined))
    for position, index in enumerate(joined):
        width = each + (position < left)
        why = f"a share of {wanted} features: nothing says how many are whose"
        slots = slots.with_slot(index, shape=(width,), why=why)
    yield slots


def _flat_width(slots: Slots, got: int, wanted: int) -> Iterator[Slots]:
    """Space is flattened into features: the side of the images decides how many."""
    factor = wanted / max(got, 1)
    for slot in slots.every:
        if len(slot.shape) == 3 and slot.kind == "float":
            side = slot.shape[-1]
            yield from (_with_side(slots, s) for s in _sides(side, factor))
            return
        if len(slot.shape) == 2 and slot.kind == "float" and slot.shape[-1] > slot.shape[0]:
            yield _with_length(slots, max(1, round(slot.shape[-1] * factor)))
            return


def _sides(side: int, factor: float) -> list[int]:
    """Return sides by which flattened features may grow by a factor, usual ones first."""
    exact = max(1, round(side * sqrt(factor)))
    close = [s for s in _USUAL_SIDES if 0.6 < s / exact < 1.67]
    near = sorted(close, key=lambda s: abs(s - exact))
    around = [exact, *(exact + d for n in range(1, 4) for d in (n, -n))]
    return [s for s in dict.fromkeys((*near, *around)) if 0 < s <= _WIDEST and s != side]


def _with_side(slots: Slots, side: int) -> Slots:
    for index, slot in enumerate(slots.every):
        if slot.kind == "float" and len(slot.shape) == 3:
            why = f"{slot.why.partition(', side')[0]}, side {side} by the layers behind"
            slots = slots.with_slot(index, shape=(slot.shape[0], side, side), why=why)
    return slots


def _with_length(slots: Slots, length: int) -> Slots:
    for index, slot in enumerate(slots.every):
        if slot.kind == "float" and len(slot.shape) == 2:
            slots = slots.with_slot(index, shape=(slot.shape[0], length))
    return slots


def _by_key(slots: Slots, outcome: Outcome) -> Iterator[Slots]:
    """A mapping lacks a key, or a list an element."""
    error = outcome.error
    keyed = [i for i, slot in enumerate(slots.every) if slot.key is not None]
    if not keyed:
        return
    slot = slots.every[keyed[-1]]
    if isinstance(error, KeyError) and isinstance(slot.key, str) and error.args:
        key = str(error.args[0])
        if slot.key == "x":
            yield slots.with_slot(keyed[-1], key=key)
        else:
            added = Slots((slot,)).with_slot(0, key=key).every
            yield Slots((*slots.every, *added))
    found = re.search(r"expected (?:at least )?(\d+), got (\d+)|index out of range", str(error))
    if found and isinstance(slot.key, int) and slot.key < 7:
        added = Slots((slot,)).with_slot(0, key=slot.key + 1).every
        yield Slots((*slots.every, *added))


_PRODUCT = re.compile(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)")
_SIZES = re.compile(
    r"tensor a \((\d+)\) must match the size of tensor b \((\d+)\).*dimension (\d+)"
)
_GOT = re.compile(r"got (\d+) but expected (\d+)")
_VIEW = re.compile(r"shape '\[([^\]]*)\]' is invalid for input of size")


def _by_text(slots: Slots, failure: Failure) -> Iterator[Slots]:
    """What torch says of shapes."""
    text = failure.text
    if found := _PRODUCT.search(text):
        yield from _summed(slots, int(found[1]), int(found[2]))
        yield from _flat_width(slots, int(found[1]), int(found[2]))
    if found := _SIZES.search(text) or _GOT.search(text):
        yield from _matched(slots, int(found[1]), int(found[2]))
    if found := _VIEW.search(text):
        asked = prod(int(n) for n in found[1].split(",") if int(n) > 0)
        for index, slot in enumerate(slots.every):
            if slot.kind == "float":
                yield slots.with_slot(
                    index, shape=(asked,), why="the width that forward views it as"
                )
    if "Long" in text or "Int" in text or "indices" in text or "long" in text:
        yield from _all_indices(slots)
        yield from _all_floating(slots)
    if "mask" in text or "Bool" in text or "bool" in text:
        for index, slot in enumerate(slots.every):
            if slot.kind == "mask":
                yield slots.with_slot(index, kind="float")


def _all_indices(slots: Slots) -> Iterator[Slots]:
    for index, slot in enumerate(slots.every):
        if slot.kind == "float" and slot.key is None:
            yield slots.with_slot(index, kind="ids", shape=(LENGTH,), why="indices, as torch says")


def _matched(slots: Slots, first: int, second: int) -> Iterator[Slots]:
    for got, wanted in ((first, second), (second, first)):
        for index, slot in enumerate(slots.every):
            for axis, size in enumerate(slot.shape):
                if size == got and slot.kind != "fixed":
                    shape = (*slot.shape[:axis], wanted, *slot.shape[axis + 1 :])
                    yield slots.with_slot(index, shape=shape)
    # positions of patches, with one of the whole image or without
    for got, wanted in ((first, second), (second, first)):
        for one in (0, 1):
            yield from _flat_width(slots, max(got - one, 1), max(wanted - one, 1))


_TOO_SMALL = re.compile(
    r"too small|can't be greater|Expected more than 1|smaller than", re.IGNORECASE
)


def _larger(slots: Slots, failure: Failure) -> Iterator[Slots]:
    """Layers of many strides need larger images, or longer waveforms."""
    if not _TOO_SMALL.search(failure.text):
        return
    for slot in slots.every:
        if len(slot.shape) == 3 and slot.shape[-1] * 2 <= _WIDEST:
            yield _with_side(slots, slot.shape[-1] * 2)
            return
        if len(slot.shape) == 2 and slot.kind == "float" and slot.shape[-1] < 2**17:
            yield _with_length(slots, slot.shape[-1] * 4)
            return


_RANK = re.compile(
    r"unpack|out of range|dimension|too many indices|out of bounds|must match|equal|"
    r"[Ee]xpected|\dD|einsum|permute|size mismatch"
)


def _other_ranks(slots: Slots, failure: Failure) -> Iterator[Slots]:
    """The same width with more dimensions, or fewer."""
    if not _RANK.search(failure.text):
        return
    for index, slot in enumerate(slots.every):
        if slot.kind == "float" and not slot.is_whole and slot.shape:
            for shape in _ranked(slot.shape):
                if len(shape) != len(slot.shape):
                    yield slots.with_slot(index, shape=shape)
        if slot.kind == "ids" and slot.name and not slot.is_whole:
            yield slots.with_slot(index, shape=() if slot.shape else (LENGTH,))


def _ranked(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    width = shape[-1] if len(shape) < 3 else shape[0]
    return ((width,), (LENGTH, width), (width, SIDE, SIDE), (width, CLIP, SIDE, SIDE))
