"""The snapshot file: what is written is read back, and what is no snapshot is refused by line."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_modelhealth.rendering.comparison import drift as explain
from pytest_modelhealth.report import LayerRecord, Observation, Status
from pytest_modelhealth.snapshot.drift import detect_drift
from pytest_modelhealth.snapshot.file_format import SnapshotFormatError, dump, load, statistics
from pytest_modelhealth.snapshot.snapshot import (
    NAMED,
    REAL,
    Snapshot,
    coarse,
    from_observation,
    judges_zeros,
    of_roles,
)
from pytest_modelhealth.statistics import TensorStatistics
from pytest_modelhealth.tolerance import TensorName
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


def reread(snapshot: Snapshot) -> Snapshot:
    """What a file holds of a snapshot."""
    return load(dump(snapshot))


def test_a_snapshot_has_the_numbers_of_the_run() -> None:
    """To the digits of the file; a model comes after its layers, one never called comes last.

    What goes into a container goes into its first layer: only the batch and inner layers have it.
    """
    again = reread(from_observation(small_observation()))
    assert list(again.layers) == ["fc", "", "head"]
    line, values = again.layers["fc"].activations, spread().double()
    assert line is not None
    real = (values.mean(), values.std(correction=0), values.min(), values.max())
    for name, value in zip(REAL, real, strict=True):
        assert getattr(line, name) == pytest.approx(value.item(), rel=1e-8), name
    assert line.rms == pytest.approx(values.square().mean().sqrt().item(), rel=1e-8)
    assert (line.dtype, line.shape, line.count, line.zero_count) == ("float32", (8, 4), 32, 4)
    nested = [layer(name, inputs=spread()) for name in ("", "block", "block.fc")]
    tensors = from_observation(observation(*nested)).tensors
    assert {name for name in tensors if (name, "inputs", "") in tensors[name]} == {"", "block.fc"}


reals = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf, -0.0])
finite = st.floats(-1e9, 1e9) | st.floats(-1e-9, 1e-9)
counts = st.integers(0, 10**12)
names = st.text(max_size=12) | st.sampled_from(["", "a b", '"', "|", "=", "end", "\u2028", "#"])
own_names = st.sampled_from(["weight", "bias", "grad", "a b", "in", "|"])
numbers = st.one_of(
    st.fixed_dictionaries({name: finite.map(abs) if name == "std" else finite for name in REAL}),
    st.just(dict.fromkeys(REAL, math.nan)),
)


@st.composite
def tensors(draw: st.DrawFn, name: TensorName) -> TensorStatistics:
    """Statistics as a layer may have them in a role."""
    fields = {
        **draw(numbers),
        "dtype": draw(st.sampled_from(["float32", "float8_e4m3fn", "bool"])),
        **{key: draw(counts) for key in ("count", "nan", "inf")},
        "zeros": draw(counts) if judges_zeros(name) else 0,
    }
    return statistics(draw(st.sampled_from([(), (64, 10), (0, 3)])), fields)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Layers of any names, each with some of the tensors that a layer may have."""
    layers: dict[str, LayerRecord] = {}
    noise = {}
    for place, name in enumerate(draw(st.sets(names, max_size=3))):
        roles: dict[str, dict[str, TensorStatistics]] = {}
        for role in ("inputs", "activations", "gradients", *NAMED):
            own = draw(st.sets(own_names, max_size=2)) if role in NAMED else {""}
            roles[role] = {o: draw(tensors((name, role, o))) for o in own if draw(st.booleans())}
            multiples = st.dictionaries(st.sampled_from(REAL), st.floats(1, 1e9).map(coarse))
            noise |= {(name, role, o): found for o in roles[role] if (found := draw(multiples))}
        layers[name] = LayerRecord(
            name,
            draw(names),
            draw(st.sampled_from(Status)),
            activation=draw(st.sampled_from([None, "relu"])),
            entered=place,
            calls=draw(counts),
            **of_roles(roles),
        )
    seen = Observation(layers, "Net", loss=draw(st.none() | reals))
    keys = st.tuples(st.just("wiring"), names, st.sampled_from(["never called", ""]))
    warned = draw(st.none() | st.sets(keys, max_size=3).map(lambda k: {key: key[2] for key in k}))
    calibrated = draw(st.booleans())
    return Snapshot("t", "cpu float32", "torch 2.13.0", calibrated, 2.0**-23, seen, noise, warned)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(snapshots())
def test_what_is_written_is_read_back(snapshot: Snapshot) -> None:
    """Any names and counts as they are, any number to nine digits, its noise whole."""
    again = reread(snapshot)
    assert list(again.layers) == list(snapshot.layers)
    for field in ("calibrated", "epsilon", "warnings"):
        assert getattr(again, field) == getattr(snapshot, field)
    for layer_name, written in snapshot.layers.items():
        read = again.layers[layer_name]
        for field in ("type_name", "status", "activation", "calls", "tied"):
            assert getattr(read, field) == getattr(written, field)
        assert list(again.tensors[layer_name]) == list(snapshot.tensors[layer_name])
        for name, line in snapshot.tensors[layer_name].items():
            found = again.tensors[layer_name][name]
            for exact in ("dtype", "shape", "count", "nan_count", "inf_count", "zero_count"):
                assert getattr(found, exact) == getattr(line, exact)
            for real in REAL:
                value = getattr(line, real)
                assert getattr(found, real) == pytest.approx(value, rel=1e-8, nan_ok=True)
            assert again.noise.get(name, {}) == snapshot.noise.get(name, {})


def test_a_new_value_changes_the_line_of_its_layer() -> None:
    """One changed number is a diff of one line, which has it beside what is unusual."""
    before = from_observation(small_observation())
    moved = ("fc", "activations", "")
    now = before.with_tensors(
        lambda name, seen: replace(seen, mean=-1.25e-30, count=12) if name == moved else seen
    )
    now = replace(now, noise={moved: {"min": 4.0}})
    old, new = (dump(s).split("\n") for s in (before, now))
    (changed,) = [b for a, b in zip(old, new, strict=True) if a != b]
    assert changed == (
        "layer=fc type=Linear out=8x4,-1.25e-30,1.39604673,-1.83870971,3,zeros:4,count:12,~min:4 "
        "grad=8x4,0.508064517,1.39604673,-1.83870971,3 "
        ".weight=3x4,0.530303029,1.36909678,-1.5454545,3,zeros:2"
    )


FC = "layer=fc type=Linear"
A_LAYER = "line 10: a layer, 'layer=fc type=Linear out=64x10,0.1,0.9,-2,2', should be here, not"
DAMAGE = {
    "": ("", "", "line 1: 'modelhealth snapshot, format 5' should be here, not ''"),
    "a letter": ("model", "a letter\nmodel", "'modelhealth snapshot, format 5' should be here"),
    "past": ("format 5", "format 4", "written by an older format (4); run with --snapshot-update"),
    "future": ("format 5", "format 6", "format '6' is that of a later version of the plugin"),
    "truncated": ("\nend", "", "the file is truncated: 'end' should be its last line"),
    "no type": (FC, "layer=fc", A_LAYER),
    "cut line": (",-1.5454545", "", A_LAYER),
    "shape": ("3x4", "3x-4", A_LAYER),
    "number": (",3 ", ",3oo ", A_LAYER),
    "option": ("zeros:", "zeroes:", A_LAYER),
    "calls": (FC, f"{FC} calls=many", A_LAYER),
    "status": (FC, f"{FC} status=lost", A_LAYER),
    "tensor": ("grad=", "gradient=", A_LAYER),
    "twice": ("layer=head", "layer=fc", "line 12: another layer should be here, not 'fc'"),
    "conflict": (FC, f"<<<<<<< HEAD\n{FC}", f"{A_LAYER} '<<<<<<< HEAD'"),
    "header": ("model: ", "modell: ", "line 4: 'model: ...' should be here, not 'modell: Model'"),
    "loss": (
        "loss: 0.25",
        "loss: low",
        "line 6: 'noise: measured, epsilon 2^-23' and 'loss: 0.25'",
    ),
    "noise": ("noise: not measured", "noise: none", "line 6: 'noise: measured, epsilon 2^-23'"),
    "noise of 2^9999999": ("2^-23", "2^9999999", "line 6: 'noise: measured, epsilon 2^-23'"),
    "noise above 1": ("2^-23", "2^1", "line 6: 'noise: measured, epsilon 2^-23'"),
    "noise without end": (",3 ", ",3,~max:1e999 ", A_LAYER),
    "noise of nothing": (",3 ", ",3,~max:nan ", A_LAYER),
    "digits": ("format 5", f"format {'9' * 5000}", "format '9999999"),
    "old digits": ("2^-23", f"2^-{'9' * 5000}", "line 6: 'noise: measured, epsilon 2^-23'"),
    "terminal": ("model: M", "model: \x1b[2JM", r"line 4: printable text should be here, not 'mo"),
    "stranger": ("profile: cpu", "cpu", "line 3: 'profile: ...' should be here, not 'cpu float32'"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named_by_line(what: str) -> None:
    """A damaged file is refused with the line and what should stand there."""
    text = dump(from_observation(small_observation()))
    old, new, message = DAMAGE[what]
    broken = text.replace(old, new) if what else ""
    assert broken != text
    with pytest.raises(SnapshotFormatError) as caught:
        load(broken)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"line {caught.value.line}: ")
    assert str(caught.value).isprintable()


def test_a_name_that_steers_a_terminal_is_shown_escaped() -> None:
    """A layer or type may have it, so that the file is read."""
    text = dump(from_observation(small_observation()))
    text = text.replace("layer=fc ", "layer=f%1b[2J ").replace("type=Linear", "type=A%1b[31m")
    found = detect_drift(load(text), from_observation(small_observation()))
    assert r"f\x1b[2J" in found.note
    shown = explain(replace(found, new_warnings=("a \x1b[2J",)))
    assert all(map(str.isprintable, [found.note, *shown]))


def test_every_truncation_is_noticed() -> None:
    """No proper prefix of a file that ends in a line's middle or before the end is a snapshot."""
    text = dump(from_observation(small_observation())).rstrip("\n")
    for length in range(len(text)):
        with pytest.raises(SnapshotFormatError):
            load(text[:length])
