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
    """Shape, dtype and bits survive, in memory and in the file, a later write to the tensor too."""
    with TensorStore(budget) as store:
        given = [tensor.clone() for tensor in TENSORS]
        numbers = [store.put(tensor) for tensor in given]
        for tensor in given:
            tensor.zero_()
        for number, tensor in zip(numbers, TENSORS, strict=True):
            assert store[number].dtype == tensor.dtype
            torch.testing.assert_close(store[number], tensor, rtol=0, atol=0, equal_nan=True)
        assert store.in_memory <= budget
        assert store.in_memory + store.on_disk == sum(tensor.nbytes for tensor in TENSORS)
        assert len(store) == len(TENSORS)


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
