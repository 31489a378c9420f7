"""The training steps that the benchmarks measure: a model, its batch and its loss."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Step:
    """A model with the batch and the loss of one training step."""

    model: nn.Module
    inputs: dict[str, Tensor] | Tensor
    target: Tensor | None = None
    loss: Callable[..., Tensor] | None = None

    def run(self) -> None:
        """Run forward and backward as a training loop does."""
        self.forget_gradients()
        output = self.model(**self.inputs) if self.takes_keywords else self.model(self.inputs)
        self.loss_of(output).backward()

    def forget_gradients(self) -> None:
        """Have no gradient on any parameter: memory of an earlier one would be kept for it."""
        self.model.zero_grad(set_to_none=True)

    @property
    def takes_keywords(self) -> bool:
        """Whether the inputs go in by name."""
        return isinstance(self.inputs, dict)

    def loss_of(self, output: Any) -> Tensor:
        """Return the loss of an output; the model has computed its own where there is none."""
        return output.loss if self.loss is None else self.loss(output, self.target)


def _mean_square(output: Tensor, target: Any) -> Tensor:
    return output.square().mean()


def bert() -> Step:
    """BERT-like, 6 layers of 384, batch 8 x 128."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=8000,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1536,
    )
    ids = torch.randint(0, 8000, (8, 128))
    return Step(BertForMaskedLM(config), {"input_ids": ids, "labels": ids})


def gpt2() -> Step:
    """GPT-2-like, 6 layers of 512, batch 4 x 256."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=8000, n_embd=512, n_layer=6, n_head=8, n_positions=256)
    ids = torch.randint(0, 8000, (4, 256))
    return Step(GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids})


def resnet50() -> Step:
    """ResNet-50, batch 8 at 160 px."""
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    return Step(
        model,
        {"pixel_values": torch.randn(8, 3, 160, 160), "labels": torch.randint(0, 1000, (8,))},
    )


def wide() -> Step:
    """Two wide linear layers with activations of 2048 x 4096."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096))
    return Step(model, torch.randn(2048, 1024), None, _mean_square)


def tiny(pairs: int = 250) -> Step:
    """500 tiny layers: linear 32 x 32 and ReLU, batch 32."""
    model = nn.Sequential(*(m for _ in range(pairs) for m in (nn.Linear(32, 32), nn.ReLU())))
    return Step(model, torch.randn(32, 32), None, _mean_square)


def example_cnn() -> Step:
    """The CNN of examples/ on a batch of 64 digits."""
    from examples.models.cnn import CNN

    return Step(CNN(), torch.rand(64, 1, 8, 8), torch.randint(0, 10, (64,)), F.cross_entropy)


def example_gpt() -> Step:
    """The GPT of examples/ on a batch of 32 texts of 64 characters."""
    from examples.models.gpt import GPT, next_token_loss

    tokens = torch.randint(0, 96, (32, 65))
    return Step(GPT(96), tokens[:, :-1], tokens[:, 1:], next_token_loss)


STEPS: dict[str, Callable[[], Step]] = {
    "BERT-like": bert,
    "GPT-2-like": gpt2,
    "ResNet-50": resnet50,
    "wide linears": wide,
    "500 tiny layers": tiny,
    "example CNN": example_cnn,
    "example GPT": example_gpt,
}
