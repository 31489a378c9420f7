"""What batches are made of goes into a bundle and comes out as it was."""

from __future__ import annotations

import io
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from pytest_modelhealth import Inputs
from pytest_modelhealth.bundles.file import Missing, Packer, allowed


def through(value: Any) -> tuple[Any, list[Any]]:
    """Return a value after writing and reading it, and what could not be kept."""
    packer, file = Packer(), io.BytesIO()
    torch.save(packer.pack(value, "x"), file)
    file.seek(0)
    with torch.serialization.safe_globals(allowed()):
        return torch.load(file, weights_only=True), packer.missing


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


def test_what_batches_are_made_of() -> None:
    """Tensors that are one stay one; objects of libraries keep how they are read."""
    shared = torch.randn(3, requires_grad=True)
    packed_rows = pack_sequence([torch.ones(3), torch.ones(2)])
    arrays = {"a": np.arange(6).reshape(2, 3), "s": np.array(["ab", "c"]), "f": np.float32(2.5)}
    value = {
        "pair": Pair(shared, [shared]), "packed": packed_rows, "arrays": arrays,
        "size": torch.Size([2, 3]), "dtype": torch.float16, "device": torch.device("cpu"),
        "slice": slice(1, None, 2), "nan": math.nan,
        "ones": torch.ones(2, 3, dtype=torch.float8_e4m3fn).t(), "inputs": Inputs(1, mask=shared),
    }  # fmt: skip
    read, missing = through(value)
    assert not missing
    first, (second,) = read["pair"]
    assert read["pair"].first is first is second is read["inputs"].kwargs["mask"]
    assert first.requires_grad
    assert isinstance(read["packed"], PackedSequence)
    assert torch.equal(read["packed"].data, packed_rows.data)
    for name, array in arrays.items():
        assert read["arrays"][name].dtype == array.dtype
        assert np.array_equal(read["arrays"][name], array)
    read["arrays"]["a"][0, 0] = 1  # writable, as it was
    assert read["ones"].dtype == torch.float8_e4m3fn
    assert read["ones"].stride() == (1, 3)
    for name in ("size", "dtype", "device", "slice"):
        assert read[name] == value[name]
        assert type(read[name]) is type(value[name])
    assert math.isnan(read["nan"])


def test_a_view_does_not_bring_all_of_its_memory() -> None:
    """Ten rows of a data set are kept as ten rows, with their values."""
    whole = torch.arange(1e6).view(-1, 10)
    read, _ = through([whole[:10], whole[3:5]])
    assert torch.equal(read[0], whole[:10])
    assert torch.equal(read[1], whole[3:5])
    assert all(tensor.untyped_storage().nbytes() < 1000 for tensor in read)


def test_what_is_no_data_is_named() -> None:
    """With its path, its type and the reason; the rest is kept."""
    around: list[Any] = [1]
    around.append(around)
    value = {
        "ok": torch.ones(2), "f": len, "sparse": torch.eye(3).to_sparse(),
        "objects": np.array([{}]),
        "around": around, "meta": torch.empty(2, device="meta"), "module": torch.nn.Linear(1, 1),
    }  # fmt: skip
    read, missing = through(value)
    assert [m.path for m in missing] == [
        "x['f']", "x['sparse']", "x['objects']", "x['around'][1]", "x['meta']", "x['module']"
    ]  # fmt: skip
    assert [m.type for m in missing][:2] == ["builtins.builtin_function_or_method", "torch.Tensor"]
    assert torch.equal(read["ok"], torch.ones(2))
    assert {type(read["f"]), type(read["sparse"])} == {Missing}
    assert "sparse" in str(missing[1])
