"""The snapshot file: what is written is read back, and what is no snapshot is refused by line."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_modelhealth.report import Observation, Status
from pytest_modelhealth.snapshot.file_format import (
    PART,
    SnapshotFormatError,
    dump,
    load,
    load_sound,
)
from pytest_modelhealth.snapshot.recording import from_observation
from pytest_modelhealth.snapshot.snapshot import (
    REAL,
    LayerLine,
    Snapshot,
    SnapshotFile,
    TensorLine,
    is_judged_whole,
    judges_zeros,
)
from pytest_modelhealth.snapshot.tolerances import Tolerances, coarse
from tests.builders import layer, observation

OWN_NAMES = ("parameters", "parameter_gradients", "buffers")
"""The roles of which a layer has several tensors, each with a name of its own."""


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


def text_of(*snapshots: Snapshot) -> str:
    """The file with these sections."""
    return dump(SnapshotFile("t", {s.profile: s for s in snapshots}))


def reread(snapshot: Snapshot) -> Snapshot:
    """What a file holds of a snapshot."""
    (read,) = load(text_of(snapshot)).snapshots.values()
    return read


def test_the_numbers_in_the_file_are_those_of_the_tensor() -> None:
    """Mean, std, extremes and rms agree with torch's own to the digits the file has."""
    line = reread(from_observation(small_observation())).layers["fc"].tensors["activations", ""]
    values = spread().double()
    expected = {
        "mean": values.mean(),
        "std": values.std(correction=0),
        "min": values.min(),
        "max": values.max(),
        "rms": values.square().mean().sqrt(),
    }
    for name, value in expected.items():
        assert getattr(line, name) == pytest.approx(value.item(), abs=5e-4 / PART * 3), name
    assert (line.dtype, line.shape, line.count) == ("float32", (8, 4), 32)
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
    layers = from_observation(seen).layers.items()
    with_inputs = [name for name, line in layers if ("inputs", "") in line.tensors]
    assert sorted(with_inputs) == ["", "block.fc"]


reals = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf, -0.0])
finite = st.floats(-1e9, 1e9) | st.floats(-1e-9, 1e-9)
fractions = st.integers(0, 10_000).map(lambda n: n / 10_000)
counts = st.integers(0, 10**12)
names = st.text(max_size=12) | st.sampled_from(["", "a b", '"', "|", "=", "end", "\u2028", "#"])
own_names = st.sampled_from(["weight", "bias", "grad", "a b", "in", "|"])
numbers = st.one_of(
    st.fixed_dictionaries({name: finite.map(abs) if name == "std" else finite for name in REAL}),
    finite.map(lambda value: {"mean": value, "std": 0.0, "min": value, "max": value}),
    st.just(dict.fromkeys(REAL, math.nan)),
)


@st.composite
def tensor_lines(draw: st.DrawFn, role: str, layer: str) -> TensorLine:
    """Statistics as a layer may have them in a role."""
    multiples = st.floats(1, 1e9).map(coarse)
    return TensorLine(
        **draw(numbers),
        dtype=draw(st.sampled_from(["float32", "float8_e4m3fn", "bool"])),
        shape=draw(st.sampled_from([(), (64, 10), (0, 3)])),
        count=draw(counts),
        zeros=draw(fractions) if judges_zeros(role, layer) else 0.0,
        dead=draw(st.none() | fractions) if is_judged_whole(role, layer) else None,
        nan=draw(counts),
        inf=draw(counts),
        noise=draw(st.dictionaries(st.sampled_from(REAL), multiples, max_size=4)),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Layers of any names, each with some of the tensors that a layer may have."""
    lines = st.builds(LayerLine, names, names, counts, st.sampled_from(["", "relu"]))
    layers = draw(st.dictionaries(names, lines, max_size=3))
    for name, line in layers.items():
        tensors: dict[tuple[str, str], TensorLine] = {}
        for role in ("inputs", "activations", "gradients", *OWN_NAMES):
            for own_name in draw(st.sets(own_names, max_size=2)) if role in OWN_NAMES else [""]:
                if draw(st.booleans()):
                    tensors[role, own_name] = draw(tensor_lines(role, name))
        layers[name] = replace(line, tensors=tensors)
    return Snapshot(
        profile="cpu float32",
        model="Net",
        recorded="torch 2.13.0",
        calibrated=draw(st.booleans()),
        epsilon=2.0**-23,
        loss=draw(st.none() | reals),
        layers=layers,
    )


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(snapshots())
def test_what_is_written_is_read_back(snapshot: Snapshot) -> None:
    """Any names and counts as they are, any number to a tenth of its tolerance, its noise whole."""
    again = reread(snapshot)
    assert list(again.layers) == list(snapshot.layers)
    assert (again.calibrated, again.epsilon) == (snapshot.calibrated, snapshot.epsilon)
    tolerances = Tolerances(snapshot)
    for layer_name, written in snapshot.layers.items():
        assert replace(again.layers[layer_name], tensors={}) == replace(written, tensors={})
        assert list(again.layers[layer_name].tensors) == list(written.tensors)
        for (role, own_name), line in written.tensors.items():
            read = again.layers[layer_name].tensors[role, own_name]
            for exact in ("dtype", "shape", "count", "nan", "inf"):
                assert getattr(read, exact) == getattr(line, exact)
            assert read.dead == pytest.approx(line.dead)
            assert read.zeros == pytest.approx(line.zeros)
            for real in REAL:
                value = getattr(line, real)
                allowance = tolerances.of(role, layer_name, line, real, value)
                error = max(allowance.distance / PART * 1.001, 1e-15 * abs(value))
                assert getattr(read, real) == pytest.approx(value, rel=0, abs=error, nan_ok=True)
                if allowance.noise and math.isfinite(value):
                    assert read.noise.get(real, 1.0) == max(line.noise.get(real, 1.0), 1.0)


def test_a_new_value_changes_the_line_of_its_layer() -> None:
    """One changed number is a diff of one line, which has it beside what is unusual."""
    before = from_observation(small_observation())
    moved = replace(before.layers["fc"].tensors["activations", ""], mean=-1.2345e-30, count=12)
    now = before.with_tensors(
        lambda layer, key, line: moved if (layer, key) == ("fc", ("activations", "")) else line
    )
    old, new = (text_of(s).split("\n") for s in (before, now))
    (changed,) = [b for a, b in zip(old, new, strict=True) if a != b]
    assert changed == (
        "layer=fc type=Linear out=8x4,~0,1.396,-1.8387..3,zeros:0.125,count:12 "
        "grad=8x4,0.508,1.396,-1.839..3 .weight=3x4,0.530303,1.3690968,-1.5454545..3,zeros:0.1667"
    )


FC = "layer=fc type=Linear"
DAMAGE = {
    "": ("", "", "line 1: 'modelhealth snapshot, format 4' should be here, not ''"),
    "a letter": ("model", "a letter\nmodel", "'modelhealth snapshot, format 4' should be here"),
    "past": ("format 4", "format 3", "written by an older format (3); run with --snapshot-update"),
    "future": ("format 4", "format 5", "format '5' is that of a later version of the plugin"),
    "truncated": ("\nend", "", "the file is truncated: 'end' should be its last line"),
    "no type": (FC, "layer=fc", "line 11: 'layer=' and 'type=' should be here, not 'layer=fc "),
    "cut line": (
        ",-1.5454545..3",
        "",
        "line 11: '64x10,0.1,0.9,-2..2' (shape, mean, std, min..max",
    ),
    "shape": ("3x4", "3x-4", "line 11: '64x10,0.1,0.9,-2..2' (shape, mean, std, min..max)"),
    "number": ("..3", "..3oo", "line 11: '64x10,0.1,0.9,-2..2' (shape, mean, std, min..max)"),
    "option": ("zeros:", "zeroes:", "line 11: '64x10,0.1,0.9,-2..2' (shape, mean, std, min..max)"),
    "calls": (FC, f"{FC} calls=many", "line 11: a whole number should be here, not 'many'"),
    "tensor": ("grad=", "gradient=", "line 11: 'in', 'out', 'grad', '.weight', '.weight.grad'"),
    "twice": ("layer=head", "layer=fc", "line 13: another layer should be here, not 'fc'"),
    "conflict": (FC, f"<<<<<<< HEAD\n{FC}", "line 11: a merge was not resolved, there is the mark"),
    "header": ("model: ", "modell: ", "line 6: 'model: ...' should be here, not 'modell: Model'"),
    "loss": ("loss: 0.25", "loss: low", "line 9: a number such as 0.25, or 0.25~4 with its noise"),
    "noise": ("noise: not measured", "noise: none", "line 8: 'noise: measured, epsilon 2^-23' or"),
    "stranger": ("=== cpu float32 ===", "unknown", "line 5: '=== device dtype ===' should be here"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named_by_line(what: str) -> None:
    """A damaged file is refused with the line and what should stand there."""
    text = text_of(from_observation(small_observation()))
    old, new, message = DAMAGE[what]
    broken = text.replace(old, new) if what else ""
    assert broken != text
    with pytest.raises(SnapshotFormatError) as caught:
        load(broken)
    assert message in str(caught.value)
    assert str(caught.value).startswith("line ")
    assert caught.value.at("a.health").startswith(f"a.health:{caught.value.line}: ")


def test_a_section_that_is_there_twice_is_refused() -> None:
    """Nobody can tell which of the two counts."""
    text = text_of(from_observation(small_observation()))
    with pytest.raises(SnapshotFormatError, match="there are 2 sections 'cpu float32'"):
        load(text.replace("\nend", text[text.index("=== ") :]))


def test_every_truncation_is_noticed() -> None:
    """No proper prefix of a file that ends in a line's middle or before the end is a snapshot."""
    text = text_of(from_observation(small_observation())).rstrip("\n")
    for length in range(len(text)):
        with pytest.raises(SnapshotFormatError):
            load(text[:length])


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
    broken = text[:start] + text[start:].replace("type=Linear", "Linear", 1)
    file, problems = load_sound(broken)
    assert list(file.snapshots) == ["cpu float32"]
    assert "'type='" in str(problems[0])
    cut, problems = load_sound(text[: start + 200])
    assert list(cut.snapshots) == ["cpu float32"]
    assert "truncated" in str(problems[0])
