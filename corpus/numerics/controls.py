"""Healthy models that look like a fault of numerics."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from corpus.cards import Shelf
from corpus.models.designs import ResidualStack
from corpus.models.fields import Alibi, left_padded, llama, seen
from corpus.models.perception import deep_super_resolution, deep_wavenet
from corpus.models.small import autoencoder, flat, language_loss, next_words, vit
from corpus.subject import Subject
from corpus.variants import after_training, as_bfloat16, changed, with_model

SHELF = Shelf("numerics")
control = SHELF.control


def _left(s: Subject) -> None:
    """Rows that see nothing: a finite fill lets them see all, and the loss leaves them out."""
    s.inputs, s.target = left_padded(16)
    s.model.allowed = seen
    for block in s.model.blocks:
        block.attention.fill = torch.finfo(torch.float32).min


def _soft_cap(s: Subject) -> None:
    s.model.finish = lambda x: 30 * torch.tanh(x / 30)


control("left padding filled with the least number", changed(llama, _left))
control("logits capped by tanh at 30", changed(llama, _soft_cap))
control("llama in bfloat16", as_bfloat16(llama))
control("scores less the distance", with_model(Alibi, next_words, language_loss, 16))


control("super resolution of 32 blocks, scaled", deep_super_resolution)
control("wavenet of 20 layers", deep_wavenet)
control("100 residual blocks", with_model(ResidualStack, flat, F.cross_entropy))
control("vit, trained, in bfloat16", as_bfloat16(after_training(vit)))
control("autoencoder, trained to saturation", after_training(autoencoder, 400))
