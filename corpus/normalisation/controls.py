"""Healthy models that look like a fault of normalisation."""

from __future__ import annotations

import functools

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from corpus.cards import Shelf
from corpus.models.designs import conv_norms
from corpus.models.fields import RMSNorm, llama
from corpus.models.perception import quantised
from corpus.models.small import ViT, gpt, images, sequential
from corpus.models.starts import ChannelNorm, Inception, inception
from corpus.models.usual import normed, post_norm
from corpus.subject import Subject
from corpus.variants import after_training, changed, evaluated, with_model

SHELF = Shelf("normalisation")
control = SHELF.control


class GemmaNorm(RMSNorm):
    """Adds one to a weight that starts at zero."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weight)


def _gemma(s: Subject) -> None:
    for block in s.model.blocks:
        block.norm1, block.norm2 = GemmaNorm(32), GemmaNorm(32)
    s.model.norm = GemmaNorm(32)
    s.model.between = lambda x: x * 32**0.5


control("norms that add one to a weight of zero", changed(llama, _gemma))


control(
    "quantised, fresh norms in evaluation after one step", evaluated(after_training(quantised, 5))
)

control("GroupNorm", after_training(
    with_model(normed(functools.partial(nn.GroupNorm, 4)), images, F.cross_entropy)))  # fmt: skip

control("InstanceNorm", with_model(normed(nn.InstanceNorm2d), images, F.cross_entropy))
control("RMSNorm, pre-norm", changed(gpt, lambda s: [
    (setattr(block, "norm1", nn.RMSNorm(32)), setattr(block, "norm2", nn.RMSNorm(32)))
    for block in s.model.blocks
]))  # fmt: skip
control("post-norm", with_model(post_norm(), images, F.cross_entropy, 32))
control("DeepNorm, 12 blocks", with_model(post_norm(12, 24**0.25), images, F.cross_entropy, 16))
control("pre-norm, 12 blocks", with_model(lambda: ViT(depth=12), images, F.cross_entropy, 16))


def _drawn(model: nn.Module, scale: float, shift: float) -> nn.Module:
    """Draw scales around one, as DCGAN does, or around `scale` with shifts, as RepVGG does."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, scale, 0.02 if shift == 0.0 else shift)
            nn.init.normal_(module.bias, 0.0, shift)
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    return model.eval()


for _std in (0.01, 0.05, 0.3):
    control(f"24 convolutions of deviation {_std}, initialised, eval", with_model(
        functools.partial(conv_norms, 24, _std), images, F.cross_entropy, 32))  # fmt: skip

for _scale, _shift in ((1.0, 0.0), (0.0, 0.0), (0.1, 0.1)):
    control(f"scales drawn around {_scale}, shifts by {_shift}, eval", with_model(
        lambda scale=_scale, shift=_shift: _drawn(conv_norms(6, 0.1), scale, shift),
        images, F.cross_entropy, 32))  # fmt: skip


def _parametrize(s: Subject) -> None:
    parametrizations.weight_norm(s.model[0])
    parametrizations.spectral_norm(s.model[2])


control("weight and spectral norm", changed(sequential, _parametrize))

# ---- weights whose scale a normalisation takes away ----------------------------------------------


control("wide convolutions of std 0.3 before batch norms", inception)
control("wide convolutions of std 0.3 before norms of one's own", with_model(
    lambda: Inception(ChannelNorm), images, F.cross_entropy))  # fmt: skip
