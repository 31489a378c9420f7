"""Healthy models that look like a fault of the gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.designs import (
    BYOL,
    VQVAE,
    Bits,
    Checkpointed,
    Discriminator,
    Physics,
    Probe,
    Prompted,
    QLearning,
    Router,
    SimSiam,
    Student,
    distillation,
    hinge_gan,
    moments,
    temporal,
    vq_loss,
    without_target,
)
from corpus.models.designs import Distilled as DesignsDistilled
from corpus.models.fields import tabnet
from corpus.models.gated import (
    averaged_codes,
    both_players,
    class_critic,
    contextual_targets,
    deterministic_policy,
    dino,
    distributional,
    dora,
    finite_levels,
    gated_prompts,
    generalised_advantages,
    hard_attention,
    ia3,
    joint_embedding,
    ladder,
    local_losses,
    matched_features,
    mean_teacher,
    only_biases,
    prefixes,
    probed_trunk,
    pseudo_labels,
    residual_codes,
    scaled_gradient,
    sign_weights,
    soft_actor_critic,
    translators,
)
from corpus.models.libraries import Sparse
from corpus.models.perception import Distilled, Domains, colours, of_domains
from corpus.models.small import (
    MLP,
    cnn,
    flat,
    gpt,
    itself,
    lstm,
    moe,
    multitask,
    plain,
    resnet,
    rows,
    views,
    vit,
    words,
)
from corpus.models.usual import (
    Generator,
    Policy,
    Stacked,
    TargetNetwork,
    TwoHeads,
    adapt,
    advantage,
    real,
)
from corpus.subject import Subject
from corpus.variants import add_each, after_training, changed, of_batch, with_model

SHELF = Shelf("gradient")
control = SHELF.control
add = functools.partial(add_each, SHELF)


def _chosen_few(s: Subject) -> None:
    """Two of 30 columns are enough: sparsemax leaves the others out."""
    for norm in s.model.norms:
        norm.bias.data[:2] = 5.0


control("sparsemax that chooses two columns of 30", changed(tabnet, _chosen_few))


control("gradient turned round for a domain", with_model(Domains, of_domains, {
    "label": lambda o, t: F.cross_entropy(o[0], t[0]),
    "domain": lambda o, t: F.binary_cross_entropy_with_logits(o[1], t[1]),
}))  # fmt: skip
control(
    "a student beside a frozen teacher", with_model(Distilled, lambda n: (colours(n), None), None)
)


def _freeze_trunk(s: Subject) -> None:
    s.model.requires_grad_(False)
    s.model.head.requires_grad_(True)


control("resnet, trunk frozen", changed(after_training(resnet), _freeze_trunk))
control("vit, trunk frozen, fresh head", changed(
    after_training(vit),
    lambda s: (s.model.requires_grad_(False), setattr(s.model, "head", nn.Linear(32, 10))),
))  # fmt: skip
control("embedding of 5000 rows, 17 of them used", changed(
    lstm, lambda s: setattr(s.model, "embedding", nn.Embedding(5000, 16))))  # fmt: skip

control("16 experts, 8 samples", of_batch(changed(
    moe, lambda s: s.model.__init__(experts=16)), 8))  # fmt: skip

control("loss on one output of two", with_model(
    TwoHeads, flat, lambda output, labels: F.cross_entropy(output[0], labels)))  # fmt: skip

control("loss on half of the classes", with_model(
    MLP, flat, lambda output, labels: F.cross_entropy(output[:, :5], labels % 5)))  # fmt: skip

control("one of four stacked heads left out", with_model(Stacked, flat, F.cross_entropy))
control("frozen target network", with_model(TargetNetwork, lambda n: (flat(n)[0], None), None))
control("generator of a GAN", with_model(Generator, lambda n: (torch.randn(n, 16), None), real))
control("policy with a spread of its own", with_model(Policy, flat, advantage))


def _saliency(s: Subject) -> None:
    s.inputs = s.inputs.clone().requires_grad_()


control("inputs that require gradients", changed(after_training(cnn), _saliency))


def _one_active(s: Subject) -> None:
    s.loss = {name: loss for name, loss in s.loss.items() if name == "label"}


control("one task of two in the loss", changed(multitask, _one_active))


def _only_discriminator(s: Subject) -> None:
    s.model.generator.requires_grad_(False)


def gradient_penalty(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of WGAN-GP, which differentiates the critic once more."""

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        x = torch.randn(16, 64, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        fake, real = output[labels < 5].mean(), output[labels >= 5].mean()
        return fake - real + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()

    return loss


def _penalised(s: Subject) -> None:
    s.loss = gradient_penalty(s.model)


control("discriminator, generator frozen", changed(
    with_model(Discriminator, without_target(flat), hinge_gan), _only_discriminator))  # fmt: skip

control("critic with a gradient penalty", changed(
    with_model(lambda: plain(64, 64, 1, activation=nn.LeakyReLU), flat, None),
    _penalised))  # fmt: skip

control("discriminator, generator not frozen", with_model(
    Discriminator, without_target(flat), hinge_gan))  # fmt: skip

control(
    "teacher under no_grad, not frozen", with_model(DesignsDistilled, without_target(flat), None)
)

control("features under no_grad, not frozen", with_model(Probe, flat, F.cross_entropy))
control("BYOL", with_model(BYOL, views, None))
control("SimSiam", with_model(SimSiam, views, None))
control("VQ-VAE", with_model(VQVAE, itself, vq_loss))
control("binary codes, straight through", with_model(Bits, itself, F.mse_loss))
control("gumbel softmax, hard", with_model(lambda: Router(), itself, F.mse_loss))
control("Q-learning", with_model(QLearning, flat, temporal))
control("distillation", with_model(Student, without_target(flat), distillation))


def _frozen_backbone(s: Subject) -> None:
    s.model.requires_grad_(False).eval()
    s.model.head.requires_grad_(True).train()


control("backbone frozen in evaluation, head trains", changed(
    after_training(resnet), _frozen_backbone))  # fmt: skip

control("learnt prompt before a frozen transformer", with_model(Prompted, words, F.cross_entropy))
control("gpt with trained LoRA adapters", after_training(changed(gpt, adapt)))
control("gradient checkpointing", with_model(Checkpointed, flat, F.cross_entropy))
control("physics-informed", with_model(
    Physics, moments, lambda residual: (residual**2).mean()))  # fmt: skip

control("an indexer with a loss of its own", with_model(Sparse, rows, F.cross_entropy))

# ---- codes: the nearest one is taken, past which the gradient goes straight ----------------------


add(residual_codes, averaged_codes, finite_levels)

# ---- adversaries ---------------------------------------------------------------------------------


add(both_players, class_critic, translators, matched_features)

# ---- actors and critics --------------------------------------------------------------------------


add(generalised_advantages, soft_actor_critic, deterministic_policy, distributional)

# ---- teachers that follow slowly -----------------------------------------------------------------


add(dino, mean_teacher, contextual_targets, joint_embedding)

# ---- gradients stopped on purpose ----------------------------------------------------------------


add(pseudo_labels, local_losses, probed_trunk, hard_attention, scaled_gradient, sign_weights)

# ---- adapters of frozen transformers -------------------------------------------------------------


add(ia3, dora, prefixes, gated_prompts, ladder, only_biases)
