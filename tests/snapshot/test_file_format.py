"""The snapshot file: what is written is read back, and what is no snapshot is refused by line."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_modelhealth.report import Observation, Status
from pytest_modelhealth.snapshot.file_format import (
    LayerLine,
    Snapshot,
    SnapshotFormatError,
    TensorLine,
    dump,
    from_observation,
    load,
)
from tests.builders import layer, observation


def spread(rows: int = 8, columns: int = 4) -> torch.Tensor:
    """Values of both signs, an eighth of them zero."""
    values = torch.linspace(-2, 3, rows * columns)
    values[::8] = 0
    return values.reshape(rows, columns)


def small_observation() -> Observation:
    """Two layers inside a model, the second one never called."""
    return observation(
        layer("", type_name="Net", inputs=spread(), activations=spread(), completed=9, entered=0),
        layer("fc", activations=spread(), parameters={"weight": spread(3, 4)}, gradients=spread()),
        layer("head", status=Status.NOT_CALLED),
        loss=0.25,
    )


def test_the_numbers_in_the_file_are_those_of_the_tensor() -> None:
    """Mean, std, extremes and rms agree with torch's own to the digits the file has."""
    line = load(dump(from_observation(small_observation(), "t"))).tensors["activations"]["fc"]
    values = spread().double()
    expected = {
        "mean": values.mean(),
        "std": values.std(correction=0),
        "min": values.min(),
        "max": values.max(),
        "rms": values.square().mean().sqrt(),
    }
    for name, value in expected.items():
        assert getattr(line, name) == pytest.approx(value.item(), rel=5e-5), name
    assert (line.dtype, line.shape, line.count) == ("float32", "8x4", 32)
    assert line.zeros == pytest.approx(4 / 32)


def test_layers_stand_in_the_order_in_which_they_returned() -> None:
    """A model comes after the layers inside it, and a layer never called comes last."""
    assert list(from_observation(small_observation(), "t").layers) == ["fc", "", "head"]


def test_only_the_batch_is_kept_of_inputs() -> None:
    """The inputs of the model are kept, those of inner layers are not."""
    seen = observation(layer("", inputs=spread()), layer("fc", inputs=spread()))
    assert list(from_observation(seen, "t").tensors["inputs"]) == [""]


def test_rounding_far_below_a_tensor_s_scale_is_not_written() -> None:
    """A mean of 1e-9 beside an rms of 1 is written as 0, so that it does not churn."""
    ones = torch.tensor([1.0, -1.0 + 2e-9], dtype=torch.float64)
    seen = observation(layer("fc", activations=ones))
    assert from_observation(seen, "t").tensors["activations"]["fc"].mean == 0


reals = st.one_of(st.floats(width=32), st.sampled_from([math.nan, math.inf, -math.inf, -0.0]))
fractions = st.integers(0, 10_000).map(lambda n: n / 10_000)
counts = st.integers(0, 10**12)
names = st.text(max_size=12) | st.sampled_from(["", "a b", '"', "[layers]", "end", "\u2028", "#"])
tensor_lines = st.builds(
    TensorLine,
    dtype=st.sampled_from(["float32", "float8_e4m3fn", "bool"]),
    shape=st.sampled_from(["()", "64x10", "0x3"]),
    count=counts,
    mean=reals,
    std=reals,
    min=reals,
    max=reals,
    rms=reals,
    zeros=fractions,
    dead=st.none() | fractions,
    nan=counts,
    inf=counts,
)
snapshots = st.builds(
    Snapshot,
    test=st.just("test_model.py::test_x[a b]"),
    model=st.just("Net"),
    recorded=st.just("torch 2.13.0, cpu"),
    loss=st.none() | reals,
    layers=st.dictionaries(names, st.builds(LayerLine, names, names, counts), max_size=3),
    tensors=st.dictionaries(
        st.sampled_from(["inputs", "activations", "parameters"]),
        st.dictionaries(names, tensor_lines, min_size=1, max_size=3),
        max_size=3,
    ),
)


@given(snapshots)
def test_what_is_written_is_read_back(snapshot: Snapshot) -> None:
    """Any layer name, any float, any count: reading gives what was written, to its digits."""
    text = dump(snapshot)
    again = load(text)
    assert dump(again) == text
    assert list(again.layers.items()) == list(snapshot.layers.items())
    for role, tensors in snapshot.tensors.items():
        assert list(again.tensors[role]) == list(tensors)
        for name, line in tensors.items():
            read = again.tensors[role][name]
            assert read.mean == pytest.approx(line.mean, rel=5e-5, nan_ok=True)
            assert read.dead == pytest.approx(line.dead)
            assert (read.count, read.nan, read.inf) == (line.count, line.nan, line.inf)


def test_a_new_value_leaves_the_other_lines_alone() -> None:
    """One changed number is a diff of one line, whatever its width."""
    before = from_observation(small_observation(), "t")
    tensors = {role: dict(lines) for role, lines in before.tensors.items()}
    line = tensors["activations"]["fc"]
    tensors["activations"]["fc"] = replace(line, mean=-1.2345e-30, count=123_456_789_012)
    old, new = (dump(s).split("\n") for s in (before, replace(before, tensors=tensors)))
    assert len([1 for a, b in zip(old, new, strict=True) if a != b]) == 1


def damaged(text: str, what: str) -> str:
    """Damage a snapshot file in one of the ways that files are damaged."""
    lines = text.split("\n")
    row = next(i for i, line in enumerate(lines) if line.startswith("fc.weight"))
    edits = {
        "empty": "",
        "binary": struct.pack("<8d", *range(8)).decode("utf-8", errors="replace"),
        "title": "a letter\n" + text,
        "future": text.replace("format 1", "format 2"),
        "truncated": "\n".join(lines[: row + 1]),
        "cut line": "\n".join([*lines[:row], lines[row][:-20], *lines[row + 1 :]]),
        "word": "\n".join([*lines[:row], lines[row].replace("12 ", "ab "), *lines[row + 1 :]]),
        "conflict": "\n".join([*lines[:row], "<<<<<<< HEAD", *lines[row:]]),
        "section": text.replace("[parameters]", "[parameter]"),
        "header": text.replace("model: ", "modell: "),
        "loss": text.replace("loss: 0.25", "loss: low"),
        "quote": "\n".join(
            [*lines[:row], lines[row].replace("fc.weight", '"\\x"'), *lines[row + 1 :]]
        ),
    }
    return edits[what]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("empty", "line 1: 'modelhealth snapshot, format 1' should be here, not ''"),
        ("binary", "line 1: 'modelhealth snapshot"),
        ("title", "line 1: 'modelhealth snapshot, format 1' should be here, not 'a letter'"),
        ("future", "line 1: format '2' was written by another version of the plugin"),
        ("truncated", "the file is truncated: 'end' should be its last line"),
        ("cut line", "a name and 12 values should be here, not 'fc.weight"),
        ("word", "'ab' is no value of its column"),
        ("conflict", "a name and 12 values should be here, not '<<<<<<< HEAD'"),
        ("section", "there is no section 'parameter'"),
        ("header", "line 3: 'model: ...' should be here, not 'modell: Model'"),
        ("loss", "line 5: 'low' is no value of its column"),
        ("quote", "is no value of its column"),
    ],
)
def test_damage_is_named_by_line(what: str, message: str) -> None:
    """A damaged file is refused with the line and what should stand there."""
    text = dump(from_observation(small_observation(), "t"))
    with pytest.raises(SnapshotFormatError) as caught:
        load(damaged(text, what))
    assert message in str(caught.value)
    assert str(caught.value).startswith("line ")


def test_every_truncation_is_noticed() -> None:
    """No proper prefix of a file that ends in a line's middle or before the end is a snapshot."""
    text = dump(from_observation(small_observation(), "t")).rstrip("\n")
    for length in range(len(text)):
        with pytest.raises(SnapshotFormatError):
            load(text[:length])
