"""The harmful changes on which comparisons may be tuned: edits that look harmless and are not.

`at` are the layers that may be named as the first wrong one: the layer whose own computation,
weights or gradient changed, or where code between two layers changed, the module that has this code
and the layer that first gets a wrong input by it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_eval

from corpus.cards import Shelf
from corpus.models.small import (
    CNN,
    GPT,
    GRU,
    LSTM,
    MLP,
    VAE,
    Attention,
    Block,
    MoE,
    ResNet,
    Siamese,
    UNet,
    bert,
    cnn,
    contrastive,
    deep,
    gpt,
    gru,
    images,
    lstm,
    mlp,
    moe,
    resnet,
    sequential,
    unet,
    vae,
    vit,
)
from corpus.pair import remade, warm, with_forward
from corpus.refactor.refactors import Fused, Wrapper, blocks_renamed, fused_kernel
from corpus.subject import Subject, subject

SHELF = Shelf("refactor")
change = SHELF.change

# ---- weights -------------------------------------------------------------------------------------


@change(
    "one layer scaled by 1.001",
    bert,
    "*layer.1.intermediate.dense",
    why="A weight that nobody meant to change: every output moves by about a thousandth.",
)
def _(model: nn.Module) -> None:
    model.bert.encoder.layer[1].intermediate.dense.weight.data *= 1.001


@change(
    "one convolution scaled by 1.0001",
    unet,
    "middle.0",
    why="A weight that nobody meant to change: every output moves by about 0.01 %.",
)
def _(model: UNet) -> None:
    model.middle[0].weight.data *= 1.0001


@change(
    "one weight of 4096 moved by 0.001", mlp, "fc2", why="A weight that nobody meant to change."
)
def _(model: MLP) -> None:
    model.fc2.weight.data[3, 5] += 1e-3


@change(
    "another initialisation of one layer",
    sequential,
    "2",
    why="Other weights are another start: results cannot be reproduced.",
)
def _(model: nn.Sequential) -> None:
    nn.init.xavier_uniform_(model[2].weight)


@change(
    "weights of two layers swapped",
    deep,
    "4",
    why="Each layer gets what the other was trained for.",
)
def _(model: nn.Sequential) -> None:
    model[4], model[10] = model[10], model[4]


@change(
    "two blocks swapped", resnet, "blocks.1*", why="Each block gets what the other was trained for."
)
def _(model: ResNet) -> None:
    model.blocks[1], model.blocks[2] = model.blocks[2], model.blocks[1]


@change(
    "kernels flipped",
    cnn,
    "conv2",
    why="torch's convolution does not flip its kernel, as others do.",
)
def _(model: CNN) -> None:
    model.conv2.weight.data = model.conv2.weight.data.flip(2, 3)


@change(
    "bias dropped",
    mlp,
    "fc2",
    why="The layer computes something else wherever its bias was not zero.",
)
def _(model: MLP) -> None:
    model.fc2.bias = None


@change(
    "one linear layer in 8 bits",
    gpt,
    "blocks.1.mlp.0",
    why="Rounded to 256 values a weight is another one.",
)
def _(model: GPT) -> None:
    weight = model.blocks[1].mlp[0].weight.data
    step = weight.abs().max() / 127
    weight.copy_((weight / step).round() * step)


@change(
    "gates of an LSTM in another order",
    lstm,
    "lstm",
    why="Libraries order the gates differently: each does another's work.",
)
def _(model: LSTM) -> None:
    for parameter in model.lstm.parameters():
        i, f, g, o = parameter.data.chunk(4)
        parameter.data = torch.cat([i, f, o, g])


# ---- settings of a layer -------------------------------------------------------------------------


@change(
    "eps of a layer norm 1e-6 for 1e-5",
    gpt,
    "blocks.1.norm2",
    why="Rows of little variance are scaled differently.",
)
def _(model: GPT) -> None:
    model.blocks[1].norm2.eps = 1e-6


@change(
    "eps of a layer norm 1e-5 for 1e-12",
    bert,
    "*layer.0.output.LayerNorm",
    why="Rows of little variance are scaled differently.",
)
def _(model: nn.Module) -> None:
    model.bert.encoder.layer[0].output.LayerNorm.eps = 1e-5


@change(
    "eps of a batch norm 1e-3 for 1e-5",
    cnn,
    "bn2",
    why="Channels of little variance are scaled differently.",
)
def _(model: CNN) -> None:
    model.bn2.eps = 1e-3


@change(
    "momentum of a batch norm 0.01 for 0.1",
    resnet,
    "bn",
    why="Running statistics follow more slowly, and evaluation differs.",
)
def _(model: ResNet) -> None:
    model.bn.momentum = 0.01


@change(
    "a batch norm in training mode",
    warm(cnn),
    "bn1",
    why="In evaluation a sample's result depends on the others in its batch.",
)
def _(model: CNN) -> None:
    model.bn1.train()


@change(
    "dropout active in evaluation",
    warm(cnn),
    "dropout",
    why="In evaluation the same input gives another result each time.",
)
def _(model: CNN) -> None:
    model.dropout.train()


@change(
    "dropout of 0.3 for 0.2",
    cnn,
    "dropout",
    why="More is dropped in training, and what remains is scaled more.",
)
def _(model: CNN) -> None:
    model.dropout.p = 0.3


@change("circular padding", cnn, "conv2", why="Borders see the other side of the image.")
def _(model: CNN) -> None:
    made = nn.Conv2d(16, 32, 3, padding=1, padding_mode="circular")
    made.load_state_dict(model.conv2.state_dict())
    model.conv2 = made


@change("dilated convolution", resnet, "blocks.1.conv1", why="The kernel sees other pixels.")
def _(model: ResNet) -> None:
    model.blocks[1].conv1.dilation = model.blocks[1].conv1.padding = (2, 2)


@change("GELU by tanh", vit, "blocks.1.mlp.1", why="The approximation differs by up to 5e-4.")
def _(model: nn.Module) -> None:
    model.blocks[1].mlp[1].approximate = "tanh"


@change("leaky ReLU for ReLU", cnn, "relu2", why="What was zero below zero is no longer.")
def _(model: CNN) -> None:
    model.relu2 = nn.LeakyReLU(0.01)


@change("activation dropped", sequential, "3", why="Two linear layers in a row are one.")
def _(model: nn.Sequential) -> None:
    model[3] = nn.Identity()


# ---- attention -----------------------------------------------------------------------------------


@change(
    "causal mask lost",
    gpt,
    "blocks.2.attention*",
    why="Each position sees those after it: the model reads the answer.",
)
def _(model: GPT) -> None:
    model.blocks[2].attention.causal = False


@change(
    "causal mask shifted by one",
    gpt,
    "blocks.0.attention*",
    why="Each position sees the one after it, which is the answer.",
)
def _(model: GPT) -> None:
    attention = model.blocks[0].attention
    attention.causal = False
    attention.mask = lambda scores: scores.masked_fill(
        torch.ones(scores.shape[-2:], dtype=torch.bool).triu(2), -math.inf
    )


@change(
    "scores not divided by sqrt(d)",
    vit,
    "blocks.0.attention*",
    why="Attention is sharper by the root of the width.",
)
def _(model: nn.Module) -> None:
    model.blocks[0].attention.scale = 1.0


@change(
    "heads not transposed back",
    gpt,
    "blocks.0.attention*",
    why="Features of different positions are mixed.",
)
def _(model: GPT) -> None:
    def forward(self: Attention, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.q(x), self.k(x), self.v(x))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.reshape(x.shape))

    with_forward(model.blocks[0].attention, forward)


@change(
    "softmax over the queries",
    vit,
    "blocks.1.attention*",
    why="Queries compete for a key, and each sum of weights is no average of values.",
)
def _(model: nn.Module) -> None:
    def forward(self: Attention, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.q(x), self.k(x), self.v(x))
        )
        weights = (q @ k.transpose(-2, -1) * self.scale).softmax(-2)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    with_forward(model.blocks[1].attention, forward)


@change(
    "softmax over the batch",
    gru,
    ("", "softmax", "head"),
    why="Samples compete with each other, in place of places in one sample.",
)
def _(model: GRU) -> None:
    model.dim = 0


@change(
    "positions off by one",
    gpt,
    ("", "position"),
    why="Each word gets the embedding of its neighbour's place.",
)
def _(model: GPT) -> None:
    class Shifted(GPT):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids) + self.position(torch.arange(1, ids.shape[1] + 1))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    model.__class__ = Shifted


# ---- code between the layers ---------------------------------------------------------------------


@change(
    "residual dropped",
    resnet,
    ("blocks.2", "blocks.2.relu*"),
    why="Nothing of the stream passes the branch by.",
)
def _(model: ResNet) -> None:
    model.blocks[2].join = lambda x, branch: branch


@change(
    "residual scaled by 0.999",
    resnet,
    ("blocks.1", "blocks.1.relu*"),
    why="The stream shrinks a little at each block.",
)
def _(model: ResNet) -> None:
    model.blocks[1].join = lambda x, branch: 0.999 * x + branch


@change("norm after the branch", gpt, "blocks.1*", why="The branch reads the stream unscaled.")
def _(model: GPT) -> None:
    def forward(self: Block, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        return x + self.mlp(self.norm2(x))

    with_forward(model.blocks[1], forward)


@change(
    "average pooling for the first maximum",
    unet,
    ("", "down2", "down2.0", "*_pool2d"),
    why="Means in place of maxima: other features go on.",
)
def _(model: UNet) -> None:
    def forward(self: UNet, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.avg_pool2d(a, 2))
        x = self.join2(torch.cat([self.up2(self.middle(F.max_pool2d(b, 2))), b], 1))
        return self.out(self.join1(torch.cat([self.up1(x), a], 1)))

    with_forward(model, forward)


@change(
    "channels permuted",
    cnn,
    ("", "conv2", "max_pool2d", "relu1"),
    why="The next layer's weights belong to other channels.",
)
def _(model: CNN) -> None:
    model.between = lambda x: x.flip(1)


@change("a cast to float16 and back", mlp, ("", "fc2", "relu"), why="Digits are lost on the way.")
def _(model: MLP) -> None:
    model.between = lambda x: x.half().float()


@change(
    "standard deviation without the half",
    vae,
    ("", "decoder", "decoder.0"),
    why="Half the logarithm of a variance is that of the deviation: samples scatter too far.",
)
def _(model: VAE) -> None:
    model.sample = lambda mean, log_variance: mean + log_variance.exp() * torch.randn_like(mean)


@change(
    "gate left out",
    moe,
    ("", "head"),
    why="The router has no influence on how much its expert counts, and no gradient.",
)
def _(model: MoE) -> None:
    model.gate = torch.ones_like


@change("temperature 0.21 for 0.2", contrastive, "", why="Every logit is 5 % smaller.")
def _(model: Siamese) -> None:
    model.temperature = 0.21


def resizing() -> Subject:
    """Return a net that makes images smaller and larger again."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(8, 1, 3, padding=1),
    )

    def draw(n: int) -> tuple[Tensor, Tensor]:
        pictures, _ = images(n)
        return pictures, pictures

    return subject(model, draw, F.mse_loss, batch=32)


@change("nearest for bilinear", resizing, "2", why="Pixels are copied in place of interpolated.")
def _(model: nn.Sequential) -> None:
    model[2].mode = "nearest"


class WithLoss(nn.Module):
    """A net that computes its own loss."""

    def __init__(self, net: nn.Module, **options: Any) -> None:
        super().__init__()
        self.net, self.options = net, options

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), labels, **self.options)


def with_loss() -> Subject:
    """Return a net whose output is the loss."""
    made = mlp()
    return Subject(WithLoss(made.model), (made.inputs, made.target))


@change(
    "loss summed for averaged",
    with_loss,
    ("", "cross_entropy*", "loss"),
    why="Gradients grow with the size of the batch.",
)
def _(model: WithLoss) -> None:
    model.options["reduction"] = "sum"


# ---- gradients only ------------------------------------------------------------------------------


@change(
    "branch detached",
    resnet,
    "blocks.1*",
    why="The output is the same, and the branch never learns.",
)
def _(model: ResNet) -> None:
    model.blocks[1].join = lambda x, branch: x + branch.detach()


@change("one layer frozen", unet, "up2", why="The output is the same, and the layer never learns.")
def _(model: UNet) -> None:
    model.up2.requires_grad_(False)


def untie(model: GPT) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


change(
    "embedding and head untied",
    gpt,
    ("embedding", "head"),
    why="The output is the same, and from the first step on the two part.",
)(untie)


@change(
    "gradient of the gate cut",
    moe,
    ("", "router", "softmax", "max"),
    why="The output is the same, and the router never learns.",
)
def _(model: MoE) -> None:
    model.gate = Tensor.detach


@change(
    "head tied to the embedding",
    remade(gpt, untie),
    ("embedding", "head"),
    why="The head's own weights are gone.",
)
def _(model: GPT) -> None:
    model.head.weight = model.embedding.weight


@change("head no longer tied, and made anew", gpt, "head", why="The head's weights are drawn anew.")
def _(model: GPT) -> None:
    model.head = nn.Linear(32, 18, bias=False)


# ---- calls ---------------------------------------------------------------------------------------


@change("a layer applied twice", mlp, "fc2", why="The layer's output passes it once more.")
def _(model: MLP) -> None:
    def forward(self: MLP, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x))
        return self.head(F.relu(self.fc2(self.fc2(x))))

    with_forward(model, forward)


@change(
    "a norm applied twice",
    gpt,
    "norm",
    why="What was normed is normed again, with its scale and shift.",
)
def _(model: GPT) -> None:
    def forward(self: GPT, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.norm(x)))

    with_forward(model, forward)


@change(
    "the last block run once more", gpt, "blocks.2", why="The block's output passes it once more."
)
def _(model: GPT) -> None:
    def forward(self: GPT, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1]))
        for block in (*self.blocks, self.blocks[-1]):
            x = block(x)
        return self.head(self.norm(x))

    with_forward(model, forward)


@change(
    "a dropout no longer applied, still registered",
    cnn,
    ("dropout", "head"),
    why="Nothing is dropped in training any more.",
)
def _(model: CNN) -> None:
    def forward(self: CNN, x: Tensor) -> Tensor:
        x = self.relu1(self.bn1(self.conv1(x)))
        x = self.relu2(self.bn2(self.conv2(F.max_pool2d(x, 2))))
        return self.head(x.mean((2, 3)))

    with_forward(model, forward)


@change(
    "a block skipped, still registered",
    gpt,
    ("blocks.1", "blocks.2", "blocks.2.norm1"),
    why="The block is never called and never learns.",
)
def _(model: GPT) -> None:
    def forward(self: GPT, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks[::2]:
            x = block(x)
        return self.head(self.norm(x))

    with_forward(model, forward)


# ---- amid a refactor -----------------------------------------------------------------------------


@change(
    "blocks renamed, GELU by tanh",
    gpt,
    ("blocks.1.mlp.1", "h.1.mlp.1"),
    why="The approximation differs by up to 5e-4.",
)
def _(model: GPT) -> nn.Module:
    model.blocks[1].mlp[1] = nn.GELU(approximate="tanh")
    return blocks_renamed(model)


@change(
    "q, k and v fused in another order",
    gpt,
    ("blocks.1.attention*",),
    why="What is read as a key is a value, or the other way round.",
)
def _(model: GPT) -> None:
    for index, block in enumerate(model.blocks):
        if index == 1:
            block.attention.k, block.attention.v = block.attention.v, block.attention.k
        block.attention = Fused(block.attention)


@change(
    "batch norms folded, one without its eps",
    warm(cnn),
    ("conv1", "bn1"),
    why="Channels of little variance are scaled differently.",
)
def _(model: CNN) -> None:
    model.bn1.eps = 1e-3
    for conv, norm in (("conv1", "bn1"), ("conv2", "bn2")):
        setattr(model, conv, fuse_conv_bn_eval(getattr(model, conv), getattr(model, norm)))
        setattr(model, norm, nn.Identity())


@change(
    "fused kernel without the mask",
    gpt,
    "blocks.1.attention*",
    why="Each position sees those after it: the model reads the answer.",
)
def _(model: GPT) -> None:
    for block in model.blocks:
        with_forward(block.attention, fused_kernel)
    model.blocks[1].attention.causal = False


@change(
    "wrapped, eps of a layer norm 1e-6",
    vit,
    ("blocks.0.norm1", "module.blocks.0.norm1"),
    why="Rows of little variance are scaled differently.",
)
def _(model: nn.Module) -> nn.Module:
    model.blocks[0].norm1.eps = 1e-6
    return Wrapper(model)


@change(
    "Sequential into attributes, with a leaky ReLU",
    sequential,
    ("", "1", "leaky_relu", "2", "fc2"),
    why="What was zero below zero is no longer.",
)
def _(model: nn.Sequential) -> nn.Module:
    class Attributes(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.fc2(F.leaky_relu(self.fc1(x), 0.01))))

    made = Attributes()
    made.fc1, made.fc2, made.head = model[0], model[2], model[4]
    return made


@change(
    "Identity inserted, one layer scaled by 1.001",
    deep,
    ("12", "18"),
    why="A weight that nobody meant to change: every output moves by about a thousandth.",
)
def _(model: nn.Sequential) -> nn.Module:
    model[12].weight.data *= 1.001
    layers: list[nn.Module] = []
    for layer in model:
        layers += [layer, nn.Identity()] if isinstance(layer, nn.ReLU) else [layer]
    return nn.Sequential(*layers)
