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
from pytest_modelhealth.snapshot import content
from pytest_modelhealth.snapshot.file_format import (
    LayerLine,
    Snapshot,
    SnapshotFile,
    SnapshotFormatError,
    TensorLine,
    dump,
    load,
    load_sound,
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


def from_observation(seen: Observation) -> Snapshot:
    """What a snapshot keeps of an observation without measured noise."""
    return content.from_observation(seen)


def text_of(*snapshots: Snapshot) -> str:
    """The file with these sections."""
    return dump(SnapshotFile("t", {s.profile: s for s in snapshots}))


def reread(snapshot: Snapshot) -> Snapshot:
    """What a file holds of a snapshot."""
    (read,) = load(text_of(snapshot)).snapshots.values()
    return read


def test_the_numbers_in_the_file_are_those_of_the_tensor() -> None:
    """Mean, std, extremes and rms agree with torch's own to the digits the file has."""
    line = reread(from_observation(small_observation())).tensors["activations"]["fc"]
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
    assert list(from_observation(small_observation()).layers) == ["fc", "", "head"]


def test_containers_have_no_inputs_of_their_own() -> None:
    """What goes into a container goes into its first layer; the batch and inner layers have it."""
    seen = observation(
        layer("", inputs=spread()),
        layer("block", inputs=spread()),
        layer("block.fc", inputs=spread()),
    )
    assert list(from_observation(seen).tensors["inputs"]) == ["", "block.fc"]


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
    noise=st.dictionaries(
        st.sampled_from(["mean", "std", "min", "max", "rms"]), st.floats(1e-20, 1e20), max_size=5
    ),
)
snapshots = st.builds(
    Snapshot,
    profile=st.just("cpu float32"),
    model=st.just("Net"),
    recorded=st.just("torch 2.13.0"),
    calibrated=st.booleans(),
    epsilon=st.just(1.2e-7),
    loss=st.none() | reals,
    layers=st.dictionaries(
        names, st.builds(LayerLine, names, names, counts, st.sampled_from(["", "relu"])), max_size=3
    ),
    tensors=st.dictionaries(
        st.sampled_from(["inputs", "activations", "parameters"]),
        st.dictionaries(names, tensor_lines, min_size=1, max_size=3),
        max_size=3,
    ),
)


@given(snapshots)
def test_what_is_written_is_read_back(snapshot: Snapshot) -> None:
    """Any layer name, any float, any count: reading gives what was written, to its digits."""
    text = text_of(snapshot)
    again = reread(snapshot)
    assert list(again.layers.items()) == list(snapshot.layers.items())
    assert (again.calibrated, again.epsilon) == (snapshot.calibrated, snapshot.epsilon)
    assert load(text).test == "t"
    for role, tensors in snapshot.tensors.items():
        assert list(again.tensors[role]) == list(tensors)
        for name, line in tensors.items():
            read = again.tensors[role][name]
            noise = line.noise.get("mean", 0.0)
            near = pytest.approx(line.mean, rel=1e-9, abs=noise * 1.01, nan_ok=True)
            assert read.mean == near
            assert read.dead == pytest.approx(line.dead)
            assert (read.count, read.nan, read.inf) == (line.count, line.nan, line.inf)


def test_a_new_value_leaves_the_other_lines_alone() -> None:
    """One changed number is a diff of one line, whatever its width."""
    before = from_observation(small_observation())
    tensors = {role: dict(lines) for role, lines in before.tensors.items()}
    line = tensors["activations"]["fc"]
    tensors["activations"]["fc"] = replace(line, mean=-1.2345e-30, count=123_456_789_012)
    old, new = (text_of(s).split("\n") for s in (before, replace(before, tensors=tensors)))
    assert len([1 for a, b in zip(old, new, strict=True) if a != b]) == 1


def damaged(text: str, what: str) -> str:
    """Damage a snapshot file in one of the ways that files are damaged."""
    lines = text.split("\n")
    row = next(i for i, line in enumerate(lines) if line.startswith("fc.weight"))
    edits = {
        "empty": "",
        "binary": struct.pack("<8d", *range(8)).decode("utf-8", errors="replace"),
        "title": "a letter\n" + text,
        "future": text.replace("format 2", "format 3"),
        "truncated": "\n".join(lines[: row + 1]),
        "cut line": "\n".join([*lines[:row], lines[row][:-20], *lines[row + 1 :]]),
        "word": "\n".join([*lines[:row], lines[row].replace("12 ", "ab "), *lines[row + 1 :]]),
        "conflict": "\n".join([*lines[:row], "<<<<<<< HEAD", *lines[row:]]),
        "section": text.replace("[parameters]", "[parameter]"),
        "header": text.replace("model: ", "modell: "),
        "loss": text.replace("loss: 0.25", "loss: low"),
        "noise": text.replace("noise: not measured", "noise: none"),
        "stranger": text.replace("=== cpu float32 ===", "unknown"),
        "quote": "\n".join(
            [*lines[:row], lines[row].replace("fc.weight", '"\\x"'), *lines[row + 1 :]]
        ),
    }
    return edits[what]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("empty", "line 1: 'modelhealth snapshot, format 2' should be here, not ''"),
        ("binary", "line 1: 'modelhealth snapshot"),
        ("title", "line 1: 'modelhealth snapshot, format 2' should be here, not 'a letter'"),
        ("future", "line 1: format '3' was written by another version of the plugin"),
        ("truncated", "the file is truncated: 'end' should be its last line"),
        ("cut line", "a name and 12 values should be here, not 'fc.weight"),
        ("word", "'ab' is no value of its column"),
        ("conflict", "a merge was not resolved: '<<<<<<< HEAD'"),
        ("section", "there is no table 'parameter'"),
        ("header", "line 5: 'model: ...' should be here, not 'modell: Model'"),
        ("loss", "line 8: 'low' is no value of its column"),
        ("quote", "is no value of its column"),
        ("noise", "says nothing of a noise"),
        ("stranger", "'=== device dtype ===' should be here, not 'unknown'"),
    ],
)
def test_damage_is_named_by_line(what: str, message: str) -> None:
    """A damaged file is refused with the line and what should stand there."""
    text = text_of(from_observation(small_observation()))
    with pytest.raises(SnapshotFormatError) as caught:
        load(damaged(text, what))
    assert message in str(caught.value)
    assert str(caught.value).startswith("line ")


def test_every_truncation_is_noticed() -> None:
    """No proper prefix of a file that ends in a line's middle or before the end is a snapshot."""
    text = text_of(from_observation(small_observation())).rstrip("\n")
    for length in range(len(text)):
        with pytest.raises(SnapshotFormatError):
            load(text[:length])


OLD = """\
modelhealth snapshot, format 1
test: test_model.py::test_no_drift
model: Net
recorded: pytest-modelhealth 0.1.0, torch 2.13.0, cpu
loss: 0.25

[layers]    type                      status          calls
fc          Linear                    observed            1
""          Net                       observed            1

[activations]  dtype     shape             count         mean          std          min          max          rms    zeros     dead  nan  inf
fc             float32   8x4                  32      0.48387       1.4893           -2            3       1.5659   12.50%    0.00%    0    0

end
"""  # noqa: E501


def test_format_1_is_read() -> None:
    """A file without sections and noise is one of the profile that it names."""
    file = load(OLD)
    assert (file.test, list(file.snapshots)) == ("test_model.py::test_no_drift", ["cpu float32"])
    snapshot = file.snapshots["cpu float32"]
    assert (snapshot.version, snapshot.calibrated, snapshot.loss) == (1, False, 0.25)
    assert snapshot.layers["fc"] == LayerLine("Linear", "observed", 1)
    line = snapshot.tensors["activations"]["fc"]
    assert (line.std, line.zeros, line.noise) == (1.4893, 0.125, {})


def test_sections_stand_side_by_side() -> None:
    """A file holds one snapshot a profile, each read by itself."""
    one = from_observation(small_observation())
    other = replace(one, profile="cuda bfloat16", loss=0.5)
    file = load(text_of(one, other))
    assert list(file.snapshots) == ["cpu float32", "cuda bfloat16"]
    assert [s.loss for s in file.snapshots.values()] == [0.25, 0.5]


def test_a_damaged_section_leaves_the_others_readable() -> None:
    """One bad line costs its own section only, and where a file was cut, the last one."""
    one = from_observation(small_observation())
    text = text_of(one, replace(one, profile="cuda bfloat16"))
    start = text.index("=== cuda")
    broken = text[:start] + text[start:].replace("Linear", "Lin ear", 1)
    file, problems = load_sound(broken)
    assert list(file.snapshots) == ["cpu float32"]
    assert "5 values" in str(problems[0]) or "4 values" in str(problems[0])
    cut, problems = load_sound(text[: start + 400])
    assert list(cut.snapshots) == ["cpu float32"]
    assert "truncated" in str(problems[0])
