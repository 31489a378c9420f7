"""Memory is put back, whatever way the model's tensors show it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from corpus.tensors import TENSORS, VIEWS, Writes
from pytest_modelhealth.capture import Request, find_engine
from pytest_modelhealth.capture.observing.tensors import TensorStore
from pytest_modelhealth.capture.step.state import Memory, State
from tests.capture.oracle import fingerprint, raw

pytestmark = pytest.mark.usefixtures("ctrl_c")


def fail() -> None:
    """Raise what a user's model may."""
    raise ValueError("here")


ENDS: dict[type[BaseException] | None, Callable[[], None]] = {
    None: lambda: None,
    ValueError: fail,
    KeyboardInterrupt: lambda: signal.raise_signal(signal.SIGINT),
}


def inspect(model: nn.Module) -> Any:
    """Inspect a model on ones."""
    return find_engine(model).run(Request(model, torch.ones(2, 3)))


def each_end(model: Writes) -> Iterator[None]:
    """Inspect a model once for every way to end."""
    for error, end in ENDS.items():
        model.end = end
        if error is None:
            assert inspect(model).errors == ()
        else:
            with pytest.raises(error):
                inspect(model)
        yield


@pytest.mark.parametrize("as_attribute", [False, True], ids=["buffer", "attribute"])
@pytest.mark.parametrize("view", VIEWS)
def test_what_a_view_shows_is_restored(view: str, as_attribute: bool) -> None:
    """The elements that a view shows are put back, and those around it are left alone.

    What lies in the gaps of a view is put back with it.
    """
    base, start = torch.arange(24.0), torch.arange(24.0)
    shown = VIEWS[view](torch.arange(24)).unique()
    model = Writes(lambda _: base.add_(1.5))
    buffer = VIEWS[view](base)
    if as_attribute:
        model.held = [buffer]
    else:
        model.register_buffer("buffer", buffer)
    stride, version = buffer.stride(), base._version
    for number, _ in enumerate(each_end(model), 1):
        assert torch.equal(base[shown], start[shown])
        if len(shown):
            first, last = shown[0], shown[-1] + 1
            assert torch.equal(base[:first], start[:first] + 1.5 * number)
            assert torch.equal(base[last:], start[last:] + 1.5 * number)
    assert (buffer.stride(), buffer.data_ptr()) == (stride, VIEWS[view](base).data_ptr())
    assert base._version == version + 3  # restoring is no write that autograd sees


def written(tensor: Tensor) -> Tensor:
    """Return the memory that holds a tensor's values."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr):
        return tensor.values()
    if tensor.layout is torch.jagged:
        return tensor._values
    if tensor.layout is not torch.strided or tensor.is_meta:
        return tensor
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def shown(tensor: Tensor) -> bytes:
    """Return what a tensor shows, as bytes."""
    if tensor.layout is torch._mkldnn:
        return raw(tensor.to_dense())
    if tensor.layout is torch.strided and not tensor.is_nested:
        return raw(tensor.resolve_conj().resolve_neg())
    return raw(written(tensor))


@pytest.mark.filterwarnings("ignore")  # of layouts and dtypes that torch is about to drop
@pytest.mark.parametrize("tensor", TENSORS)
def test_tensors_of_any_layout_are_restored(tensor: str) -> None:
    """Whatever stands for a tensor's values is put back, bit for bit, and the tensor itself."""
    buffer = TENSORS[tensor]()
    memory = written(buffer)
    write = memory.mul_ if memory.is_floating_point() else memory.bitwise_xor_
    factor: Any = 2.0 if memory.is_floating_point() else 1
    model = Writes(lambda _: write(factor), buffer=buffer)
    before = shown(buffer)
    for _ in each_end(model):
        assert model.buffer is buffer
        assert shown(buffer) == before
        if memory.layout is torch.strided and not memory.is_nested:
            assert written(buffer).data_ptr() == memory.data_ptr()


def test_a_sparse_buffer_gets_its_structure_back() -> None:
    """A forward that adds entries to a sparse buffer leaves it with those that it had."""
    buffer = torch.eye(3).to_sparse()
    model = Writes(lambda m: m.buffer.add_(torch.ones(3, 3).to_sparse()), buffer=buffer)
    inspect(model)
    assert (buffer._nnz(), buffer.is_coalesced()) == (3, True)
    assert torch.equal(buffer.to_dense(), torch.eye(3))


def test_buffers_on_one_storage_are_restored() -> None:
    """Two views of one storage, one of a parameter, and one that the forward moves elsewhere."""
    base, weight = torch.arange(12.0), nn.Parameter(torch.ones(4, 3))

    def write(model: nn.Module) -> None:
        model.left.mul_(2)
        model.right.add_(1)
        model.row.zero_()
        model.moved.data = torch.zeros(7)
        model.grown.resize_(40).fill_(9)

    views = {"left": base[:8], "right": base[4:], "row": weight.detach()[1]}
    model = Writes(write, moved=torch.ones(3), grown=torch.ones(2), **views)
    model.register_parameter("weight", weight)
    model.end = ENDS[None]
    before = fingerprint(model, None), raw(base)
    for _ in each_end(model):
        model.end = ENDS[None]
        assert (fingerprint(model, None), raw(base)) == before


def test_memory_that_only_can_be_read_is_left_alone(tmp_path: Any) -> None:
    """A buffer on a file that is mapped for reading is not written to: that would be the end."""
    np.arange(6.0).tofile(tmp_path / "table")
    table = np.memmap(tmp_path / "table", mode="r", dtype=np.float64)
    with pytest.warns(UserWarning, match="not writable"):
        buffer = torch.from_numpy(table)
    model = Writes(lambda m: None, buffer=buffer)
    assert inspect(model).errors == ()


def test_each_byte_is_copied_once() -> None:
    """What is copied are the bytes between the ends of what buffers show, once each."""

    def copied(tensors: list[Tensor]) -> int:
        return sum(copy.nbytes for _, copy in Memory(tensors)._copies)

    table = torch.ones(1000, 64)
    assert copied([torch.ones(8), torch.ones(4)]) == 48
    assert copied([table[3], table[4], table[3:5]]) == 2 * 64 * 4  # two rows
    assert copied([table, table[:, 1], table[7]]) == table.nbytes
    assert copied([torch.ones(1).expand(1 << 40), torch.ones(9, device="meta")]) == 4


class Incomparable:
    """Raises where it is compared."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError(other)

    __hash__ = object.__hash__


ATTRIBUTES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another name": lambda held: held.update(other=held.pop("own")),
    "another place": lambda held: held.update(training=held.pop("training")),
    "equal values": lambda held: held.update(training=1, _forward_hooks=type(held["_modules"])()),
    "one more": lambda held: held.update(other=held["own"]),
    "one less": lambda held: held.pop("own"),
    "a hook": lambda held: held["_forward_hooks"].update({1: print}),
}


@pytest.mark.parametrize("change", ATTRIBUTES)
def test_attributes_are_the_same_objects_in_their_order(change: str) -> None:
    """Nothing is asked of the objects: one here cannot be compared."""
    module = nn.Linear(2, 2)
    module.own = Incomparable()
    before = [(name, id(value)) for name, value in vars(module).items()]
    state = State(module)
    ATTRIBUTES[change](vars(module))
    state.restore()
    assert [(name, id(value)) for name, value in vars(module).items()] == before
    assert not module._forward_hooks


# ---- tensors in a file ---------------------------------------------------------------------------


KEPT = [
    torch.randn(3, 4),
    torch.randn(5).bfloat16(),
    torch.tensor(2.5, dtype=torch.float64),
    torch.empty(0, 3),
    torch.arange(6).view(2, 3).T,
    torch.tensor([True, False]),
    torch.tensor([float("nan"), float("inf")]),
]


@pytest.mark.parametrize("budget", [0, 60, 1 << 20])
def test_tensors_come_back_as_they_were(budget):
    """Shape, dtype and bits survive, in memory and in the file, a later write to the tensor too."""
    with TensorStore(budget) as store:
        given = [tensor.clone() for tensor in KEPT]
        numbers = [store.put(tensor) for tensor in given]
        for tensor in given:
            tensor.zero_()
        for number, tensor in zip(numbers, KEPT, strict=True):
            assert store[number].dtype == tensor.dtype
            torch.testing.assert_close(store[number], tensor, rtol=0, atol=0, equal_nan=True)
        assert store.in_memory <= budget
        assert store.in_memory + store.on_disk == sum(tensor.nbytes for tensor in KEPT)
        assert len(store._kept) == len(KEPT)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files in /proc")
def test_the_file_goes_with_an_exception(tmp_path, monkeypatch):
    """However the context ends, no file is left, open or in the folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = open_files()

    def interrupted() -> None:
        with TensorStore(0) as store:
            store.put(torch.ones(100))
            assert open_files() == before + 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert open_files() == before
    assert list(tmp_path.iterdir()) == []


def open_files() -> int:
    """Return how many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))
