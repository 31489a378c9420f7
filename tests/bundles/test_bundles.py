"""What an inspection ran on goes into a bundle and comes out: run again, it is the same.

Reading one executes nothing.
"""

from __future__ import annotations

import copy
import os
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from corpus.models.hooked import Everything, Grows
from pytest_modelhealth import HealthReport, Inputs, InspectionError, Inspector
from pytest_modelhealth.bundles.data import pack, read, unpack, write
from pytest_modelhealth.bundles.inspecting import Recording, replayed

SAME = "replayed: the same verdict and numbers as then, bit for bit"
Save = Callable[..., tuple[HealthReport, Path]]


@pytest.fixture
def saved(tmp_path: Path) -> Save:
    """Inspect a model and save that: returns the report and the file."""

    def save(model: nn.Module, *args: Any, **options: Any) -> tuple[HealthReport, Path]:
        path, inspector = tmp_path / "bundle.pt", Inspector(model)
        recording = Recording(inspector, args, options)
        report = inspector.run_inspection(*args, **options)
        recording.end()
        assert recording.is_as_it_was()
        recording.save(path, report, {"id": "test", "number": 1})
        return report, path

    return save


def again(path: Path, model: Any, *args: Any, **options: Any) -> tuple[HealthReport, str]:
    """Run it on another model and batch: returns the report, and what is said of it."""
    inspector = Inspector(model)
    report, lines = replayed(read(path), inspector, inspector.run_inspection, args, options)
    return report, "\n".join(lines)


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
    """Values are those of then, types those of the test, whose own batch is of another size.

    A view does not bring all of its memory; what is no data is the test's own, and named.
    """

    def batch(size: int) -> dict[str, Any]:
        return {
            "pair": Pair(torch.full((size,), float(size), requires_grad=True), [size] * size),
            "packed": pack_sequence([torch.ones(size), torch.ones(2)]),
            "array": np.arange(size),
            "ordered": OrderedDict(size=torch.Size([size]), dtype=torch.float16),
            "transposed": torch.ones(size, 3, dtype=torch.float8_e4m3fn).t(),
            "inputs": Inputs(size, mask=None),
        }

    out, missing = through(batch(5), batch(3), tmp_path / "x")
    assert not missing
    assert type(out["pair"]) is Pair
    assert torch.equal(out["pair"].first, torch.full((5,), 5.0))
    assert out["pair"].first.requires_grad
    assert out["pair"].second == [5] * 5
    assert type(out["packed"]) is PackedSequence
    assert torch.equal(out["packed"].batch_sizes, batch(5)["packed"].batch_sizes)
    assert out["array"].tolist() == [0, 1, 2, 3, 4]
    assert type(out["ordered"]) is OrderedDict
    assert dict(out["ordered"]) == {"size": torch.Size([5]), "dtype": torch.float16}
    assert (out["transposed"].dtype, out["transposed"].stride()) == (torch.float8_e4m3fn, (1, 3))
    assert (out["inputs"].args, out["inputs"].kwargs) == ((5,), {"mask": None})

    whole = torch.arange(1e6).view(-1, 10)
    out, _ = through([whole[:10], whole[3:5]], None, tmp_path / "x")
    assert torch.equal(out[0], whole[:10])
    assert torch.equal(out[1], whole[3:5])
    assert (tmp_path / "x").stat().st_size < 5000

    value = {
        "ok": torch.ones(2), "f": len, "sparse": torch.eye(3).to_sparse(),
        "objects": [np.array([{}])], "module": torch.nn.Linear(1, 1),
    }  # fmt: skip
    out, missing = through(
        value, dict.fromkeys(value, "own") | {"objects": ["own"]}, tmp_path / "x"
    )
    assert missing == {
        "x['f']": "builtins.builtin_function_or_method", "x['sparse']": "torch.Tensor",
        "x['objects'][0]": "numpy.ndarray", "x['module']": "torch.nn.modules.linear.Linear",
    }  # fmt: skip
    assert torch.equal(out.pop("ok"), torch.ones(2))
    assert out == {"f": "own", "sparse": "own", "objects": ["own"], "module": "own"}


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


def batch_of(samples: int = 64) -> dict[str, Tensor]:
    """Return a mapping batch that no seed gives again."""
    return {"ids": torch.randint(11, (samples,)), "weight": torch.rand(samples)}


def test_a_replay_is_the_same_bit_for_bit(saved: Save) -> None:
    """On another model and batch, after other random numbers; a bare run gives the same loss."""
    model, batch, target = Everything(), batch_of(), torch.randint(11, (64,))
    bare = copy.deepcopy(model)
    bare.noise = torch.Generator()
    bare.noise.set_state(model.noise.get_state())
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    expected = F.cross_entropy(bare(**batch), target).item()
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
    then, path = saved(model, batch, target, loss=F.cross_entropy)
    assert then.loss == expected

    torch.rand(7)
    np.random.rand(7)
    random.random()
    other = Everything().eval()
    other.head.requires_grad_(False)
    loss = {"loss": F.cross_entropy}
    report, told = again(path, other, batch_of(32), target=torch.randint(11, (32,)), **loss)
    assert told == SAME
    assert report.loss == expected
    assert report.verdict == then.verdict
    # the test goes on from there as it did then
    assert torch.equal(torch.get_rng_state(), states[0])
    assert F.cross_entropy(other(**batch), target).item() == expected


def filled() -> nn.Module:
    """Return one whose buffer is filled."""
    model = Grows()
    model(torch.randn(3, 4))
    return model


def small() -> nn.Module:
    """Return a plain one."""
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "grown buffer": (filled, Grows),
    "LSTM": (partial(nn.LSTM, 4, 4, 2, dropout=0.2),) * 2,
    "compiled": (lambda: torch.compile(small(), backend="eager"), small),
    "data parallel": (lambda: nn.DataParallel(small()), small),
    "fx": (lambda: torch.fx.symbolic_trace(small()),) * 2,
    "parametrised": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),) * 2,
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_of_all_sorts(saved: Save, kind: str) -> None:
    """Wrappers leave no trace in names, and a buffer may be filled or not."""
    make, other = MODELS[kind]
    _, path = saved(make(), torch.randn(16, 4))
    assert again(path, other(), torch.randn(16, 4))[1] == SAME


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_images_in_either_order_of_memory(saved: Save, memory_format: Any) -> None:
    """The order in memory comes back, of weights too: convolutions compute by it."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())

    images = torch.randn(8, 3, 9, 9)
    first, model = make().to(memory_format=memory_format), make()
    _, path = saved(first, images.to(memory_format=memory_format))
    assert again(path, model, images)[1] == SAME
    assert model[0].weight.stride() == first[0].weight.stride()


OTHERS = {
    r"'0.weight' was 8x4 .*, is 9x4": [nn.Linear(4, 9), nn.Linear(9, 2)],
    "'1' was a layer, is not there": [nn.Linear(4, 8)],
    "'2.weight' was not there, is 1 float32": [nn.Linear(4, 8), nn.Linear(8, 2), nn.PReLU()],
    "float32, is .*float64; and 1 more": [nn.Linear(4, 8).double(), nn.Linear(8, 2).double()],
    "'0.weight'.*no shape yet": [nn.LazyLinear(8), nn.Linear(8, 2)],
}


@pytest.mark.parametrize("told", OTHERS)
def test_another_model_is_refused(saved: Save, told: str) -> None:
    """With the names that differ; nothing is loaded."""
    _, path = saved(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(8, 4))
    model = nn.Sequential(*OTHERS[told])
    before = [id(p) for p in model.parameters()]
    with pytest.raises(InspectionError, match=f"is of another model, Sequential: .*{told}"):
        again(path, model, torch.randn(8, 4))
    assert before == [id(p) for p in model.parameters()]


class Scale:
    """No data."""

    by = 2.0


class Scales(nn.Linear):
    """Takes an object."""

    def forward(self, x: Tensor, scale: Scale) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale.by


def test_what_differs_and_what_is_lacking_is_told(saved: Save) -> None:
    """The test has another loss by now: the first differences, and how many more.

    An object in the batch is named with its path and type.
    """
    _, path = saved(nn.Linear(4, 3), torch.randn(16, 4), loss=lambda output: output.mean())
    _, told = again(path, nn.Linear(4, 3), torch.randn(16, 4), loss=lambda output: output.sum())
    assert told.startswith("replayed, and not as then: loss was ")
    assert "the model gradients" in told
    assert "more" in told
    _, path = saved(Scales(4, 3), Inputs(torch.randn(16, 4), scale=Scale()))
    _, told = again(path, Scales(4, 3), Inputs(torch.randn(16, 4), scale=Scale()))
    assert told.startswith(f"{SAME}\nnot in the bundle, so the test's own: inputs['kwargs']['scal")
    assert told.endswith("Scale)")


def test_a_batch_that_was_written_to_is_not_as_it_was() -> None:
    """What would be saved is what the run left."""

    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    batch = Inputs(torch.randn(16, 4))
    inspector = Inspector(Writes(4, 3))
    recording = Recording(inspector, (batch,), {})
    inspector.run_inspection(batch)
    recording.end()
    assert not recording.is_as_it_was()
