"""The faults on which checks may be tuned: a healthy subject and the lines that sabotage it.

Each is one that practitioners meet, and that one batch with its target and loss can show. `at` are
the layers that a violation may name: the one at fault, and those directly fed by it or feeding it
where the statistics of both show the same. Out of reach of one batch, hence not here:

- a missing or shifted causal mask, labels shifted by one, shuffled labels: the numbers of one batch
  are those of a model that was asked for exactly this; only training or a reference shows it;
- a batch mixed by `view` where `transpose` was meant: every statistic is that of a permutation;
- parameters missing from the optimizer, a learning rate far off, `zero_grad` or `step` forgotten:
  no optimizer takes part in an inspection;
- a parameter that the forward never reads: the mask tokens of transformers' encoders are such;
- weights untied by accident, one block used six times, a layer frozen that should train: each is
  somebody's design;
- a changed scale, activation or residual that leaves a healthy model: a snapshot shows it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases.models import (
    GCN,
    GPT,
    Attention,
    autoencoder,
    bert,
    binary,
    cnn,
    contrastive,
    deep,
    gpt,
    graph,
    gru,
    ink_loss,
    label_loss,
    lstm,
    mlp,
    moe,
    multitask,
    plain,
    recommender,
    regression,
    resnet,
    seq2seq,
    sequential,
    unet,
    vae,
    vit,
)
from benchmarks.cases.subject import Shelf, Subject

SHELF = Shelf()
fault = SHELF.fault

ANY = "*"
MODEL = ("", "loss")
"""The model as a whole, where the loss or the batch is at fault."""

CUT = ("detach", "no_grad", "cut", "graph", "argmax", ".data", "not differentiable")
NONFINITE = ("nan", "inf", "overflow", "log", "divi", "sqrt")
RANGE = ("scale", "normali", "standardi", "range", "0 to 255", "0-255", "255", "raw", "units")

# ---- initial weights ----------------------------------------------------------------------------


@fault("weights of a hidden layer all zero", mlp, ("fc2", "relu_1"), ("zero", "init"))
def _(s: Subject) -> None:
    nn.init.zeros_(s.model.fc2.weight)
    nn.init.zeros_(s.model.fc2.bias)


@fault(
    "weights of a layer all equal",
    mlp,
    ("fc1", "relu"),
    ("constant", "identical", "symmetr", "equal"),
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.fc1.weight, 0.02)
    nn.init.constant_(s.model.fc1.bias, 0.0)


@fault(
    "weights drawn with std 1",
    sequential,
    ("0", "2", "4"),
    ("init", "scale", "large", "std", "weight"),
)
def _(s: Subject) -> None:
    for layer in s.model[::2]:
        nn.init.normal_(layer.weight)


@fault(
    "weights of every layer far too small",
    deep,
    ANY,
    ("init", "small", "vanish", "scale", "decay", "shrink"),
)
def _(s: Subject) -> None:
    for layer in s.model[::2]:
        nn.init.normal_(layer.weight, std=1e-3)


@fault(
    "weights drawn from torch.rand",
    deep,
    ANY,
    ("init", "mean", "positive", "large", "grow", "explod", "scale"),
)
def _(s: Subject) -> None:
    for layer in s.model[::2]:
        nn.init.uniform_(layer.weight, 0, 1)


@fault(
    "every filter of a convolution the same",
    cnn,
    ("conv1", "bn1", "relu1"),
    ("constant", "identical", "symmetr", "equal", "same"),
)
def _(s: Subject) -> None:
    s.model.conv1.weight.data[:] = s.model.conv1.weight.data[:1].clone()
    nn.init.zeros_(s.model.conv1.bias)


@fault(
    "queries and keys both zero",
    vit,
    ("blocks.0.attention.[qk]", "blocks.0.attention.softmax"),
    ("zero", "init", "symmetr"),
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
)
def _(s: Subject) -> None:
    s.model = GPT(width=256, heads=4)
    nn.init.normal_(s.model.embedding.weight)


@fault(
    "head 100 times too large at the start",
    mlp,
    (*MODEL, "head"),
    ("init", "scale", "large", "logit", "ln(", "head"),
)
def _(s: Subject) -> None:
    s.model.head.weight.data *= 100


@fault(
    "bias of the head starts at 50 for one class",
    cnn,
    (*MODEL, "head"),
    ("bias", "init", "logit", "ln(", "large"),
)
def _(s: Subject) -> None:
    s.model.head.bias.data[3] = 50.0


@fault("recurrent layer all zero", lstm, ("lstm",), ("zero", "init"))
def _(s: Subject) -> None:
    for parameter in s.model.lstm.parameters():
        nn.init.zeros_(parameter)


# ---- dead and saturated activations -------------------------------------------------------------


@fault(
    "ReLU module dead by its bias",
    sequential,
    ("0", "1"),
    ("bias", "dead", "negative"),
    "dead_units",
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model[0].bias, -100.0)


@fault(
    "functional ReLU dead by its bias",
    mlp,
    ("fc2", "relu_1"),
    ("bias", "dead", "negative"),
    "dead_units",
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.fc2.bias, -50.0)


@fault(
    "two thirds of the units dead", mlp, ("fc1", "relu"), ("bias", "dead", "negative"), "dead_units"
)
def _(s: Subject) -> None:
    s.model.fc1.bias.data[:43] = -50.0


@fault(
    "channels dead by a batch norm's shift",
    cnn,
    ("bn2", "relu2"),
    ("bias", "dead", "negative", "shift"),
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.bn2.bias, -10.0)


@fault(
    "GELU dead by its bias",
    gpt,
    ("blocks.1.mlp.0", "blocks.1.mlp.1"),
    ("bias", "dead", "negative", "saturat"),
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.blocks[1].mlp[0].bias, -40.0)


@fault("ReLU of a negated ReLU", mlp, ("", "relu", "relu_1"), ("dead", "zero", "negative"))
def _(s: Subject) -> None:
    s.model.between = lambda x: F.relu(-x)


@fault(
    "deep tanh net with weights of std 1",
    sequential,
    ("[0-8]",),
    ("saturat", "init", "large", "scale"),
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
)
def _(s: Subject) -> None:
    s.model.encoder[1] = nn.Sigmoid()
    s.model.encoder[0].weight.data *= 1000


@fault("ReLU6 stuck at 6", cnn, ("relu1", "bn1"), ("saturat", "6", "large", "bias", "shift"))
def _(s: Subject) -> None:
    s.model.relu1 = nn.ReLU6()
    nn.init.constant_(s.model.bn1.bias, 40.0)


@fault(
    "Hardtanh fed far outside its range",
    regression,
    ("fc1", "hardtanh"),
    ("saturat", "scale", "large", "range"),
)
def _(s: Subject) -> None:
    s.model.activation = F.hardtanh
    s.model.fc1.weight.data *= 1e4


@fault(
    "attention scores multiplied by sqrt(d)",
    gpt,
    ("blocks.*.attention*",),
    ("saturat", "one-hot", "sqrt", "scale", "collaps"),
)
def _(s: Subject) -> None:
    for block in s.model.blocks:
        block.attention.scale = 32**0.5
        for layer in (block.attention.q, block.attention.k):
            nn.init.xavier_uniform_(layer.weight)
            layer.weight.data *= 3


@fault(
    "attention without 1/sqrt(d), heads of 256",
    vit,
    ("blocks.0.attention*",),
    ("saturat", "one-hot", "sqrt", "scale", "collaps"),
)
def _(s: Subject) -> None:
    s.model.patches = nn.Conv2d(1, 256, 2, stride=2)
    s.model.token = nn.Parameter(torch.randn(1, 1, 256))
    s.model.position = nn.Parameter(torch.randn(1, 17, 256))
    s.model.blocks[0] = block = type(s.model.blocks[1])(256, heads=1)
    s.model.blocks[1], s.model.norm = nn.Linear(256, 32), nn.LayerNorm(32)
    block.attention.scale = 1.0
    for layer in (block.attention.q, block.attention.k):
        nn.init.orthogonal_(layer.weight, gain=1.5)


@fault(
    "softmax over a dimension of size one",
    gru,
    ("softmax", "score"),
    ("one", "dim", "constant", "size 1", "single"),
)
def _(s: Subject) -> None:
    s.model.dim = -1


@fault(
    "router sends all to one expert",
    moe,
    ("router", "softmax"),
    ("saturat", "one-hot", "bias", "collaps", "constant", "one"),
)
def _(s: Subject) -> None:
    s.model.router.bias.data[2] = 60.0


# ---- where gradients stop -----------------------------------------------------------------------


@fault("detach in mid-net", mlp, ("", "fc1", "relu"), CUT, "missing_gradients")
def _(s: Subject) -> None:
    s.model.between = Tensor.detach


@fault(
    "no_grad around the encoder",
    autoencoder,
    ("", "encoder", "encoder.*"),
    CUT,
    "missing_gradients",
)
def _(s: Subject) -> None:
    s.model.encoder.forward = torch.no_grad()(s.model.encoder.forward)


@fault(".data in a network's stem", resnet, ("", "stem", "bn", "relu"), CUT, "missing_gradients")
def _(s: Subject) -> None:
    s.model.between = lambda x: x.data


@fault(
    "argmax where a softmax was meant",
    seq2seq,
    ("encoder*", "embedding", "cross*", ""),
    CUT,
    "missing_gradients",
)
def _(s: Subject) -> None:
    s.model.remember = lambda memory, x: F.one_hot(memory.argmax(-1), 32).float()


@fault("through NumPy and back", regression, ("", "fc1", "relu"), CUT, "missing_gradients")
def _(s: Subject) -> None:
    s.model.between = lambda x: torch.from_numpy(x.detach().numpy())


@fault(
    "rounding in mid-net",
    autoencoder,
    ("", "encoder", "encoder.*"),
    (*CUT, "zero", "round", "constant"),
    "missing_gradients",
)
def _(s: Subject) -> None:
    s.model.between = torch.round


@fault(
    "comparison makes the features",
    graph,
    ("", "layers.*", "relu*"),
    (*CUT, "compar"),
    "missing_gradients",
)
def _(s: Subject) -> None:
    s.model.between = lambda x: (x > 0).float()


@fault(
    "decoder reads the input instead of the code",
    seq2seq,
    ("", "encoder", "encoder.*"),
    ("not used", "unused", "never", "not reach", "reach", "discard", *CUT),
    "missing_gradients",
)
def _(s: Subject) -> None:
    s.model.remember = lambda memory, x: x


@fault(
    "residual adds the input to itself",
    resnet,
    ("blocks.2", "blocks.2.*"),
    ("not used", "unused", "reach", "discard", *CUT),
    "missing_gradients",
)
def _(s: Subject) -> None:
    s.model.blocks[2].join = lambda x, branch: x + x


@fault(
    "nearest code without the straight-through gradient",
    autoencoder,
    ("", "encoder", "encoder.*"),
    CUT,
    "missing_gradients",
)
def _(s: Subject) -> None:
    codes = nn.Parameter(torch.randn(32, 8))
    s.model.codes = codes
    s.model.between = lambda x: codes[torch.cdist(x, codes).argmin(1)]


@fault(
    "autograd.Function whose backward returns zeros",
    cnn,
    ("", "conv1", "bn1", "relu1"),
    ("zero", "backward", *CUT),
    "missing_gradients",
)
def _(s: Subject) -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 1.5 * x

        @staticmethod
        def backward(ctx, gradient):
            return torch.zeros_like(gradient)

    s.model.between = Scale.apply


@fault("accuracy as loss", sequential, (*MODEL, "4", "0"), (*CUT, "loss"))
def _(s: Subject) -> None:
    s.loss = lambda output, labels: 1 - (output.argmax(1) == labels).float().mean()


@fault("loss weight still zero", cnn, (*MODEL, "head", "conv1"), ("zero", "loss"))
def _(s: Subject) -> None:
    s.loss = lambda output, labels: 0.0 * F.cross_entropy(output, labels)


@fault(
    "layers in a plain list",
    autoencoder,
    ("", "encoder"),
    ("list", "regist", "modulelist", "named_parameters"),
    "unregistered_parameters",
)
def _(s: Subject) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(64, 32), nn.Linear(32, 8)]

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](F.relu(self.layers[0](x)))

    s.model.encoder = Encoder()


@fault(
    "weight as a plain tensor",
    mlp,
    ("",),
    ("regist", "nn.parameter", "named_parameters", "plain tensor"),
    "unregistered_parameters",
)
def _(s: Subject) -> None:
    s.model.scale = torch.ones(64, requires_grad=True)
    s.model.between = lambda x: x * s.model.scale


@fault(
    "parameter multiplied where it is made",
    gpt,
    ("", "blocks.0", "blocks.0.mlp"),
    ("regist", "nn.parameter", "named_parameters"),
    "unregistered_parameters",
)
def _(s: Subject) -> None:
    mlp = s.model.blocks[0].mlp
    mlp.scale = nn.Parameter(torch.ones(32)) * 0.5
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * mlp.scale


# ---- NaN and infinity ---------------------------------------------------------------------------


@fault("log of a ReLU", mlp, ("", "fc2", "relu", "log*"), NONFINITE, "finite")
def _(s: Subject) -> None:
    s.model.between = torch.log


@fault(
    "square root of a ReLU: infinite gradient at 0",
    cnn,
    ("", "relu1", "bn1", "conv1"),
    NONFINITE,
    "finite",
)
def _(s: Subject) -> None:
    s.model.between = torch.sqrt


@fault(
    "torch.where hides a log from forward only",
    regression,
    ("", "relu", "fc1"),
    (*NONFINITE, "where"),
    "finite",
)
def _(s: Subject) -> None:
    s.model.between = lambda x: torch.where(x > 0, torch.log(x), 0.0)


@fault(
    "standardised by the std of a constant",
    sequential,
    (*MODEL, "0"),
    NONFINITE,
    ("finite", "inputs"),
)
def _(s: Subject) -> None:
    s.inputs = s.inputs.clone()
    s.inputs[:, 0] = 0.5
    s.inputs = (s.inputs - s.inputs.mean(0)) / s.inputs.std(0)


@fault(
    "padding mask inverted: rows of nothing but -inf", bert, ("attention*",), (*NONFINITE, "mask")
)
def _(s: Subject) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(18, 32), nn.Linear(32, 10)
            self.attention = Attention(32, 4)

        def forward(self, ids: Tensor) -> Tensor:
            x, kept = self.embedding(ids), (ids != 0)[:, None, None]
            self.attention.mask = lambda scores: scores.masked_fill(kept, -math.inf)
            return self.head((x + self.attention(x)).mean(1))

    ids = s.inputs["input_ids"].clone()
    ids[::2, 20:] = 0
    s.model, s.inputs, s.target, s.loss = Masked(), ids, s.inputs["labels"], F.cross_entropy


@fault(
    "softmax by hand overflows",
    cnn,
    (*MODEL, "head"),
    (*NONFINITE, "large"),
    ("finite", "headroom", "loss", "initial_weights"),
)
def _(s: Subject) -> None:
    s.model.head.weight.data *= 2000
    s.model.finish = lambda x: (x.exp() / x.exp().sum(1, keepdim=True)).log()
    s.loss = F.nll_loss


@fault(
    "float16 overflows in a sum",
    lstm,
    ("", "head", "lstm"),
    (*NONFINITE, "float16", "range"),
    ("finite", "headroom"),
)
def _(s: Subject) -> None:
    s.model.half()
    s.model.pool = lambda x: (x * 2e4).sum(1) / 2e4 / 32
    nn.init.constant_(s.model.lstm.bias_ih_l0, 3.0)


@fault(
    "float16 overflows in a layer",
    mlp,
    ("fc1", "fc2", "relu"),
    (*NONFINITE, "float16", "range", "large"),
    ("finite", "headroom", "initial_weights"),
)
def _(s: Subject) -> None:
    s.model.half()
    s.inputs = s.inputs.half()
    s.model.fc1.weight.data *= 3e3
    s.model.fc2.weight.data *= 3e3


@fault(
    "float16 gradients underflow",
    autoencoder,
    ANY,
    ("underflow", "float16", "subnormal", "scal", "range"),
)
def _(s: Subject) -> None:
    s.model.half()
    s.inputs = s.target = s.inputs.half()
    s.loss = lambda output, target: F.mse_loss(output, target) * 1e-5


@fault(
    "a NaN in a convolution's weight",
    unet,
    ("middle.0", "middle"),
    ("nan", "parameter", "weight", "checkpoint"),
    "finite",
)
def _(s: Subject) -> None:
    s.model.middle[0].weight.data[3, 2, 1, 1] = math.nan


@fault(
    "labels hold a NaN",
    regression,
    MODEL,
    (*NONFINITE, "target", "label"),
    ("finite", "loss", "inputs"),
)
def _(s: Subject) -> None:
    s.target[7] = math.nan


@fault(
    "LayerNorm without eps on padding",
    vit,
    ("norm",),
    (*NONFINITE, "eps", "variance"),
    ("finite", "normalization"),
)
def _(s: Subject) -> None:
    s.model.norm.eps = 0.0
    blocks = s.model.blocks.forward
    s.model.blocks.forward = lambda x: blocks(x) * (torch.arange(17) < 12)[:, None]
    s.model.pool = lambda x: x.mean(1)


@fault(
    "variance as a difference of squares",
    regression,
    ("", "fc1", "fc2", "relu"),
    NONFINITE,
    "finite",
)
def _(s: Subject) -> None:
    def standardise(x: Tensor) -> Tensor:
        x = x + 3e4
        return (x - x.mean(1, keepdim=True)) / (
            (x**2).mean(1, keepdim=True) - x.mean(1, keepdim=True) ** 2
        ).sqrt()

    s.model.between = standardise


@fault(
    "exp of an unbounded log-variance",
    vae,
    ("", "log_variance", "decoder*"),
    (*NONFINITE, "large"),
    ("finite", "headroom", "activation_scale", "loss", "initial_weights"),
)
def _(s: Subject) -> None:
    s.model.log_variance.weight.data *= 5e3


@fault(
    "every label is ignored",
    gpt,
    (*MODEL, "head"),
    (*NONFINITE, "ignore", "label"),
    ("finite", "loss"),
)
def _(s: Subject) -> None:
    s.target = torch.full_like(s.target, -100)


# ---- losses -------------------------------------------------------------------------------------


@fault(
    "softmax before cross_entropy",
    cnn,
    (*MODEL, "head", "softmax"),
    ("softmax", "probabilit", "logit"),
    "loss",
)
def _(s: Subject) -> None:
    s.model.finish = lambda x: F.softmax(x, dim=1)


@fault(
    "softmax module before cross_entropy",
    sequential,
    (*MODEL, "5", "4"),
    ("softmax", "probabilit", "logit"),
    "loss",
)
def _(s: Subject) -> None:
    s.model.append(nn.Softmax(dim=-1))


@fault(
    "sigmoid before binary_cross_entropy_with_logits",
    unet,
    (*MODEL, "out", "sigmoid"),
    ("sigmoid", "probabilit", "logit"),
    "loss",
)
def _(s: Subject) -> None:
    s.model.finish = torch.sigmoid


@fault(
    "softmax over the batch",
    mlp,
    (*MODEL, "head", "log_softmax", "softmax"),
    ("batch", "dim"),
    "loss",
)
def _(s: Subject) -> None:
    s.model.finish = lambda x: F.log_softmax(x, dim=0)
    s.loss = F.nll_loss


@fault(
    "output (N, 1) against target (N,)",
    regression,
    (*MODEL, "head"),
    ("broadcast", "shape", "(n,", "squeeze"),
    "loss",
)
def _(s: Subject) -> None:
    s.target = s.target.squeeze(1)


@fault("nll_loss on logits", lstm, (*MODEL, "head"), ("log", "negative", "nll"), "loss")
def _(s: Subject) -> None:
    s.loss = F.nll_loss
    s.model.head.weight.data *= 8  # as after a few steps, which drive it down without end


@fault("cross-entropy with its sign turned", vit, (*MODEL, "head"), ("negat", "sign"), "loss")
def _(s: Subject) -> None:
    s.loss = lambda output, labels: -F.cross_entropy(output, labels)


@fault("loss clamped below what it is", mlp, (*MODEL, "head", "fc1"), ("clamp", "zero", "constant"))
def _(s: Subject) -> None:
    s.loss = lambda output, labels: F.cross_entropy(output, labels).clamp(max=1.0)


@fault(
    "prediction clamped to a range it never meets",
    regression,
    (*MODEL, "head", "clamp*"),
    ("clamp", "zero", "range", "constant"),
)
def _(s: Subject) -> None:
    s.loss = lambda output, target: F.mse_loss(output.clamp(10, 20), target)


@fault("kl_div on probabilities", sequential, (*MODEL, "4"), ("negative", "log"), "loss")
def _(s: Subject) -> None:
    s.target = F.one_hot(s.target, 10).float()
    s.loss = lambda output, target: F.kl_div(output.softmax(1), target, reduction="batchmean")


@fault(
    "contrastive temperature of 1e-4",
    contrastive,
    MODEL,
    ("temperature", "saturat", "scale", "large", "ln("),
)
def _(s: Subject) -> None:
    s.model.temperature = 1e-4
    s.model.other = lambda encoder, x: encoder(x.flip(1))


# ---- inputs -------------------------------------------------------------------------------------


@fault("raw images from 0 to 255", resnet, (*MODEL, "stem"), RANGE, "inputs")
def _(s: Subject) -> None:
    pixels = (s.inputs * 6 + 4.9).clamp(0, 16)
    s.inputs = (pixels * 255 / 16).round()


@fault("divided by 255 twice", cnn, (*MODEL, "conv1"), (*RANGE, "twice", "small"), "inputs")
def _(s: Subject) -> None:
    s.inputs = (s.inputs * 6 + 4.9).clamp(0, 16) / 16 / 255


@fault(
    "images all black",
    unet,
    (*MODEL, "down1*"),
    ("constant", "zero", "same", "equal"),
    ("inputs", "collapse"),
)
def _(s: Subject) -> None:
    s.inputs = torch.zeros_like(s.inputs)


@fault(
    "every token is padding",
    lstm,
    (*MODEL, "embedding"),
    ("padding", "constant", "same", "zero"),
    ("inputs", "collapse"),
)
def _(s: Subject) -> None:
    s.inputs = torch.zeros_like(s.inputs)


@fault("a feature is missing: NaN", binary, (*MODEL, "fc1"), ("nan", "input"), ("inputs", "finite"))
def _(s: Subject) -> None:
    s.inputs[3, 4] = math.nan


@fault(
    "one column in another unit", regression, (*MODEL, "fc1", "tanh"), (*RANGE, "saturat", "large")
)
def _(s: Subject) -> None:
    s.inputs[:, 2] = 1e6 + 1e5 * s.inputs[:, 2]
    s.model.activation = torch.tanh


# ---- normalisation and modes --------------------------------------------------------------------


@fault("running variance of zero", cnn, ("bn1",), ("running", "variance", "zero"), "normalization")
def _(s: Subject) -> None:
    s.model.eval().bn1.running_var.zero_()


@fault(
    "running variance negative",
    resnet,
    ("blocks.1.bn1",),
    ("running", "variance", "negative", "nan"),
)
def _(s: Subject) -> None:
    s.model.eval().blocks[1].bn1.running_var.fill_(-1.0)


@fault("running mean is NaN", unet, ("down1.1",), ("running", "nan"))
def _(s: Subject) -> None:
    s.model.eval().down1[1].running_mean.fill_(math.nan)


@fault(
    "running statistics far from the batch",
    cnn,
    ("bn2",),
    ("running", "far", "batch"),
    "normalization",
)
def _(s: Subject) -> None:
    s.model.eval().bn2.running_mean.fill_(50.0)


@fault("scale of a norm is zero", cnn, ("bn2", "relu2"), ("zero", "scale", "weight"))
def _(s: Subject) -> None:
    nn.init.zeros_(s.model.bn2.weight)


@fault("batch norm left in training mode", resnet, ("blocks.0.bn1",), ("train", "eval"))
def _(s: Subject) -> None:
    s.model.eval().blocks[0].bn1.train()


@fault("dropout left in training mode", cnn, ("dropout",), ("train", "eval", "dropout"))
def _(s: Subject) -> None:
    s.model.eval().dropout.train()


@fault("dropout drops everything", cnn, ("dropout", "head"), ("zero", "dropout", "constant", "p=1"))
def _(s: Subject) -> None:
    s.model.dropout.p = 1.0


@fault(
    "LayerNorm over a single feature",
    gru,
    ("score", "score.*"),
    ("one", "single", "constant", "size 1", "feature"),
)
def _(s: Subject) -> None:
    s.model.score = nn.Sequential(nn.Linear(32, 1), nn.LayerNorm(1))


# ---- collapse -----------------------------------------------------------------------------------


@fault(
    "mean over the batch",
    mlp,
    ("", "fc2", "relu"),
    ("batch", "same", "equal", "all samples", "every sample"),
    "collapse",
)
def _(s: Subject) -> None:
    s.model.between = lambda x: x.mean(0, keepdim=True).expand_as(x)


@fault(
    "features multiplied by zero",
    cnn,
    ("", "conv2", "relu1"),
    ("zero", "constant", "same", "equal"),
)
def _(s: Subject) -> None:
    s.model.between = lambda x: x * 0


@fault(
    "graph without a single edge",
    graph,
    (*MODEL, "layers.0"),
    ("zero", "constant", "same", "equal"),
)
def _(s: Subject) -> None:
    nodes, edges = s.inputs
    s.inputs = nodes, torch.zeros_like(edges)


@fault(
    "the class token is read before the blocks",
    vit,
    ("", "norm", "head", "blocks*"),
    ("same", "equal", "all samples", "every sample", "not used", "reach"),
)
def _(s: Subject) -> None:
    s.model.pool = lambda x: s.model.token.expand(len(x), -1, -1)[:, 0]


# ---- through depth ------------------------------------------------------------------------------


@fault("twenty sigmoid layers", deep, ANY, ("vanish", "sigmoid", "saturat", "shrink", "small"))
def _(s: Subject) -> None:
    s.model = plain(64, *[64] * 20, 10, activation=nn.Sigmoid)


@fault(
    "twenty layers with three times the gain",
    deep,
    ANY,
    ("explod", "grow", "large", "scale", "init"),
)
def _(s: Subject) -> None:
    for layer in s.model[::2]:
        layer.weight.data *= 3


@fault(
    "residual stream doubled in every block",
    gpt,
    ("blocks*", "norm", ""),
    ("residual", "grow", "double", "scale", "explod"),
)
def _(s: Subject) -> None:
    s.model = GPT(depth=24)
    for block in s.model.blocks:
        block.join = lambda x, branch: 2 * x + branch


@fault(
    "recurrence of ReLU with a gain of 1.6",
    gru,
    ("gru",),
    ("explod", "grow", "large", "overflow", "scale", "init"),
)
def _(s: Subject) -> None:
    s.model.gru = nn.RNN(8, 32, nonlinearity="relu", batch_first=True)
    s.model.gru.weight_hh_l0.data = 1.6 * torch.eye(32)
    s.inputs = s.inputs.repeat(1, 12, 1)


@fault(
    "graph convolutions sum over hundreds of neighbours",
    graph,
    ("layers.*", "relu*", "head", ""),
    ("grow", "explod", "scale", "large", "normali"),
)
def _(s: Subject) -> None:
    s.model = GCN(depth=6)
    s.inputs, s.target = s.draw(256)
    s.inputs = s.inputs[0], (torch.rand(256, 256) < 0.5).float()


@fault(
    "one layer 10,000 times too large", resnet, (*MODEL, "head"), ("large", "scale", "init", "ln(")
)
def _(s: Subject) -> None:
    s.model.head.weight.data *= 1e4


# ---- several tasks ------------------------------------------------------------------------------


@fault(
    "one task's gradient is 100,000 times the other's",
    multitask,
    ("trunk*", "ink", *MODEL),
    ("task", "imbalance", "dominat", "ink"),
    "task_balance",
)
def _(s: Subject) -> None:
    s.loss = {"label": label_loss, "ink": lambda output, target: 1e5 * ink_loss(output, target)}


@fault(
    "a task that does not reach the trunk",
    multitask,
    ("trunk*", "label", *MODEL),
    ("label", "reach", "detach", "no gradient", "task"),
)
def _(s: Subject) -> None:
    s.model.to_label = Tensor.detach
