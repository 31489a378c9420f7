"""Healthy models as they are used, which look like no fault, held out.

Read them only after the limits are fixed.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from corpus.cards import Shelf
from corpus.models.held_out import TRANSFORMERS, Fourier, Weighed
from corpus.models.small import (
    GPT,
    autoencoder,
    bert,
    cnn,
    deep,
    graph,
    gru,
    images,
    language_loss,
    mlp,
    multitask,
    next_words,
    regression,
    resnet,
    seq2seq,
    sequential,
    unet,
    vae,
    vit,
)
from corpus.models.usual import activated, picture
from corpus.variants import (
    after_training,
    as_bfloat16,
    evaluated,
    from_transformers,
    of_batch,
    with_model,
)

SHELF = Shelf("healthy", "held out")
control = SHELF.control

for _healthy in (mlp, resnet, gru, bert, seq2seq, vae, autoencoder, graph, regression, multitask):
    control(f"{_healthy.__name__}, trained, eval", evaluated(after_training(_healthy)))

for _healthy, _n in ((sequential, 3), (resnet, 1), (bert, 2), (unet, 1), (vae, 5), (gru, 1)):
    control(f"{_healthy.__name__}, trained, batch of {_n}", of_batch(after_training(_healthy), _n))

for _healthy in (cnn, vit, unet, deep):
    control(f"{_healthy.__name__}, initialised, bfloat16", as_bfloat16(_healthy))

for _healthy in (cnn, bert, vit):
    control(f"{_healthy.__name__}, trained, bfloat16", as_bfloat16(after_training(_healthy)))

for _name in TRANSFORMERS:
    control(f"transformers {_name}", from_transformers(_name))

for _activation in (nn.ELU, nn.Mish, nn.ReLU6, nn.Softplus, nn.PReLU):
    control(f"{_activation.__name__}, trained", after_training(activated(_activation)))

control("squeeze and excitation", after_training(with_model(Weighed, images, F.cross_entropy)))
control("Fourier features", with_model(Fourier, picture, F.mse_loss))
control("Fourier features, trained", after_training(with_model(Fourier, picture, F.mse_loss)))
control("wide vocabulary, untied", with_model(
    lambda: GPT(tied=False), next_words, language_loss, 16))  # fmt: skip
