"""Candidates that are not modules of the reference's kind, nor of its precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.models.changed import Fork, autocast, cleared, negated, nudged, quantised
from corpus.models.paired import Cnn, Gpt, Mlp, batch
from corpus.pairs import twins
from pytest_modelhealth import compare
from pytest_modelhealth.capture.observing.tensors import TensorStore
from pytest_modelhealth.comparison.runs import Keeper

pytestmark = pytest.mark.filterwarnings("ignore")


def exported(model: nn.Module, path: Path) -> Path:
    """An ONNX file, by the exporter that needs no further package."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    torch.onnx.export(model, (batch(model),), path, dynamo=False)
    return path


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], str, Any, str | None]] = {
    "quantised": (lambda: Mlp().eval(), quantised, "fc2", negated, "fc2"),
    "ONNX": (lambda: Mlp().eval(), exported, "head", nudged, None),
    "ONNX by its name": (
        lambda: Mlp().eval(), lambda *args: str(exported(*args)), "head", nudged, None
    ),
    "autocast in a wrapper": (
        Mlp, lambda model, path: nn.Sequential(autocast(model)), "fc1", cleared, "fc1"
    ),
    "autocast of a transformer": (
        Gpt, lambda model, path: autocast(model), "blocks.1.up", cleared, "blocks.1.up"
    ),
    "state dict": (Mlp, lambda model, path: model.state_dict(), "fc2", nudged, "fc2"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_another_kind_is_equivalent_until_a_weight_is_another(kind, tmp_path):
    """It is judged by the precision that it computes in, and a wrong weight is more than that."""
    build, made, layer, change, culprit = KINDS[kind]
    reference, candidate = twins(build)
    comparison = compare(reference, made(candidate, tmp_path / "m.onnx"), batch(reference))
    assert comparison.equivalent, str(comparison)
    if kind == "quantised":
        assert any("quantised" in note for note in comparison.notes)
    if kind.startswith("ONNX"):
        assert len(comparison.outputs) == 1
    _, candidate = twins(build)
    change(candidate.get_submodule(layer).weight.data)
    wrong = compare(reference, made(candidate, tmp_path / "m.onnx"), batch(reference))
    assert not wrong.equivalent
    assert culprit in (None, wrong.first_divergence.layer), str(wrong)


def test_one_block_in_a_coarser_precision_is_no_licence_for_the_rest():
    """A block under autocast in a float32 model is a divergence in that block."""
    reference, candidate = twins(Gpt)
    autocast(candidate.blocks[1])
    comparison = compare(reference, candidate, batch(reference))
    assert comparison.first_divergence.layer.startswith("blocks.1")
    assert "is bfloat16, was float32" in str(comparison._failure())


FORKS = [
    ("candidate", torch.float16), ("candidate", torch.bfloat16), ("reference", torch.bfloat16),
    ("both", torch.float16), ("both", torch.bfloat16), ("both", None),
]  # fmt: skip


@pytest.mark.parametrize(("sides", "dtype"), FORKS)
@pytest.mark.parametrize("faulty", ["", "before", "beside", "scaled"])
def test_one_layer_in_half_precision_is_no_licence_for_the_rest(dtype, sides, faulty):
    """An epsilon of 1e-4 for 1e-5 is found before and beside it; its dtype alone is a note."""
    reference, candidate = twins(Fork)
    for name, model in (("reference", reference), ("candidate", candidate)):
        if dtype is None:
            model.inner.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.inner.forward)
        elif sides in (name, "both"):
            model.inner.to(dtype)
    if faulty == "scaled":
        plain = candidate.other.forward
        candidate.other.forward = lambda x: plain(x) * 1.001
    elif faulty:
        getattr(candidate, faulty).eps = 1e-4
    comparison = compare(reference, candidate, torch.randn(32, 16))
    divergence = comparison.first_divergence
    where = {"": None, "scaled": "other"}.get(faulty, faulty)
    assert (divergence.layer if divergence else None) == where, str(comparison)
    if dtype is not None:
        says_dtype = str(dtype).removeprefix("torch.") in str(comparison._failure() or comparison)
        assert says_dtype is (sides != "both")
    assert all(x.weight.dtype is torch.float32 for x in (reference.first, candidate.first))


@pytest.mark.parametrize("build", [Mlp, Cnn, Gpt])
def test_a_loss_and_its_target_are_used_for_both(build):
    """With the user's loss the gradients are those of training, and both losses are told."""
    reference, candidate = twins(build)
    inputs = batch(reference)
    target = torch.randint(4, reference(inputs).shape[:-1])

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, -2), target.flatten())

    comparison = compare(reference, candidate, inputs, target, loss=loss)
    assert comparison.equivalent
    assert comparison.losses[0] == comparison.losses[1] is not None


def test_a_reference_in_low_precision_measures_itself():
    """A bfloat16 reference is far from its truth; a float32 candidate may well be nearer."""
    candidate, reference = twins(Mlp)
    inputs = batch(candidate).bfloat16()
    assert compare(reference.bfloat16(), candidate, inputs).equivalent


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("build", [Mlp, Cnn])
def test_another_device_is_compared_where_there_is_one(build):
    """The batch goes to the candidate's device; rounding there is what it is here."""
    reference, candidate = twins(build)
    assert compare(reference, candidate.cuda(), batch(reference)).equivalent


def test_a_tensor_that_compiled_code_wrote_to_again_is_kept_anew():
    """Such code reuses memory without a new version: what was kept is then something else."""
    with TensorStore(1 << 20) as store:
        keeper = Keeper(store)
        tensor = torch.ones(3)
        keeper.see("a", "activations", "", tensor)
        keeper.see("b", "inputs", "", tensor)
        tensor.data.view(-1).numpy()[:] = 2  # unseen by the version counter
        keeper.forget()
        keeper.see("b", "activations", "", tensor)
        slots = [entry.slot for entry in keeper.entries.values()]
        assert slots[0] == slots[1] != slots[2]
        assert store[slots[2]].tolist() == [2, 2, 2]
