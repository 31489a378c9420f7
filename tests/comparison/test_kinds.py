"""Candidates that are not modules of the reference's kind."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from corpus.models.paired import Cnn, Gpt, Mlp, batch
from corpus.pairs import twins
from pytest_modelhealth import compare
from pytest_modelhealth.capture.observing.tensors import TensorStore
from pytest_modelhealth.comparison.trace import Keeper

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_dynamically_quantised_model_is_compared_forward():
    """Eight bits explain what quantisation does; a wrong weight is more than that."""
    reference, candidate = twins(lambda: Mlp().eval())
    quantise = torch.ao.quantization.quantize_dynamic
    comparison = compare(reference, quantise(candidate, {nn.Linear}), batch(reference))
    assert comparison.equivalent, str(comparison)
    assert any("quantised" in note for note in comparison.notes)
    candidate.fc2.weight.data[:16] *= -1
    wrong = compare(reference, quantise(candidate, {nn.Linear}), batch(reference))
    assert wrong.first_divergence.layer == "fc2"


def test_an_onnx_model_is_compared_by_its_outputs(tmp_path):
    """Exported and run by onnxruntime it is equivalent; another model's export is not."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    reference, other = twins(lambda: Mlp().eval())
    path = tmp_path / "model.onnx"
    export(other, path)
    comparison = compare(reference, path, batch(reference))
    assert comparison.equivalent, str(comparison)
    assert len(comparison.outputs) == 1
    other.head.weight.data[0, 0] += 0.01
    export(other, path)
    assert not compare(reference, str(path), batch(reference)).equivalent


def export(model: nn.Module, path: object) -> None:
    """Write a model to an ONNX file with the exporter that needs no further package."""
    torch.onnx.export(model, (batch(model),), path, dynamo=False)


def test_compiled_code_is_what_is_compared():
    """A backend that computes something else is caught, although the eager values are the same."""

    def wrong(graph: torch.fx.GraphModule, example: object) -> object:
        def run(*args: torch.Tensor) -> object:
            return tuple(
                y * 1.01 if isinstance(y, torch.Tensor) and y.is_floating_point() else y
                for y in graph(*args)
            )

        return run

    reference, candidate = twins(lambda: nn.Sequential(nn.Linear(16, 4), nn.ReLU()))
    inputs = torch.randn(8, 16)
    assert compare(reference, torch.compile(candidate, backend="eager"), inputs).equivalent
    assert not compare(reference, torch.compile(candidate, backend=wrong), inputs).equivalent


def test_autocast_is_judged_by_the_precision_that_it_computes_in():
    """A wrapper that runs its model in bfloat16 has float32 weights and bfloat16 roundings."""

    class Autocast(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.model(x).float()

    reference, candidate = twins(Mlp)
    comparison = compare(reference, Autocast(candidate), batch(reference))
    assert comparison.equivalent, str(comparison)
    candidate.fc1.weight.data[:8] = 0
    assert compare(reference, Autocast(candidate), batch(reference)).first_divergence.layer == "fc1"


def test_one_block_in_a_coarser_precision_is_no_licence_for_the_rest():
    """A block under autocast in a float32 model is a divergence in that block."""
    reference, candidate = twins(Gpt)
    block, plain = candidate.blocks[1], candidate.blocks[1].forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain(x).float()

    block.forward = forward
    found = compare(reference, candidate, batch(reference))
    assert found.first_divergence.layer.startswith("blocks.1")
    assert "is bfloat16, was float32" in str(found._failure())


class Fork(nn.Module):
    """Layers before, beside and after one that may be kept in a coarser dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.other = (nn.Linear(16, 16) for _ in range(3))
        self.before, self.beside, self.after = (nn.LayerNorm(16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(self.first(x))
        coarse = self.inner(x.to(self.inner.weight.dtype)).float()
        return self.head(self.after(coarse + self.other(self.beside(x))))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sides", ["candidate", "reference", "both"])
@pytest.mark.parametrize("faulty", ["", "before", "beside", "after", "scaled"])
def test_one_layer_in_half_precision_is_no_licence_for_the_rest(dtype, sides, faulty):
    """An epsilon of 1e-4 for 1e-5 is found wherever it is, and the dtype named; alone it passes."""
    reference, candidate = twins(Fork)
    for name, model in (("reference", reference), ("candidate", candidate)):
        if sides in (name, "both"):
            model.inner.to(dtype)
    if faulty == "scaled":
        plain = candidate.other.forward
        candidate.other.forward = lambda x: plain(x) * 1.001
    elif faulty:
        getattr(candidate, faulty).eps = 1e-4
    comparison = compare(reference, candidate, torch.randn(32, 16))
    where = {"": None, "scaled": "other"}.get(faulty, faulty)
    found = comparison.first_divergence
    assert (found.layer if found else None) == where, str(comparison)
    says_dtype = str(dtype).removeprefix("torch.") in str(comparison._failure() or comparison)
    assert says_dtype is (sides != "both")
    assert all(x.weight.dtype is torch.float32 for x in (reference.first, candidate.first))


@pytest.mark.parametrize("faulty", ["", "before", "after"])
def test_a_region_under_autocast_on_both_sides_is_no_licence_for_the_rest(faulty):
    """Layers around the region are held to float32."""
    reference, candidate = twins(Fork)
    for model in (reference, candidate):
        model.inner.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.inner.forward)
    if faulty:
        getattr(candidate, faulty).eps = 1e-4
    found = compare(reference, candidate, torch.randn(32, 16)).first_divergence
    assert (found.layer if found else "") == faulty


def test_a_transformer_under_autocast_is_judged_by_its_precision():
    """Embeddings and norms stay in float32 there; every product of matrices is in bfloat16."""
    reference, candidate = twins(Gpt)
    plain = candidate.forward

    def forward(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain(ids).float()

    candidate.forward = forward
    comparison = compare(reference, candidate, batch(reference))
    assert comparison.equivalent, str(comparison)
    assert compare(reference, copy.deepcopy(reference).bfloat16(), batch(reference)).equivalent


@pytest.mark.parametrize("build", [Mlp, Cnn, Gpt])
def test_a_loss_and_its_target_are_used_for_both(build):
    """With the user's loss the gradients are those of training, and both losses are told."""
    reference, candidate = twins(build)
    inputs = batch(reference)
    shape = reference(inputs).shape
    target = torch.randint(4, shape[:-1])

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
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
