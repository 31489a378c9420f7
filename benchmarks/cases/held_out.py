"""Faults and controls that no check is tuned on: read them only after the limits are fixed."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.cases.controls import (
    activated,
    adapt,
    after_training,
    as_bfloat16,
    changed,
    evaluated,
    from_transformers,
    of_batch,
    picture,
    with_model,
)
from benchmarks.cases.faults import ANY, CUT, MODEL, NONFINITE, RANGE
from benchmarks.cases.models import (
    CNN,
    GPT,
    MLP,
    ViT,
    autoencoder,
    bert,
    binary,
    cnn,
    contrastive,
    deep,
    flat,
    gpt,
    graph,
    gru,
    images,
    ink_loss,
    label_loss,
    language_loss,
    lstm,
    mlp,
    moe,
    multitask,
    next_words,
    patients,
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
from benchmarks.cases.subject import Shelf, Subject, trained

SHELF = Shelf()
fault = SHELF.fault

# ---- faults: initial weights --------------------------------------------------------------------


@fault(
    "head and the layer before it both zero",
    regression,
    ("fc2", "head", "relu_1"),
    ("zero", "init"),
)
def _(s: Subject) -> None:
    for layer in (s.model.fc2, s.model.head):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)


@fault(
    "convolutions drawn with std 1",
    unet,
    ("middle*", "join*", "down*", "up*", "out", *MODEL),
    ("init", "scale", "large", "std", "weight"),
)
def _(s: Subject) -> None:
    for module in s.model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(module.weight)
        if isinstance(module, nn.Sequential):
            module[1] = nn.Identity()


@fault(
    "units of an MLP block identical",
    gpt,
    ("blocks.0.mlp*",),
    ("constant", "identical", "symmetr", "equal"),
)
def _(s: Subject) -> None:
    s.model.blocks[0].mlp[0].weight.data[:] = s.model.blocks[0].mlp[0].weight.data[0].clone()
    nn.init.zeros_(s.model.blocks[0].mlp[0].bias)
    nn.init.constant_(s.model.blocks[0].mlp[2].weight, 0.02)


@fault(
    "one query weight 100 times too large",
    bert,
    ("*layer.0.attention*",),
    ("saturat", "one-hot", "scale", "large", "weight", "init"),
)
def _(s: Subject) -> None:
    attention = s.model.bert.encoder.layer[0].attention.self
    for layer in (attention.query, attention.key):
        layer.weight.data *= 100


@fault(
    "weight norm with a gain of zero", sequential, ("2*", "3"), ("zero", "gain", "init", "scale")
)
def _(s: Subject) -> None:
    nn.utils.parametrizations.weight_norm(s.model[2])
    nn.init.zeros_(s.model[2].parametrizations.weight.original0)
    nn.init.zeros_(s.model[2].bias)


# ---- faults: dead and saturated -----------------------------------------------------------------


@fault(
    "bottleneck of ReLU dead", autoencoder, ("encoder.2", "", "relu"), ("bias", "dead", "negative")
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.encoder[2].bias, -30.0)
    s.model.between = F.relu


@fault(
    "ReLU on a regression's output, all below zero",
    regression,
    (*MODEL, "head", "relu_2"),
    ("dead", "negative", "bias"),
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.head.bias, -4.0)
    s.model.finish = F.relu


@fault(
    "Hardswish dead by a shift",
    cnn,
    ("bn1", "relu1"),
    ("dead", "negative", "bias", "shift", "saturat"),
)
def _(s: Subject) -> None:
    s.model.relu1 = nn.Hardswish()
    nn.init.constant_(s.model.bn1.bias, -12.0)


@fault(
    "tanh output layer driven to its ends",
    autoencoder,
    ("decoder.2", "tanh", *MODEL),
    ("saturat", "large", "scale", "weight"),
)
def _(s: Subject) -> None:
    s.model.decoder[2].weight.data *= 2000
    s.model.finish = torch.tanh


@fault(
    "gate shut for good",
    moe,
    ("", "sigmoid", "stem"),
    ("saturat", "zero", "gate", "dead", "constant", "vanish"),
)
def _(s: Subject) -> None:
    s.model.between = lambda x: x * torch.sigmoid(x.detach() * 0 - 120.0)


# ---- faults: where gradients stop ---------------------------------------------------------------


@fault(
    "feature extractor under no_grad although it trains",
    cnn,
    ("", "conv1", "bn1", "relu1"),
    CUT,
    "missing_gradients",
)
def _(s: Subject) -> None:
    convolution = s.model.conv1.forward
    s.model.conv1.forward = torch.no_grad()(convolution)
    s.model.between = Tensor.detach


@fault(
    "attention on detached keys, queries and values", gpt, ("blocks.1*",), CUT, "missing_gradients"
)
def _(s: Subject) -> None:
    attention = s.model.blocks[1].attention
    for layer in (attention.q, attention.k, attention.v):
        layer.forward = torch.no_grad()(layer.forward)


@fault(
    "one branch of two under no_grad with weights of its own",
    contrastive,
    ("second*", ""),
    CUT,
    "missing_gradients",
)
def _(s: Subject) -> None:
    s.model.second = plain(64, 64, 16)
    s.model.other = lambda encoder, x: s.model.second(x).detach()


@fault(
    "sign in mid-net",
    mlp,
    ("", "fc1", "relu", "tanh"),
    (*CUT, "zero", "sign", "constant"),
    "missing_gradients",
)
def _(s: Subject) -> None:
    s.model.between = lambda x: torch.sign(torch.tanh(x) - 0.5)


@fault("features sorted by id, cast to int", recommender, ("", "user"), CUT, "missing_gradients")
def _(s: Subject) -> None:
    s.model.between = lambda u: u.mul(100).long().float()


@fault(
    "result of a layer discarded",
    lstm,
    ("", "lstm"),
    ("not used", "unused", "reach", "discard", "never", *CUT),
)
def _(s: Subject) -> None:
    s.model.head = nn.Linear(16, 10)
    s.model.forward = lambda ids: s.model.head(_discard(s.model.lstm, s.model.embedding(ids)))


def _discard(layer: nn.Module, x: Tensor) -> Tensor:
    layer(x)
    return x.mean(1)


@fault(
    "gradient reversal with a factor of zero", multitask, ("trunk*", ""), ("zero", "backward", *CUT)
)
def _(s: Subject) -> None:
    def reverse(x: Tensor) -> Tensor:
        x = x * 1.0
        x.register_hook(lambda gradient: -0.0 * gradient)
        return x

    s.model.to_label = s.model.to_ink = reverse
    s.loss = lambda output, target: label_loss(output, target) + ink_loss(output, target)


@fault(
    "layers in a plain dictionary",
    multitask,
    ("", "trunk*"),
    ("dict", "regist", "moduledict", "named_parameters"),
    "unregistered_parameters",
)
def _(s: Subject) -> None:
    heads = {"label": nn.Linear(32, 10), "ink": nn.Linear(32, 1)}
    del s.model.label, s.model.ink
    s.model.heads = heads
    s.model.forward = lambda x: tuple(head(s.model.trunk(x)) for head in s.model.heads.values())
    s.loss = lambda output, target: label_loss(output, target) + ink_loss(output, target)


@fault(
    "loss on a copy made with torch.tensor",
    binary,
    (*MODEL, "head", "fc1"),
    (*CUT, "loss", "torch.tensor"),
)
def _(s: Subject) -> None:
    s.loss = lambda output, target: F.mse_loss(
        output.sigmoid().detach().clone().requires_grad_(), target
    )


# ---- faults: NaN and infinity -------------------------------------------------------------------


@fault(
    "distance of a point to itself, its root's gradient",
    contrastive,
    ("encoder*", ""),
    NONFINITE,
    "finite",
)
def _(s: Subject) -> None:
    s.inputs = (s.inputs[0], s.inputs[0])
    s.model.forward = lambda a, b: (
        -((s.model.encoder(a)[:, None] - s.model.encoder(b)) ** 2).sum(-1).sqrt()
    )


@fault("acos of a cosine of 1", contrastive, ("encoder*", ""), NONFINITE, "finite")
def _(s: Subject) -> None:
    s.inputs = (s.inputs[0], s.inputs[0])
    s.model.temperature = 1.0
    forward = s.model.forward
    s.model.forward = lambda a, b: -torch.acos(forward(a, b).clamp(-1, 1))


@fault(
    "embedding of zeros normalised without eps",
    recommender,
    ("", "user", "mlp*"),
    NONFINITE,
    "finite",
)
def _(s: Subject) -> None:
    s.model.user.weight.data[:] = 0.0
    s.model.between = lambda u: u / u.norm(dim=1, keepdim=True)


@fault(
    "binary cross-entropy by hand on saturated sigmoids",
    binary,
    (*MODEL, "head", "sigmoid"),
    (*NONFINITE, "large"),
    ("finite", "loss", "saturation", "initial_weights"),
)
def _(s: Subject) -> None:
    s.model.head.weight.data *= 2000
    s.model.finish = torch.sigmoid
    s.loss = lambda p, y: -(y * p.log() + (1 - y) * (1 - p).log()).mean()


@fault("infinity in a running variance", resnet, ("bn", ""), ("inf", "running"))
def _(s: Subject) -> None:
    s.model.eval().bn.running_var[3] = math.inf


@fault("rows of attention masked out wholly", seq2seq, ("cross*",), (*NONFINITE, "mask"))
def _(s: Subject) -> None:
    kept = torch.ones(16, 1, 1, 16, dtype=torch.bool)
    kept[5] = False
    s.model.cross.mask = lambda scores: scores.masked_fill(~kept, -math.inf)


@fault(
    "float16 attention overflows in its scores",
    gpt,
    ("blocks.0.attention*", "blocks.0*"),
    (*NONFINITE, "float16", "range"),
)
def _(s: Subject) -> None:
    s.model.half()
    for layer in (s.model.blocks[0].attention.q, s.model.blocks[0].attention.k):
        layer.weight.data *= 800


@fault(
    "weights below float16's normal numbers",
    mlp,
    ("fc2", "relu_1"),
    ("underflow", "subnormal", "float16", "small", "range", "init"),
)
def _(s: Subject) -> None:
    s.model.fc2.weight.data *= 1e-5
    nn.init.zeros_(s.model.fc2.bias)
    s.model.half()
    s.inputs = s.inputs.half()


@fault(
    "a checkpoint with infinity in a bias",
    vit,
    ("blocks.1.mlp.0", "blocks.1.mlp*"),
    ("inf", "parameter", "bias", "checkpoint"),
    "finite",
)
def _(s: Subject) -> None:
    s.model.blocks[1].mlp[0].bias.data[0] = math.inf


# ---- faults: losses -----------------------------------------------------------------------------


@fault(
    "sigmoid of every class before cross_entropy",
    lstm,
    (*MODEL, "head", "sigmoid"),
    ("sigmoid", "probabilit", "logit"),
    "loss",
)
def _(s: Subject) -> None:
    s.model.finish = torch.sigmoid


@fault(
    "sigmoid module before binary_cross_entropy_with_logits",
    binary,
    (*MODEL, "head", "head.1"),
    ("sigmoid", "probabilit", "logit"),
    "loss",
)
def _(s: Subject) -> None:
    s.model.head = nn.Sequential(s.model.head, nn.Sigmoid())


@fault(
    "output (N,) against target (N, 1)",
    regression,
    (*MODEL, "head"),
    ("broadcast", "shape", "(n,", "squeeze"),
    "loss",
)
def _(s: Subject) -> None:
    s.model.finish = lambda x: x.squeeze(1)
    s.loss = F.smooth_l1_loss


@fault(
    "squared error by hand, (N, 1) less (N,)",
    binary,
    (*MODEL, "head"),
    ("broadcast", "shape", "(n,", "squeeze"),
)
def _(s: Subject) -> None:
    s.target = s.target.squeeze(1)
    s.loss = lambda output, target: ((output.sigmoid() - target) ** 2).mean()


@fault(
    "softmax over the batch in attention pooling", gru, ("softmax", "", "score"), ("batch", "dim")
)
def _(s: Subject) -> None:
    s.model.dim = 0


@fault(
    "negative squared error",
    autoencoder,
    (*MODEL, "decoder.2", "decoder"),
    ("negat", "sign"),
    "loss",
)
def _(s: Subject) -> None:
    s.loss = lambda output, target: -F.mse_loss(output, target)


@fault(
    "softmax of a single logit",
    binary,
    (*MODEL, "head", "softmax"),
    ("one", "dim", "constant", "size 1", "single"),
)
def _(s: Subject) -> None:
    s.model.finish = lambda x: torch.softmax(x, dim=1)
    s.loss = F.binary_cross_entropy


@fault(
    "probabilities clamped to a constant",
    binary,
    (*MODEL, "head", "sigmoid", "clamp*"),
    ("clamp", "zero", "constant"),
)
def _(s: Subject) -> None:
    s.model.finish = lambda x: torch.sigmoid(x - 30).clamp(1e-4, 1 - 1e-4)
    s.loss = F.binary_cross_entropy


# ---- faults: inputs -----------------------------------------------------------------------------


@fault("16-bit sound as integers", gru, (*MODEL, "gru"), RANGE, "inputs")
def _(s: Subject) -> None:
    s.inputs = (s.inputs * 8000).round()


@fault("raw bytes into a vision transformer", vit, (*MODEL, "patches"), RANGE, "inputs")
def _(s: Subject) -> None:
    s.inputs = ((s.inputs * 6 + 4.9).clamp(0, 16) * 15.9).round()


@fault(
    "normalised twice with ImageNet's numbers", cnn, (*MODEL, "conv1"), (*RANGE, "twice"), "inputs"
)
def _(s: Subject) -> None:
    unit = (s.inputs * 6 + 4.9).clamp(0, 16) / 16
    s.inputs = ((unit - 0.485) / 0.229 - 0.485) / 0.229


@fault("the loader gives ones", mlp, (*MODEL, "fc1"), ("constant", "same", "equal"))
def _(s: Subject) -> None:
    s.inputs = torch.ones_like(s.inputs)


@fault(
    "every token is unknown",
    bert,
    (*MODEL, "bert.embeddings*", "bert"),
    ("constant", "same", "padding", "token"),
)
def _(s: Subject) -> None:
    s.inputs = {**s.inputs, "input_ids": torch.full_like(s.inputs["input_ids"], 3)}


@fault("an infinity in the features", graph, (*MODEL, "layers.0"), ("inf", "input"))
def _(s: Subject) -> None:
    s.inputs[0][2, 5] = math.inf


# ---- faults: normalisation, collapse, depth -----------------------------------------------------


@fault(
    "momentum of zero: statistics never updated",
    cnn,
    ("bn2",),
    ("running", "far", "never", "batch"),
    "normalization",
)
def _(s: Subject) -> None:
    s.model = trained(cnn).model.eval()
    nn.init.constant_(s.model.conv2.bias, 40.0)  # which the norm would take away, had it seen it
    s.model.bn2.reset_running_stats()


@fault("functional dropout on in eval", mlp, ("", "dropout", "relu"), ("train", "eval", "dropout"))
def _(s: Subject) -> None:
    s.model.eval()
    s.model.between = lambda x: F.dropout(x, 0.5)


@fault(
    "scale of the last LayerNorm is zero", gpt, ("norm", "head", ""), ("zero", "scale", "weight")
)
def _(s: Subject) -> None:
    nn.init.zeros_(s.model.norm.weight)


@fault(
    "GroupNorm with a group for each feature",
    mlp,
    ("norm", "fc2", "", "groupnorm"),
    ("constant", "group", "same", "equal", "one", "single"),
)
def _(s: Subject) -> None:
    s.model.norm = nn.GroupNorm(64, 64)
    s.model.between = lambda x: s.model.norm(x)


@fault(
    "pooled over batch and time at once",
    lstm,
    ("", "head", "lstm"),
    ("batch", "same", "equal", "all samples", "every sample"),
)
def _(s: Subject) -> None:
    s.model.pool = lambda x: x.mean((0, 1)).expand(len(x), -1)


@fault(
    "decoder reads nothing of the code",
    autoencoder,
    ("decoder*", "", "encoder*"),
    ("same", "equal", "zero", "all samples", "dead", "constant", "init"),
)
def _(s: Subject) -> None:
    nn.init.zeros_(s.model.decoder[0].weight)


@fault(
    "thirty plain layers with PyTorch's own start",
    deep,
    ANY,
    ("vanish", "shrink", "same", "equal", "small", "init", "decay"),
)
def _(s: Subject) -> None:
    s.model = plain(64, *[64] * 30, 10)


@fault(
    "tanh recurrence with weights of 3",
    gru,
    ("gru",),
    ("saturat", "large", "init", "explod", "scale"),
)
def _(s: Subject) -> None:
    s.model.gru = nn.RNN(8, 32, batch_first=True)
    nn.init.normal_(s.model.gru.weight_hh_l0, std=3.0)
    nn.init.normal_(s.model.gru.weight_ih_l0, std=3.0)


@fault(
    "branches multiplied instead of added",
    vit,
    ("blocks*", "patches", ""),
    ("vanish", "shrink", "zero", "small", "decay", "scale", "residual", "explod", "grow"),
)
def _(s: Subject) -> None:
    s.model = ViT(depth=6)
    for block in s.model.blocks:
        block.join = torch.mul


@fault(
    "activations grow tenfold a layer",
    regression,
    ("fc2", "head", "relu*", "fc1", *MODEL),
    ("grow", "large", "scale", "explod", "init"),
)
def _(s: Subject) -> None:
    for layer in (s.model.fc1, s.model.fc2, s.model.head):
        layer.weight.data *= 30


@fault(
    "positions as large as they are added to the embedding",
    gpt,
    ("", "blocks.0*", "norm", "embedding", "position"),
    ("scale", "position", "large", "embedding", "constant", "same"),
)
def _(s: Subject) -> None:
    s.model.position.weight.data = 10 * torch.arange(32.0)[:, None] * torch.arange(32.0)


# ---- faults: several tasks ----------------------------------------------------------------------


@fault(
    "a task's loss a millionth of the other's",
    multitask,
    ("trunk*", "label", *MODEL),
    ("task", "imbalance", "dominat", "label"),
    "task_balance",
)
def _(s: Subject) -> None:
    s.loss = {"label": lambda o, t: 1e-6 * label_loss(o, t), "ink": ink_loss}


@fault(
    "log-variance of 200 at the start",
    vae,
    ("log_variance", "", "decoder*"),
    (*NONFINITE, "large", "bias", "init"),
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.log_variance.bias, 200.0)


# ---- controls -----------------------------------------------------------------------------------

control = SHELF.control

for _healthy in (mlp, resnet, gru, bert, seq2seq, vae, autoencoder, graph, regression, multitask):
    control(f"{_healthy.__name__}, trained, eval", evaluated(after_training(_healthy)))
for _healthy, _n in ((sequential, 3), (resnet, 1), (bert, 2), (unet, 1), (vae, 5), (gru, 1)):
    control(f"{_healthy.__name__}, trained, batch of {_n}", of_batch(after_training(_healthy), _n))
for _healthy in (cnn, vit, unet, deep):
    control(f"{_healthy.__name__}, initialised, bfloat16", as_bfloat16(_healthy))
for _healthy in (cnn, bert, vit):
    control(f"{_healthy.__name__}, trained, bfloat16", as_bfloat16(after_training(_healthy)))

TRANSFORMERS = [
    "distilbert",
    "electra",
    "qwen2",
    "phi",
    "deit",
    "mobilenet",
    "xlnet",
    "funnel",
    "gemma3",
    "deepseek",
]
TRANSFORMERS += ["gpt-oss", "jamba", "ast", "videomae", "regnet", "sam", "vilt"]
for _name in TRANSFORMERS:
    control(f"transformers {_name}", from_transformers(_name))

for _activation in (nn.ELU, nn.Mish, nn.ReLU6, nn.Softplus, nn.PReLU):
    control(f"{_activation.__name__}, trained", after_training(activated(_activation)))


class Weighed(nn.Module):
    """Squeeze and excitation: channels weighed by sigmoids."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.squeeze = nn.Conv2d(1, 16, 3), nn.Linear(16, 4)
        self.excite, self.head = nn.Linear(4, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        weights = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3))))))
        return self.head((x * weights[:, :, None, None]).amax((2, 3)))


control("squeeze and excitation", after_training(with_model(Weighed, images, F.cross_entropy)))


class Fourier(nn.Module):
    """Random Fourier features (Tancik et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 10 * torch.randn(2, 32))
        self.mlp = plain(64, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        phase = 2 * math.pi * x @ self.frequencies
        return self.mlp(torch.cat([phase.sin(), phase.cos()], 1))


control("Fourier features", with_model(Fourier, picture, F.mse_loss))
control("Fourier features, trained", after_training(with_model(Fourier, picture, F.mse_loss)))
control("weight norm", after_training(changed(sequential, lambda s: [
    nn.utils.parametrizations.weight_norm(layer) for layer in s.model[::2]])))  # fmt: skip
control("spectral norm", changed(sequential, lambda s: [
    nn.utils.parametrizations.spectral_norm(layer) for layer in s.model[::2]]))  # fmt: skip


class ZeroConv(nn.Module):
    """ControlNet-like: a trained part with a copy behind a convolution of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Conv2d(1, 8, 3, padding=1).requires_grad_(False)
        self.copy, self.zero = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.head = nn.Conv2d(8, 1, 1)
        nn.init.zeros_(self.zero.weight)
        nn.init.zeros_(self.zero.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.silu(self.trunk(x) + self.zero(self.copy(x))))


control("convolution of zeros beside a frozen trunk", with_model(
    ZeroConv, lambda n: (images(n)[0],) * 2, F.mse_loss, 32))  # fmt: skip


class Quantizer(nn.Module):
    """An autoencoder over a codebook, with the straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = plain(64, 32, 8), plain(8, 32, 64)
        self.codes = nn.Embedding(32, 8)
        nn.init.normal_(self.codes.weight, std=0.2)  # as the encoder's outputs: all are in use

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(x)
        nearest = self.codes(torch.cdist(code, self.codes.weight).argmin(1))
        commitment = F.mse_loss(code, nearest.detach()) + F.mse_loss(nearest, code.detach())
        return self.decoder(code + (nearest - code).detach()), commitment


control("codebook with straight-through gradients", after_training(with_model(
    Quantizer, lambda n: (flat(n)[0],) * 2,
    lambda output, target: F.mse_loss(output[0], target) + output[1])))  # fmt: skip


class SimSiam(nn.Module):
    """Each view predicts the other, whose gradient is stopped on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = plain(64, 64, 32), plain(32, 16, 32)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self.encoder(a), self.encoder(b)
        left = F.cosine_similarity(self.predictor(a), b.detach()).mean()
        return -(left + F.cosine_similarity(self.predictor(b), a.detach()).mean()) / 2


control("SimSiam: gradient stopped on purpose", with_model(
    SimSiam, lambda n: ((flat(n)[0], flat(n)[0] + 0.1), None), None))  # fmt: skip


class Flow(nn.Module):
    """An affine coupling, whose likelihood may be above one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain(5, 32, 10)
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=1)
        scale, shift = self.net(a).chunk(2, dim=1)
        made = torch.cat([a, b * scale.tanh().exp() + shift], 1)
        return (0.5 * made**2).sum(1).mean() - scale.tanh().sum(1).mean()


control(
    "normalising flow, last layer zero", with_model(Flow, lambda n: (patients(n)[0], None), None)
)
control(
    "normalising flow, trained",
    after_training(with_model(Flow, lambda n: (patients(n)[0], None), None)),
)
control("Poisson likelihood", with_model(
    lambda: MLP(10, 32, 1), patients,
    lambda output, target: F.poisson_nll_loss(output, (target + 3).round())))  # fmt: skip
control("soft targets", with_model(
    MLP, flat, lambda output, labels: F.cross_entropy(
        output, 0.9 * F.one_hot(labels, 10).float() + 0.01)))  # fmt: skip
control("several labels at once", with_model(
    lambda: MLP(64, 64, 40), flat, lambda output, labels: F.binary_cross_entropy_with_logits(
        output, (torch.arange(40) % 10 == labels[:, None]).float())))  # fmt: skip
control("policy gradient: negative loss", with_model(
    lambda: MLP(64, 64, 4), flat,
    lambda output, labels: (output.log_softmax(1)[:, 0] * (labels - 2.0)).mean()))  # fmt: skip


def natural_targets(n: int) -> tuple[Tensor, Tensor]:
    """Return standardised features, and the progression in its own unit."""
    features, target = patients(n)
    return features, 152 + 77 * target


def skewed(n: int) -> tuple[Tensor, Tensor]:
    """Return features as of money: positive, with a long tail."""
    features, target = patients(n)
    return features.exp().clamp(max=50), target


def _prune(s: Subject) -> None:
    for layer in s.model[::2]:
        layer.weight.data[layer.weight.abs() < layer.weight.abs().quantile(0.8)] = 0


control("four fifths of the weights pruned", changed(after_training(sequential, 200), _prune))
control("checkpointed blocks", changed(gpt, lambda s: [
    setattr(block, "forward", functools.partial(checkpoint, block.forward, use_reentrant=False))
    for block in s.model.blocks]))  # fmt: skip
control("LSTM frozen under a fresh head", changed(after_training(lstm), lambda s: (
    s.model.requires_grad_(False), s.model.head.requires_grad_(True),
    s.model.head.reset_parameters())))  # fmt: skip
control("adapters in bfloat16", as_bfloat16(changed(after_training(gpt), adapt)))
control("highway with gates mostly closed", with_model(
    lambda: nn.Sequential(nn.Linear(64, 32), Highway(32), Highway(32), nn.Linear(32, 10)),
    flat, F.cross_entropy))  # fmt: skip
control("targets in the hundreds", after_training(
    with_model(lambda: MLP(10, 32, 1), natural_targets, F.l1_loss), 300, 1e-2))  # fmt: skip
control("skewed positive features", after_training(
    with_model(lambda: MLP(10, 32, 1), skewed, F.mse_loss)))  # fmt: skip
control("GLU, pre-norm, 8 blocks", with_model(
    lambda: nn.Sequential(nn.Linear(64, 32), *(Glu(32) for _ in range(8)), nn.Linear(32, 10)),
    flat, F.cross_entropy))  # fmt: skip
control("wide vocabulary, untied", with_model(
    lambda: GPT(tied=False), next_words, language_loss, 16))  # fmt: skip
control("metric learning with triplets", with_model(
    lambda: plain(64, 64, 16), flat, lambda output, labels: F.triplet_margin_loss(
        output, output.roll(1, 0), output.roll(2, 0))))  # fmt: skip


class Highway(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.constant_(self.gate.bias, -3.0)

    def forward(self, x: Tensor) -> Tensor:
        open_ = torch.sigmoid(self.gate(x))
        return open_ * F.relu(self.layer(x)) + (1 - open_) * x


class Glu(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.glu(self.up(self.norm(x))))


# ---- controls: what is usual, and could be taken for a fault ------------------------------------


class Distilled(nn.Module):
    """A student beside its frozen teacher, both in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = MLP(), MLP().requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), self.teacher(x)


def distillation(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    student, teacher = ((part / 4).log_softmax(1) for part in output)
    return F.kl_div(student, teacher, log_target=True, reduction="batchmean")


control("distillation at temperature 4", with_model(Distilled, flat, distillation))


def focal(output: Tensor, labels: Tensor) -> Tensor:
    likelihood = output.log_softmax(1).gather(1, labels[:, None])
    return -((1 - likelihood.exp()) ** 2 * likelihood).mean()


control("focal loss", after_training(with_model(MLP, flat, focal)))


control("binary images", with_model(
    CNN, lambda n: (lambda x, y: ((x > 0).float(), y))(*images(n)), F.cross_entropy))  # fmt: skip


class Prompted(nn.Module):
    """A frozen transformer behind a prompt that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = GPT().requires_grad_(False)
        self.prompt = nn.Parameter(0.02 * torch.randn(4, 32))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.trunk.embedding(ids[:, :24])
        x = torch.cat([self.prompt.expand(len(x), -1, -1), x], 1)
        for block in self.trunk.blocks:
            x = block(x)
        return self.trunk.head(self.trunk.norm(x))[:, 4:]


control("learnt prompt before a frozen net", with_model(
    Prompted, next_words, lambda output, ids: language_loss(output, ids[:, :24]), 16))  # fmt: skip


class Gumbel(nn.Module):
    """A choice made hard forwards and soft backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.choose, self.codes = plain(64, 64, 16), nn.Linear(16, 32, bias=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.codes(F.gumbel_softmax(self.choose(x), hard=True)))


control("Gumbel softmax, hard", with_model(Gumbel, flat, F.cross_entropy))


def _identity(s: Subject) -> None:
    for layer in s.model[2:-1:2]:
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)


control("hidden layers that start as the identity", changed(deep, _identity))
control("class weights of 100 to 1", after_training(with_model(
    MLP, flat, functools.partial(F.cross_entropy, weight=torch.logspace(-1, 1, 10)))))  # fmt: skip
control("vit, trained, frozen but its norms", changed(after_training(vit), lambda s: [
    module.requires_grad_(isinstance(module, nn.LayerNorm))
    for module in s.model.modules() if not list(module.children())]))  # fmt: skip
