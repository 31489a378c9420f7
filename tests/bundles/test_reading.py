"""Reading a bundle executes nothing, and what is wrong with one is said."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytest_modelhealth import InspectionError, replay
from pytest_modelhealth.bundles.file import CONTENT, FORMAT, FORMAT_VERSION, allowed

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


@pytest.mark.parametrize("protocol", [0, 2, 4, 5, "torch", "inside"])
def test_a_file_that_could_execute_code_is_refused(bundle: Path, protocol: int | str) -> None:
    """A pickle of any protocol, an archive of torch, and a sound bundle with an object in it."""
    canary = bundle.parent / "executed"
    if protocol == "torch":
        torch.save({"x": Canary(canary)}, bundle / CONTENT)
    elif protocol == "inside":
        torch.save(loaded(bundle) | {"created": Canary(canary)}, bundle / CONTENT)
    else:
        (bundle / CONTENT).write_bytes(pickle.dumps(Canary(canary), protocol=int(protocol)))
    with pytest.raises(InspectionError, match=r"nothing of it was executed|is damaged"):
        replay(bundle, make())
    assert not canary.exists()
    pickle.loads(pickle.dumps(Canary(canary)))
    assert canary.exists()  # the canary sings


def loaded(bundle: Path) -> dict[str, Any]:
    """Return what a bundle's file holds."""
    with torch.serialization.safe_globals(allowed()):
        return torch.load(bundle / CONTENT, weights_only=True)


def test_links_are_refused(bundle: Path) -> None:
    """A bundle reads its own files, and none that it points at."""
    (bundle / CONTENT).rename(bundle.parent / "elsewhere")
    (bundle / CONTENT).symlink_to(bundle.parent / "elsewhere")
    with pytest.raises(InspectionError, match="is a link"):
        replay(bundle, make())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format_version": FORMAT_VERSION + 1}, r"of format 6, and this .* reads format 5"),
        ({"format": "another"}, f"its format is not {FORMAT!r}"),
        ({"batches": None}, "damaged"),
    ],
    ids=["later", "another", "wrong"],
)
def test_another_format_is_refused(bundle: Path, change: dict[str, Any], told: str) -> None:
    """Both versions are named."""
    torch.save(loaded(bundle) | change, bundle / CONTENT)
    with pytest.raises(InspectionError, match=told):
        replay(bundle, make())


def test_a_file_that_was_cut_is_told(bundle: Path) -> None:
    """Wherever it was cut."""
    file = CONTENT
    whole = (bundle / file).read_bytes()
    for kept in (0, 1, 7, 8, 9, 50, len(whole) // 2, len(whole) - 3):
        (bundle / file).write_bytes(whole[:kept])
        with pytest.raises(InspectionError, match=r"is damaged: .*copy the bundle again"):
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
