"""`TensorStore` keeps what it is given, wherever it lies, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pytest_modelhealth.capture.observing.tensors import TensorStore

TENSORS = [
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
    """Shape, dtype and bits survive, in memory and in the file."""
    with TensorStore(budget) as store:
        numbers = [store.put(tensor) for tensor in TENSORS]
        for number, tensor in zip(numbers, TENSORS, strict=True):
            assert store[number].dtype == tensor.dtype
            torch.testing.assert_close(store[number], tensor, rtol=0, atol=0, equal_nan=True)
        sizes = sum(tensor.numel() * tensor.element_size() for tensor in TENSORS)
        assert store.in_memory <= budget
        assert store.in_memory + store.on_disk == sizes
        assert len(store) == len(TENSORS)


def test_a_kept_tensor_is_a_copy():
    """Writing to the tensor afterwards, as an in-place layer does, changes nothing."""
    with TensorStore(1 << 20) as store:
        tensor = torch.ones(3, requires_grad=True)
        number = store.put(tensor)
        tensor.data.zero_()
        assert store[number].tolist() == [1, 1, 1]
        assert not store[number].requires_grad


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
