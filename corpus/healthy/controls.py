"""Healthy models as they are used, which look like no fault."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from corpus.cards import Shelf
from corpus.models.designs import Factors, stars
from corpus.models.fields import FIELDS
from corpus.models.perception import (
    Operator,
    arcface,
    bottleneck,
    byol,
    clip,
    conv_vae,
    convnext,
    critic_step,
    denoiser,
    depth_net,
    detector,
    detector_of_two_losses,
    efficientnet,
    equation,
    generator_step,
    glow,
    half_precision,
    keypoints,
    late_denoiser,
    nerf,
    optical_flow,
    quantised,
    recogniser,
    segmenter,
    shallow_training,
    simclr,
    smoothed,
    solution,
    sound_cnn,
    spiking,
    super_resolution,
    swin,
    wavenet,
)
from corpus.models.rare import RARE
from corpus.models.small import (
    autoencoder,
    bert,
    cnn,
    flat,
    gpt,
    lstm,
    mlp,
    moe,
    patients,
    regression,
    resnet,
    tumours,
    unet,
    vit,
)
from corpus.models.usual import EVERY, TRANSFORMERS, activated
from corpus.subject import Subject, trained
from corpus.variants import (
    after_training,
    as_bfloat16,
    changed,
    evaluated,
    from_transformers,
    of_batch,
    with_model,
)

SHELF = Shelf("healthy")
control = SHELF.control


for _healthy in RARE:
    control(f"{_healthy.__name__}, initialised", _healthy)
    control(f"{_healthy.__name__}, trained", lambda made=_healthy: trained(made))


def _tried(healthy: Callable[[], Subject]) -> Subject:
    made = trained(healthy, 20, batch=16)
    made.model.eval()
    return made


for _healthy in FIELDS:
    control(f"{_healthy.__name__}, initialised", _healthy)
    control(f"{_healthy.__name__}, trained", lambda made=_healthy: trained(made, 20, batch=16))
    control(f"{_healthy.__name__}, trained, in evaluation", lambda made=_healthy: _tried(made))


for _healthy in (
    convnext, efficientnet, swin, segmenter, depth_net, detector, detector_of_two_losses, keypoints,
    super_resolution, optical_flow, conv_vae, generator_step, critic_step, denoiser, glow, equation,
    solution, nerf, simclr, byol, clip, arcface, recogniser, sound_cnn, wavenet, quantised, spiking,
    bottleneck, half_precision, late_denoiser,
):  # fmt: skip
    control(f"{_healthy.__name__}, initialised", _healthy)

for _healthy in (
    efficientnet, segmenter, depth_net, keypoints, optical_flow, conv_vae, generator_step,
    critic_step, denoiser, glow, equation, nerf, simclr, byol, clip, arcface, recogniser, sound_cnn,
    quantised, spiking,
):  # fmt: skip
    control(f"{_healthy.__name__}, trained", shallow_training(_healthy))

for _healthy in (efficientnet, segmenter, sound_cnn, quantised, critic_step, recogniser):
    control(f"{_healthy.__name__}, trained, eval", evaluated(shallow_training(_healthy)))

control("Fourier neural operator", with_model(Operator, smoothed, F.mse_loss))
control(
    "Fourier neural operator, trained", after_training(with_model(Operator, smoothed, F.mse_loss))
)

for _healthy in EVERY:
    control(f"{_healthy.__name__}, initialised", _healthy)
    control(f"{_healthy.__name__}, trained", after_training(_healthy))

for _healthy in (cnn, lstm, gpt, vit, unet, moe):
    control(f"{_healthy.__name__}, trained, eval", evaluated(after_training(_healthy)))

for _healthy in (mlp, cnn, resnet, bert, autoencoder):
    control(f"{_healthy.__name__}, initialised, eval", evaluated(_healthy))

for _healthy, _n in ((mlp, 1), (cnn, 2), (gpt, 1), (vit, 4), (regression, 8), (lstm, 16)):
    control(f"{_healthy.__name__}, trained, batch of {_n}", of_batch(after_training(_healthy), _n))

for _healthy in (mlp, resnet, gpt, autoencoder, regression):
    control(f"{_healthy.__name__}, trained, bfloat16", as_bfloat16(after_training(_healthy)))

for _name in TRANSFORMERS:
    control(f"transformers {_name}", from_transformers(_name))

for _activation in (nn.GELU, nn.Tanh, nn.SiLU, nn.SELU, nn.LeakyReLU, nn.Hardswish):
    control(f"{_activation.__name__}, initialised", activated(_activation))
    control(f"{_activation.__name__}, trained", after_training(activated(_activation)))

control("one linear layer", with_model(lambda: nn.Linear(64, 10), flat, F.cross_entropy))
control("linear regression", with_model(lambda: nn.Linear(10, 1), patients, F.mse_loss))
control("logistic regression, trained", after_training(with_model(
    lambda: nn.Linear(30, 1), tumours, F.binary_cross_entropy_with_logits)))  # fmt: skip

control("factors of users and items", with_model(Factors, stars, F.mse_loss))
control("compiled", changed(mlp, lambda s: setattr(
    s, "model", torch.compile(s.model, backend="eager"))))  # fmt: skip
