"""What batches are made of goes into a bundle and comes out; reading one executes nothing."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from pytest_modelhealth import Inputs, InspectionError
from pytest_modelhealth.bundles.data import pack, read, unpack, write


def through(value: Any, own: Any, path: Path) -> tuple[Any, dict[str, str]]:
    """Return a value after writing and reading it in place of `own`, and what was not kept."""
    missing: dict[str, str] = {}
    write(path, {"x": pack(value, "x", missing)})
    return unpack(read(path)["x"], own, "x", missing), missing


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


def test_what_batches_are_made_of(tmp_path: Path) -> None:
    """Values are those of then, types those of the test, whose own batch is of another size."""

    def batch(size: int) -> dict[str, Any]:
        return {
            "pair": Pair(torch.full((size,), float(size), requires_grad=True), [size] * size),
            "packed": pack_sequence([torch.ones(size), torch.ones(2)]),
            "array": np.arange(size),
            "ordered": OrderedDict(size=torch.Size([size]), dtype=torch.float16),
            "transposed": torch.ones(size, 3, dtype=torch.float8_e4m3fn).t(),
            "inputs": Inputs(size, mask=None),
        }

    read, missing = through(batch(5), batch(3), tmp_path / "x")
    assert not missing
    pair = read["pair"]
    assert type(pair) is Pair
    assert torch.equal(pair.first, torch.full((5,), 5.0))
    assert pair.first.requires_grad
    assert pair.second == [5] * 5
    assert type(read["packed"]) is PackedSequence
    assert torch.equal(read["packed"].batch_sizes, batch(5)["packed"].batch_sizes)
    assert read["array"].tolist() == [0, 1, 2, 3, 4]
    assert type(read["ordered"]) is OrderedDict
    assert dict(read["ordered"]) == {"size": torch.Size([5]), "dtype": torch.float16}
    assert read["transposed"].dtype == torch.float8_e4m3fn
    assert read["transposed"].stride() == (1, 3)
    assert (read["inputs"].args, read["inputs"].kwargs) == ((5,), {"mask": None})


def test_a_view_does_not_bring_all_of_its_memory(tmp_path: Path) -> None:
    """Ten rows of a data set are kept as ten rows, with their values."""
    whole = torch.arange(1e6).view(-1, 10)
    read, _ = through([whole[:10], whole[3:5]], None, tmp_path / "x")
    assert torch.equal(read[0], whole[:10])
    assert torch.equal(read[1], whole[3:5])
    assert (tmp_path / "x").stat().st_size < 5000


def test_what_is_no_data_is_the_tests_own(tmp_path: Path) -> None:
    """It is named, with its path and its type; the rest is kept."""
    value = {
        "ok": torch.ones(2), "f": len, "sparse": torch.eye(3).to_sparse(),
        "objects": [np.array([{}])], "module": torch.nn.Linear(1, 1),
    }  # fmt: skip
    own = dict.fromkeys(value, "own") | {"objects": ["own"]}
    read, missing = through(value, own, tmp_path / "x")
    assert missing == {
        "x['f']": "builtins.builtin_function_or_method", "x['sparse']": "torch.Tensor",
        "x['objects'][0]": "numpy.ndarray", "x['module']": "torch.nn.modules.linear.Linear",
    }  # fmt: skip
    assert torch.equal(read.pop("ok"), torch.ones(2))
    assert read == {"f": "own", "sparse": "own", "objects": ["own"], "module": "own"}


class Canary:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5, "torch", "inside"])
def test_a_file_that_could_execute_code_is_refused(tmp_path: Path, protocol: int | str) -> None:
    """A pickle of any protocol, an archive of torch, and a sound bundle with an object in it."""
    canary, path = tmp_path / "executed", tmp_path / "bundle.pt"
    if protocol == "torch":
        torch.save({"x": Canary(canary)}, path)
    elif protocol == "inside":
        write(path, {"x": Canary(canary)})
    else:
        path.write_bytes(pickle.dumps(Canary(canary), protocol=int(protocol)))
    with pytest.raises(InspectionError, match="nothing of it was executed"):
        read(path)
    assert not canary.exists()
    pickle.loads(pickle.dumps(Canary(canary)))
    assert canary.exists()  # the canary sings


def test_what_is_no_bundle_is_told(tmp_path: Path) -> None:
    """Nothing, a folder, another format, and a file that was cut, wherever it was."""
    path = tmp_path / "bundle.pt"
    write(path, {"x": torch.ones(9)})
    whole = path.read_bytes()
    for kept in (0, 1, 7, 9, 50, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:kept])
        with pytest.raises(InspectionError, match="no bundle can be read at"):
            read(path)
    write(path, {"format": "of tomorrow"})
    with pytest.raises(InspectionError, match="its format is 'of tomorrow', and this version read"):
        read(path)
    for other, told in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InspectionError, match=told):
            read(other)
