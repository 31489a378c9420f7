"""Faults of initialisation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.fields import deepfm, gat, lora, set_transformer, tabnet, tagger, world_model
from corpus.models.gated import dit_with_open_end, flamingo, skip_init, zero_projections
from corpus.models.perception import (
    convnext,
    deep_super_resolution,
    denoiser,
    detector,
    generator_step,
    keypoints,
    nerf,
)
from corpus.models.rare import (
    capsules,
    highway,
    hyper,
    mixer,
    radial,
    tcn,
    torch_attention,
    towers,
    upsampler,
)
from corpus.models.small import (
    GPT,
    autoencoder,
    cnn,
    deep,
    gpt,
    gru,
    he,
    lstm,
    mlp,
    moe,
    plain,
    recommender,
    resnet,
    sequential,
    vit,
)
from corpus.models.starts import Trunk, inception, normalizer_free, trunk
from corpus.models.usual import LayerScale
from corpus.subject import Subject
from corpus.words import ANY, CLOSED, CUT_OR_COMPARED, LARGE, MODEL, ZERO

SHELF = Shelf("initialisation")
fault = SHELF.fault


@fault(
    "weights of a hidden layer all zero",
    mlp,
    ("fc2", "relu_1"),
    ("zero", "init"),
    why="Behind zeros nothing depends on the input, and all units get the same gradient.",
)
def _(s: Subject) -> None:
    nn.init.zeros_(s.model.fc2.weight)
    nn.init.zeros_(s.model.fc2.bias)


@fault(
    "weights of a layer all equal",
    mlp,
    ("fc1", "relu"),
    ("constant", "identical", "symmetr", "equal"),
    why="Equal units get equal gradients, so that the layer has the capacity of one unit.",
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.fc1.weight, 0.02)
    nn.init.constant_(s.model.fc1.bias, 0.0)


@fault(
    "weights drawn with std 1",
    sequential,
    ("0", "2", "4"),
    ("init", "scale", "large", "std", "weight"),
    why="Each layer multiplies the deviation by the root of its fan-in.",
)
def _(s: Subject) -> None:
    for layer in s.model[::2]:
        nn.init.normal_(layer.weight)


@fault(
    "weights of every layer far too small",
    deep,
    ANY,
    ("init", "small", "vanish", "scale", "decay", "shrink"),
    why="Activations and gradients shrink by orders of magnitude a layer, and nothing learns.",
)
def _(s: Subject) -> None:
    for layer in s.model[::2]:
        nn.init.normal_(layer.weight, std=1e-3)


@fault(
    "weights drawn from torch.rand",
    deep,
    ANY,
    ("init", "mean", "positive", "large", "grow", "explod", "scale"),
    why="Weights that are all positive give a mean that grows with each layer and drowns the rest.",
)
def _(s: Subject) -> None:
    for layer in s.model[::2]:
        nn.init.uniform_(layer.weight, 0, 1)


@fault(
    "every filter of a convolution the same",
    cnn,
    ("conv1", "bn1", "relu1"),
    ("constant", "identical", "symmetr", "equal", "same"),
    why="Equal filters get equal gradients and stay equal: one feature is learnt, many times over.",
)
def _(s: Subject) -> None:
    s.model.conv1.weight.data[:] = s.model.conv1.weight.data[:1].clone()
    nn.init.zeros_(s.model.conv1.bias)


@fault(
    "queries and keys both zero",
    vit,
    ("blocks.0.attention.[qk]", "blocks.0.attention.softmax"),
    ("zero", "init", "symmetr"),
    why="A product of two zeros passes no gradient to either factor, so that neither ever moves.",
)
def _(s: Subject) -> None:
    for layer in (s.model.blocks[0].attention.q, s.model.blocks[0].attention.k):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)


@fault(
    "embeddings of both sides zero under a dot product",
    recommender,
    ("user", "item"),
    ("zero", "init"),
    why="A product of two zeros passes no gradient to either factor, so that neither ever moves.",
)
def _(s: Subject) -> None:
    nn.init.zeros_(s.model.user.weight)
    nn.init.zeros_(s.model.item.weight)
    s.model.mlp = nn.Sequential()  # nothing but the product
    s.model.forward = lambda users, items: (s.model.user(users) * s.model.item(items)).sum(1)


@fault(
    "tied embedding with std 1 in a wide GPT",
    gpt,
    (*MODEL, "embedding", "head"),
    ("init", "scale", "large", "logit", "ln(", "embedding"),
    why="The head shares the table, and logits have the deviation of the root of its width.",
)
def _(s: Subject) -> None:
    s.model = GPT(width=256, heads=4)
    nn.init.normal_(s.model.embedding.weight)


@fault(
    "head 100 times too large at the start",
    mlp,
    (*MODEL, "head"),
    ("init", "scale", "large", "logit", "ln(", "head"),
    why="The first predictions are sure and wrong: the loss starts far above that of a guess.",
)
def _(s: Subject) -> None:
    s.model.head.weight.data *= 100


@fault(
    "bias of the head starts at 50 for one class",
    cnn,
    (*MODEL, "head"),
    ("bias", "init", "logit", "ln(", "large"),
    why="The first prediction is one class for all, and the loss starts far above a guess.",
)
def _(s: Subject) -> None:
    s.model.head.bias.data[3] = 50.0


@fault(
    "recurrent layer all zero",
    lstm,
    ("lstm",),
    ("zero", "init"),
    why="States of zero pass no gradient to the weights that they are multiplied with.",
)
def _(s: Subject) -> None:
    for parameter in s.model.lstm.parameters():
        nn.init.zeros_(parameter)


@fault(
    "ReLU module dead by its bias",
    sequential,
    ("0", "1"),
    ("bias", "dead", "negative"),
    "dead_units",
    why="Below zero a ReLU gives and passes nothing, so that no step can bring its units back.",
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model[0].bias, -100.0)


@fault(
    "functional ReLU dead by its bias",
    mlp,
    ("fc2", "relu_1"),
    ("bias", "dead", "negative"),
    "dead_units",
    why="Below zero a ReLU gives and passes nothing, so that no step can bring its units back.",
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.fc2.bias, -50.0)


@fault(
    "two thirds of the units dead",
    mlp,
    ("fc1", "relu"),
    ("bias", "dead", "negative"),
    "dead_units",
    why="Most of the layer's capacity is lost: dead units get no gradient and stay dead.",
)
def _(s: Subject) -> None:
    s.model.fc1.bias.data[:43] = -50.0


@fault(
    "channels dead by a batch norm's shift",
    cnn,
    ("bn2", "relu2"),
    ("bias", "dead", "negative", "shift"),
    why="The shift takes each channel below zero whatever the input, and it gets no gradient.",
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.bn2.bias, -10.0)


@fault(
    "GELU dead by its bias",
    gpt,
    ("blocks.1.mlp.0", "blocks.1.mlp.1"),
    ("bias", "dead", "negative", "saturat"),
    why="Far below zero GELU gives and passes nothing, so that no step can bring its units back.",
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.blocks[1].mlp[0].bias, -40.0)


@fault(
    "deep tanh net with weights of std 1",
    sequential,
    ("[0-8]",),
    ("saturat", "init", "large", "scale"),
    why="Inputs of tanh lie where it is flat, and gradients vanish through each layer.",
)
def _(s: Subject) -> None:
    s.model = plain(64, 128, 128, 128, 128, 10, activation=nn.Tanh)
    for layer in s.model[::2]:
        nn.init.normal_(layer.weight)


@fault(
    "sigmoid units saturated by huge weights",
    autoencoder,
    ("encoder.0", "encoder.1"),
    ("saturat", "large", "scale", "weight"),
    why="Inputs of the sigmoid lie where it is flat, and hardly any gradient passes.",
)
def _(s: Subject) -> None:
    s.model.encoder[1] = nn.Sigmoid()
    s.model.encoder[0].weight.data *= 1000


@fault(
    "ReLU6 stuck at 6",
    cnn,
    ("relu1", "bn1"),
    ("saturat", "6", "large", "bias", "shift"),
    why="Above six the function is constant and passes no gradient.",
)
def _(s: Subject) -> None:
    s.model.relu1 = nn.ReLU6()
    nn.init.constant_(s.model.bn1.bias, 40.0)


@fault(
    "router sends all to one expert",
    moe,
    ("router", "softmax"),
    ("saturat", "one-hot", "bias", "collaps", "constant", "one"),
    why="The other experts never see a sample and never learn.",
)
def _(s: Subject) -> None:
    s.model.router.bias.data[2] = 60.0


@fault(
    "twenty layers with three times the gain",
    deep,
    ANY,
    ("explod", "grow", "large", "scale", "init"),
    why="Activations and gradients grow by three with every layer.",
)
def _(s: Subject) -> None:
    for layer in s.model[::2]:
        layer.weight.data *= 3


@fault(
    "recurrence of ReLU with a gain of 1.6",
    gru,
    ("gru",),
    ("explod", "grow", "large", "overflow", "scale", "init"),
    why="The state grows with each step, and its gradient with it.",
)
def _(s: Subject) -> None:
    s.model.gru = nn.RNN(8, 32, nonlinearity="relu", batch_first=True)
    s.model.gru.weight_hh_l0.data = 1.6 * torch.eye(32)
    s.inputs = s.inputs.repeat(1, 12, 1)


@fault(
    "one layer 10,000 times too large",
    resnet,
    (*MODEL, "head"),
    ("large", "scale", "init", "ln("),
    why="The layer drowns all others, and the loss starts far above that of a guess.",
)
def _(s: Subject) -> None:
    s.model.head.weight.data *= 1e4


@fault(
    "a dilated convolution of zeros",
    tcn,
    ("convs.2", "relu_2"),
    ("zero", "init"),
    why="Behind zeros nothing depends on the input.",
)
def _(s: Subject) -> None:
    nn.init.zeros_(s.model.convs[2].weight)
    nn.init.zeros_(s.model.convs[2].bias)


@fault(
    "dilated convolutions drawn with std 1",
    tcn,
    "convs.*",
    ("large", "scale", "init"),
    why="Each layer multiplies the deviation by the root of its fan-in.",
)
def _(s: Subject) -> None:
    for conv in s.model.convs:
        nn.init.normal_(conv.weight)


@fault(
    "dead units behind clamp",
    tcn,
    ("convs.1", "relu_1"),
    ("bias", "dead", "flat"),
    why="Under the clamp's floor the units give and pass nothing, so that they stay there.",
)
def _(s: Subject) -> None:
    s.model.activation = lambda x: x.clamp(min=0)
    s.model.convs[1].bias.data.fill_(-30.0)


@fault(
    "one tower without activations of its own",
    towers,
    "other*",
    ("zero", "dead", "init"),
    why="The tower gives zeros and passes no gradient: it is dead from the start.",
)
def _(s: Subject) -> None:
    nn.init.zeros_(s.model.other[0].weight)
    nn.init.constant_(s.model.other[0].bias, -0.1)


@fault(
    "votes of capsules all equal",
    capsules,
    ("", "softmax*"),
    ("same", "equal", "symmetr"),
    why="Equal votes get equal gradients, and routing has nothing to agree on.",
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.votes, 0.1)


@fault(
    "embedding of the patches 1000 times too large",
    mixer,
    "stem",
    ("large", "scale", "init"),
    why="The stream starts so large that no block can add to it.",
)
def _(s: Subject) -> None:
    s.model.stem.weight.data *= 1000


@fault(
    "made weights 300 times too large",
    hyper,
    ("tanh", "", "make*"),
    ("large", "flat", "magnif"),
    why="What is computed with the made weights lies where tanh is flat.",
)
def _(s: Subject) -> None:
    s.model.weights = lambda w: 300 * w


@fault(
    "highway gates closed at -40",
    highway,
    ("gates.1", "sigmoid_1"),
    ("bias", "flat"),
    why="A gate at sigmoid(-40) is shut and has no slope to open it.",
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.gates[1].bias, -40.0)


@fault(
    "radial features too narrow to see a sample",
    radial,
    ("", "head"),
    ("zero", "same", "equal"),
    why="No sample lies within reach of a centre: all features are zero.",
)
def _(s: Subject) -> None:
    s.model.width = 0.1


@fault(
    "projections of torch's attention 100 times too large",
    torch_attention,
    "attention*",
    ("large", "scale", "score"),
    why="The softmax is one-hot from the start and passes no gradient to queries and keys.",
)
def _(s: Subject) -> None:
    s.model.attention.in_proj_weight.data *= 100


@fault(
    "projections of torch's attention zero",
    torch_attention,
    "attention*",
    ("zero", "init"),
    why="Queries and keys of zero pass no gradient to each other.",
)
def _(s: Subject) -> None:
    nn.init.zeros_(s.model.attention.in_proj_weight)


@fault(
    "transposed convolution of zeros before a norm",
    upsampler,
    ("up", "norm"),
    ("zero", "init"),
    why="Behind zeros a norm has nothing to divide, and nothing depends on the input.",
)
def _(s: Subject) -> None:
    nn.init.zeros_(s.model.up.weight)
    nn.init.zeros_(s.model.up.bias)


@fault(
    "exponential units held at their floor",
    upsampler,
    ("down", "elu"),
    ("bias", "dead", "flat"),
    why="At its floor the unit is flat and passes no gradient.",
)
def _(s: Subject) -> None:
    s.model.down.bias.data.fill_(-40.0)


@fault(
    "both factors of a low-rank change zero",
    lora,
    "*attention.[qv]*",
    ("zero", "init"),
    why="A product of two zeros passes no gradient to either factor, so that neither ever moves.",
)
def _(s: Subject) -> None:
    for block in s.model.blocks:
        for layer in (block.attention.q, block.attention.v):
            nn.init.zeros_(layer.a)


@fault(
    "every parameter drawn from uniform_(0, 1)",
    tagger,
    ("lstm", "head", "embedding"),
    ("large", "init", "mean", "scale", "positive", "saturat"),
    why="Weights that are all positive drive the gates to where they are flat.",
)
def _(s: Subject) -> None:
    for parameter in s.model.parameters():
        nn.init.uniform_(parameter)


@fault(
    "factors of pairs drawn with std 3",
    deepfm,
    ("factors", *MODEL),
    ("large", "init", "scale"),
    why="Products of all pairs sum up to logits in the hundreds.",
)
def _(s: Subject) -> None:
    nn.init.normal_(s.model.factors.weight, std=3.0)


@fault(
    "projection of a graph attention made of zeros",
    gat,
    ("layers.1", "layers*", ""),
    ("zero", "init"),
    why="Behind zeros nothing depends on the input.",
)
def _(s: Subject) -> None:
    nn.init.zeros_(s.model.layers[1].weight)


@fault(
    "all seeds of the pooling the same",
    set_transformer,
    ("", "pool*", "norm"),
    ("same", "equal", "symmetr", "identical"),
    why="Equal seeds pool the same, get equal gradients and stay equal.",
)
def _(s: Subject) -> None:
    s.model.seeds.data = s.model.seeds.data[:, :1].expand(-1, 4, -1).clone()


@fault(
    "gates of gated units shut by their bias",
    tabnet,
    ("units.0", "glu", "sigmoid*"),
    ("bias", "flat", "saturat", "closed", "shut"),
    why="A gate far below zero is shut and has no slope to open it.",
)
def _(s: Subject) -> None:
    s.model.units[0].bias.data[32:] = -50.0


@fault(
    "every weight filled with 0.01",
    world_model,
    ("encoder*", "decoder*", "cell", "prior", "posterior"),
    ("same", "equal", "constant", "symmetr", "identical"),
    why="Equal units get equal gradients, so that a layer has the capacity of one unit.",
)
def _(s: Subject) -> None:
    for parameter in s.model.parameters():
        nn.init.constant_(parameter, 0.01)


@fault(
    "a block whose scale and last layer are both zero",
    convnext,
    "blocks.1*",
    ZERO,
    why="A product of two zeros passes no gradient to either factor, so that the block stays shut.",
)
def _(s: Subject) -> None:
    block = s.model.blocks[1]
    for parameter in (block.scale, block.shrink.weight, block.shrink.bias):
        nn.init.zeros_(parameter)


@fault(
    "the bias of rare objects on every convolution of a tower",
    detector,
    "classes.*",
    ("bias", "dead"),
    why="The bias belongs to the last layer: on the others it takes each unit below zero.",
)
def _(s: Subject) -> None:
    for module in s.model.classes:
        if isinstance(module, nn.Conv2d):
            nn.init.constant_(module.bias, -math.log(99))


@fault(
    "last convolution of a generator drawn with std 1",
    generator_step,
    ("generator.tanh*", "generator.out"),
    ("satur", "large", "init"),
    why="Inputs of tanh lie where it is flat, and the images start black and white.",
)
def _(s: Subject) -> None:
    nn.init.normal_(s.model.generator.out.weight)


@fault(
    "every convolution of a denoiser starts at zero",
    denoiser,
    ("first", "down", "norm*", "middle"),
    ZERO,
    why="Zeros behind zeros pass no gradient: all but the last layer stay as they are.",
)
def _(s: Subject) -> None:
    for module in s.model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)


@fault(
    "density clipped below zero everywhere",
    nerf,
    ("density", "relu*"),
    ("dead", "bias", "zero"),
    why="Below zero a ReLU gives and passes nothing: the scene is empty and stays so.",
)
def _(s: Subject) -> None:
    s.model.to_density = F.relu
    nn.init.constant_(s.model.density.bias, -5.0)


@fault(
    "32 blocks by He without a scale for residuals",
    deep_super_resolution,
    ("", "blocks.*", "last", "loss"),
    LARGE,
    why="Without a scale each block adds as much again: the stream doubles 32 times.",
)
def _(s: Subject) -> None:
    he(s.model)
    s.model.scale = 1.0


@fault(
    "heatmaps drawn by a convolution of constant weights",
    keypoints,
    ("heat", "trunk*"),
    ("constant", "same", "equal", "symmetr", "identical"),
    why="Equal weights get equal gradients and stay equal: all heatmaps are one.",
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.trunk[1][0].weight, 0.01)


@fault(
    "a standardised convolution starts constant",
    normalizer_free,
    "last",
    ("constant", "equal"),
    why="A constant kernel less its mean is zero, whatever its gain.",
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.last.weight, 0.1)


@fault(
    "a convolution of std 10 and no norm",
    inception,
    "one",
    ("large",),
    why="With no norm behind it the deviation of its output is ten times its fan-in's root.",
)
def _(s: Subject) -> None:
    nn.init.normal_(s.model.one.weight, std=10.0)
    s.model.norm1 = nn.Identity()


@fault(
    "a convolution of std 10 that hardly learns behind its norm",
    inception,
    "one",
    ("large",),
    why="A norm divides the gradient by the scale of the weights: steps are too small to matter.",
)
def _(s: Subject) -> None:
    nn.init.normal_(s.model.one.weight, std=10.0)


@fault(
    "factors of 1e-3 in a trunk with nothing past them",
    trunk,
    "layers.*",
    ("shrink", "fade", "vanish", "factor"),
    why="Each factor shrinks the signal a thousandfold, and nothing passes it by.",
)
def _(s: Subject) -> None:
    s.model = Trunk(start=1e-3)


@fault(
    "gates of zero that are detached from their condition",
    dit_with_open_end,
    "blocks.*",
    (*CUT_OR_COMPARED, *CLOSED),
    why="A gate of zero that gets no gradient never opens.",
)
def _(s: Subject) -> None:
    for block in s.model.blocks:
        block.gate = Tensor.detach


@fault(
    "gates of zero that are buffers",
    flamingo,
    ("crosses.*", "see"),
    CLOSED,
    why="A gate of zero that is no parameter never opens.",
)
def _(s: Subject) -> None:
    for cross in s.model.crosses:
        for name in ("alpha_attention", "alpha_mlp"):
            delattr(cross, name)
            cross.register_buffer(name, torch.zeros(1))


@fault(
    "a gain of zero that is a number, not a parameter",
    skip_init,
    "1.2*",
    CLOSED,
    why="A gain of zero that is no parameter never opens.",
)
def _(s: Subject) -> None:
    del s.model[1][2].gain
    s.model[1][2].gain = 0.0


@fault(
    "projections of zeros behind scales of zeros",
    zero_projections,
    "blocks.1*",
    CLOSED,
    why="A product of two zeros passes no gradient to either factor, so that the block stays shut.",
)
def _(s: Subject) -> None:
    block = s.model.blocks[1]
    block.attention = LayerScale(block.attention, 32, 0.0)
    block.mlp = LayerScale(block.mlp, 32, 0.0)
