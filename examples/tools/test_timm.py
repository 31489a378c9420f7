"""timm: image models by name, with random weights on small images."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pytest_modelhealth import ModelHealthError

try:
    import timm
except (ImportError, RuntimeError) as error:  # a torchvision that was built for another torch
    pytest.skip(f"timm cannot be imported: {error}", allow_module_level=True)

# what timm says about its own names
pytestmark = pytest.mark.filterwarnings("ignore:::timm")

MODELS = {
    "resnet18": {},
    "convnext_atto": {},
    "vit_tiny_patch16_224": {"img_size": 64},
    "mobilenetv3_small_050": {},
}


@pytest.fixture
def batch():
    """Images and labels; noise will do for what a fresh model should not do."""
    torch.manual_seed(0)
    return torch.randn(16, 3, 64, 64), torch.randint(10, (16,))


@pytest.fixture(params=list(MODELS))
def model(request, batch):
    """A fresh model with ten classes."""
    return timm.create_model(request.param, num_classes=10, **MODELS[request.param])


def test_fresh_model_is_healthy(model, batch, inspector):
    """Forward and backward in training mode."""
    images, labels = batch
    report = inspector(model.train()).run_inspection(images, target=labels, loss=F.cross_entropy)
    report.assert_healthy()


def test_head_of_another_model_is_found(batch, inspector):
    """``reset_classifier`` after the optimizer was made: the new head is in none."""
    images, labels = batch
    model = timm.create_model("mobilenetv3_small_050", num_classes=5)
    optimizer = torch.optim.AdamW(model.parameters())
    model.reset_classifier(10)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(
        ModelHealthError, match=r"classifier \(trained_parameters\).*in no optimizer"
    ):
        inspector(model).run_step(step, optimizer, (images[:4], labels[:4])).assert_healthy()
