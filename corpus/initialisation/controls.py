"""Healthy models that look like a fault of initialisation."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.designs import Unetlike, noised_images
from corpus.models.fields import actor_critic, set_transformer
from corpus.models.gated import (
    dit,
    dit_with_open_end,
    flamingo,
    gated_mlp,
    non_local,
    shortcuts_of_zero,
    skip_init,
    zero_projections,
)
from corpus.models.libraries import ClosedGate, Queries, scaled_conv
from corpus.models.small import (
    MLP,
    ResNet,
    cnn,
    flat,
    gpt,
    gru,
    he,
    images,
    plain,
    resnet,
    rows,
    sequential,
    unet,
    vit,
)
from corpus.models.starts import normalizer_free, pooled, relative, trunk
from corpus.models.usual import Gated, LayerScale, Siren, adapt, picture
from corpus.subject import Healthy, Subject
from corpus.variants import add_each, after_training, changed, with_model

SHELF = Shelf("initialisation")
control = SHELF.control
add = functools.partial(add_each, SHELF)


def _fresh_critic(s: Subject) -> None:
    nn.init.zeros_(s.model.critic.weight)
    nn.init.zeros_(s.model.critic.bias)


def _with_one_zero(s: Subject) -> None:
    s.model.seeds.data[:, 1:] = 0.0


control("seeds of zero but for one", changed(set_transformer, _with_one_zero))
control("critic that starts at zero", changed(actor_critic, _fresh_critic))


def _zero_last_norms(s: Subject) -> None:
    for block in s.model.blocks:
        nn.init.zeros_(block.bn2.weight)


control("resnet, last norm of each branch zero", changed(resnet, _zero_last_norms))
control("ReZero", with_model(Gated, flat, F.cross_entropy))
control("ReZero, trained", after_training(with_model(Gated, flat, F.cross_entropy)))


def _layer_scale(s: Subject) -> None:
    for block in s.model.blocks:
        block.attention = LayerScale(block.attention, 32, 1e-5)
        block.mlp = LayerScale(block.mlp, 32, 1e-5)


control("vit with LayerScale", changed(vit, _layer_scale))
control("gpt with fresh LoRA adapters", changed(after_training(gpt), adapt))


def _fresh_head(s: Subject) -> None:
    nn.init.zeros_(s.model.head.weight)
    nn.init.zeros_(s.model.head.bias)


control("cnn, trained, fresh head of zeros", changed(after_training(cnn), _fresh_head))
control("vit with a zero head", changed(vit, _fresh_head))
control("orthogonal weights", changed(sequential, lambda s: [
    nn.init.orthogonal_(layer.weight, gain=math.sqrt(2)) for layer in s.model[::2]
]))  # fmt: skip
control("resnet of 12 blocks", with_model(lambda: ResNet(depth=12), images, F.cross_entropy, 16))
control("deep plain ReLU of 40 layers", with_model(
    lambda: he(plain(64, *[128] * 40, 10)), flat, F.cross_entropy))  # fmt: skip

control("SIREN", with_model(Siren, picture, F.mse_loss))
control("SIREN, trained", after_training(with_model(Siren, picture, F.mse_loss), rate=1e-4))
control("prior in the bias of the head", with_model(
    lambda: _prior(MLP(64, 64, 40)), flat,
    lambda output, labels: F.binary_cross_entropy_with_logits(
        output, (torch.arange(40) == labels[:, None]).float())))  # fmt: skip


def _prior(model: MLP) -> MLP:
    """Start from a probability of 1 % (Lin et al. 2017)."""
    nn.init.constant_(model.head.bias, -math.log(99))
    return model


control("identity as recurrence of ReLU", changed(gru, lambda s: (
    setattr(s.model, "gru", nn.RNN(8, 32, nonlinearity="relu", batch_first=True)),
    nn.init.eye_(s.model.gru.weight_hh_l0))))  # fmt: skip


def _bilinear(s: Subject) -> None:
    """Start upsampling as interpolation, the same for every channel (Long et al. 2015)."""
    for layer in (s.model.up1, s.model.up2):
        nn.init.zeros_(layer.weight)
        for channel in range(layer.out_channels):
            layer.weight.data[channel, channel] = 0.25


control("upsampling that starts as interpolation", changed(unet, _bilinear))
control("noise prediction, last convolution zero", with_model(
    Unetlike, noised_images, F.mse_loss))  # fmt: skip

control("initial scale of a wide layer by fan-out", with_model(
    lambda: _by_fan_out(), flat, F.cross_entropy))  # fmt: skip


def _by_fan_out() -> nn.Module:
    model = plain(64, 512, 10)
    for layer in model[::2]:
        nn.init.normal_(layer.weight, std=math.sqrt(2 / layer.out_features))
    return model


control("a gate that starts at zero", with_model(ClosedGate, flat, F.cross_entropy))
control("a scale for each channel of a convolution", with_model(
    scaled_conv, images, F.cross_entropy))  # fmt: skip

control("content queries that start at zero", with_model(Queries, rows, F.cross_entropy))

# ---- standardised weights (Brock et al. 2021) ----------------------------------------------------


class ActivatedNorm(nn.BatchNorm2d):
    """Holds what comes after it, as libraries have it: a layer with parameters around others."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.act = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


def _norms_in_branches(s: Subject) -> None:
    for block in s.model.blocks:
        block.conv2 = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), ActivatedNorm(16))
        nn.init.zeros_(block.conv2[1].weight)


def _small_raw_weights(s: Subject) -> None:
    s.model.last.weight.data *= 1e-3


control("standardised convolutions, gains of one and zero", normalizer_free)
control("last norm of each branch zero, around an activation", changed(
    normalizer_free, _norms_in_branches))  # fmt: skip

control("standardised convolutions, trained", after_training(normalizer_free))
control("standardised convolution of tiny raw weights", changed(
    normalizer_free, _small_raw_weights))  # fmt: skip

# ---- branches that start nearly closed (Touvron et al. 2021), of which a class token is read -----


def _head_near_zero(s: Subject) -> None:
    s.model.head.weight.data *= 1e-8
    nn.init.zeros_(s.model.head.bias)


def _trained_a_little(healthy: Healthy) -> Healthy:
    return after_training(healthy, steps=20)


control("LayerScale of 1e-6, class token, relative positions", relative)
control("LayerScale of 1e-6, after some training", _trained_a_little(relative))
control("LayerScale of 1e-4, pooled queries, class token", pooled)
control("head that starts at 1e-8", changed(relative, _head_near_zero))
control("factors of one in a trunk", trunk)

# ---- gates at zero -------------------------------------------------------------------------------


add(dit, dit_with_open_end, flamingo, skip_init, zero_projections, non_local, gated_mlp,
    shortcuts_of_zero, with_evaluation=False)  # fmt: skip
