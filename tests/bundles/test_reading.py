"""Reading a bundle executes nothing, and what is wrong with one is said."""

from __future__ import annotations

import copy
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytest_modelhealth import InspectionError, replay
from pytest_modelhealth.bundles.content import CONTENT, FORMAT_VERSION, TENSORS
from pytest_modelhealth.bundles.reading import read

from .conftest import Save


def make() -> nn.Module:
    """Return the model of these bundles."""
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))


@pytest.fixture
def bundle(saved: Save) -> Path:
    """A sound one."""
    _, folder = saved(
        make(),
        {"input": torch.randn(16, 4)},
        torch.randint(3, (16,)),
        loss=nn.CrossEntropyLoss(weight=torch.ones(3)),
        settings={"max_grad_norm": 5.0, "severity": {"finite": "warn"}},
        watch={"types": nn.Linear},
    )
    return folder


class Canary:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["model.pkl", "weights.PT", "pytorch_model.bin", "x.npy"])
def test_a_file_that_could_execute_code_is_refused(bundle: Path, name: str) -> None:
    """It is named, and not opened."""
    canary = bundle.parent / "executed"
    (bundle / name).write_bytes(pickle.dumps(Canary(canary)))
    with pytest.raises(InspectionError, match=f"holds {name}, a kind of file that can execute"):
        replay(bundle, make())
    assert not canary.exists()


@pytest.mark.parametrize("protocol", [0, 2, 4, 5, "torch"])
def test_a_pickle_under_the_name_of_tensors_is_refused(bundle: Path, protocol: int | str) -> None:
    """Of any protocol, and a zip archive of torch."""
    canary = bundle.parent / "executed"
    if protocol == "torch":
        torch.save({"x": Canary(canary)}, bundle / TENSORS)
    else:
        (bundle / TENSORS).write_bytes(pickle.dumps(Canary(canary), protocol=int(protocol)))
    with pytest.raises(InspectionError, match=r"is a (pickle|zip)|does not begin as a file of saf"):
        replay(bundle, make())
    assert not canary.exists()
    pickle.loads(pickle.dumps(Canary(canary)))
    assert canary.exists()  # the canary sings


def test_links_are_refused(bundle: Path) -> None:
    """A bundle reads its own files, and none that it points at."""
    (bundle / TENSORS).rename(bundle.parent / "elsewhere")
    (bundle / TENSORS).symlink_to(bundle.parent / "elsewhere")
    with pytest.raises(InspectionError, match="is a link"):
        replay(bundle, make())


def test_a_later_version_is_refused(bundle: Path) -> None:
    """Both versions are named."""
    text = (bundle / CONTENT).read_text()
    now, later = (f'"format_version": {v},' for v in (FORMAT_VERSION, FORMAT_VERSION + 1))
    (bundle / CONTENT).write_text(text.replace(now, later, 1))
    with pytest.raises(InspectionError, match=r"format 2, and this .* reads formats up to 1"):
        replay(bundle, make())


@pytest.mark.parametrize("file", [TENSORS, CONTENT, "report.json"])
def test_a_file_that_was_cut_is_told(bundle: Path, file: str) -> None:
    """Wherever it was cut."""
    whole = (bundle / file).read_bytes()
    for kept in (0, 1, 7, 8, 9, 50, len(whole) // 2, len(whole) - 3):
        (bundle / file).write_bytes(whole[:kept])
        with pytest.raises(InspectionError, match=r"damaged: .*copy the bundle again"):
            replay(bundle, make())
    (bundle / file).unlink()
    with pytest.raises(InspectionError, match=f"no whole bundle: {file} is missing"):
        replay(bundle, make())


def test_what_is_no_bundle(tmp_path: Path) -> None:
    """A folder that is not there, is empty, or is something else."""
    for path, told in (
        (tmp_path / "none", "no bundle can be read"),
        (tmp_path, "no whole bundle"),
        (7, "takes the path of a bundle"),
    ):
        with pytest.raises(InspectionError, match=told):
            replay(path, make())  # type: ignore[arg-type]


def test_names_that_bundles_give_lead_nowhere(bundle: Path) -> None:
    """A loss, a dtype or a class that a bundle names is no way to anything but these."""
    plain = json.loads((bundle / CONTENT).read_text())
    for loss in (
        {"is": "functional", "name": "warnings"},
        {"is": "functional", "name": "_verify_batch_size"},
        {"is": "functional", "name": "handle_torch_function"},
        {"is": "module", "name": "Module", "arguments": {"is": "mapping", "items": []}},
        {"is": "os.system"},
        {"is": ["functional"]},
    ):
        (bundle / CONTENT).write_text(json.dumps(plain | {"loss": loss}))
        with pytest.raises(InspectionError, match="damaged"):
            replay(bundle, make())


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value in nested data; of long lists the first few."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:3])
    for key, inner in items if isinstance(value, dict | list) else ():
        yield from places(inner, (*path, key)) if isinstance(inner, dict | list) else [(*path, key)]


def test_any_value_may_be_wrong(bundle: Path) -> None:
    """Whatever stands wherever, what comes is an error of ours, or a replay."""
    plain = json.loads((bundle / CONTENT).read_text())
    tried = refused = 0
    for place in [p for p in places(plain) if p]:
        for wrong in (None, "x", -1, [], {}, [["x"]], {"is": "tuple"}, 10**30):
            changed = copy.deepcopy(plain)
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = wrong
            (bundle / CONTENT).write_text(json.dumps(changed))
            tried += 1
            try:
                replay(bundle, make())
            except InspectionError:
                refused += 1
            except Exception as error:
                is_own = place[0] == "loss" or place[2:3] in (("inputs",), ("target",))
                if not is_own:  # there the model or the loss may raise
                    raise AssertionError(f"{place} = {wrong!r}: {error!r}") from error
    assert tried > 500
    assert refused > tried / 3


def test_tensors_are_read_as_they_were(bundle: Path) -> None:
    """Names in the file are those of the model and of the batch, for other tools to read."""
    names = set(read(bundle).tensors)
    assert {"model.0.weight", "model.1.running_mean", "inputs['input']", "target"} <= names
