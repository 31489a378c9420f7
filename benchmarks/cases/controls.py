"""The healthy controls on which checks may be tuned: unhealthy is a false alarm here.

Each runs with several random seeds, which draw the weights, the training and the batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases.models import (
    CNN,
    GRU,
    LSTM,
    MLP,
    Attention,
    ResNet,
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
    he,
    images,
    lstm,
    mlp,
    moe,
    multitask,
    patients,
    plain,
    recommender,
    regression,
    resnet,
    rows,
    seq2seq,
    sequential,
    some_digits,
    tumours,
    unet,
    vae,
    vit,
    words,
)
from benchmarks.cases.subject import Draw, Healthy, Shelf, Subject, subject, trained

SHELF = Shelf()
control = SHELF.control

# ---- what can be done with any subject ----------------------------------------------------------


def with_model(build: Callable[[], nn.Module], draw: Draw, loss: Any, batch: int = 64) -> Healthy:
    """Return a function that makes the subject anew."""
    return lambda: subject(build(), draw, loss, batch)


def after_training(healthy: Healthy, steps: int = 80, rate: float = 3e-3) -> Healthy:
    return lambda: trained(healthy, steps, rate)


def evaluated(healthy: Healthy) -> Healthy:
    """Return the subject in evaluation mode."""

    def build() -> Subject:
        made = healthy()
        made.model.eval()
        return made

    return build


def of_batch(healthy: Healthy, n: int) -> Healthy:
    """Return the subject with a batch of `n` samples."""

    def build() -> Subject:
        made = healthy()
        made.inputs, made.target = made.draw(n)
        return made

    return build


def as_bfloat16(healthy: Healthy) -> Healthy:
    """Return the subject with its floating tensors in bfloat16."""

    def build() -> Subject:
        made = healthy()
        made.model.bfloat16()
        made.inputs, made.target = _bfloat16(made.inputs), _bfloat16(made.target)
        return made

    return build


def _bfloat16(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.bfloat16() if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(map(_bfloat16, value))
    return {name: _bfloat16(part) for name, part in value.items()} if value is not None else None


def changed(healthy: Healthy, change: Callable[[Subject], object]) -> Healthy:
    """Return the subject after `change`, which keeps it healthy."""

    def build() -> Subject:
        made = healthy()
        change(made)
        return made

    return build


def from_transformers(name: str) -> Healthy:
    """Return an architecture of transformers, small, with the random projection as loss."""

    def build() -> Subject:
        from tests.capture.architectures import ARCHITECTURES

        case = ARCHITECTURES[name]
        return Subject(case.build(), case.inputs())

    return build


# ---- every subject, before and after training ---------------------------------------------------

EVERY = [mlp, sequential, deep, regression, binary, cnn, resnet, lstm, gru, gpt, vit, seq2seq, bert]
EVERY += [autoencoder, vae, unet, moe, recommender, graph, multitask, contrastive]

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

TRANSFORMERS = [
    "bert",
    "roberta",
    "albert",
    "gpt2",
    "llama",
    "mistral",
    "gemma",
    "gptneox",
    "mixtral",
    "mamba",
    "t5",
    "bart",
]
TRANSFORMERS += [
    "whisper",
    "wav2vec2",
    "vit",
    "dinov2",
    "swin",
    "resnet",
    "convnext",
    "clip",
    "deberta",
    "longformer",
]
TRANSFORMERS += ["modernbert", "bloom", "qwen2 moe", "switch", "mamba2", "rwkv"]
TRANSFORMERS += ["patchtst", "detr", "segformer", "llava", "recurrent gemma"]
for _name in TRANSFORMERS:
    control(f"transformers {_name}", from_transformers(_name))

# ---- initialisation that looks like a fault -----------------------------------------------------


def _zero_last_norms(s: Subject) -> None:
    for block in s.model.blocks:
        nn.init.zeros_(block.bn2.weight)


control("resnet, last norm of each branch zero", changed(resnet, _zero_last_norms))


class Gated(nn.Module):
    """ReZero (Bachlechner et al. 2020): each branch behind a scalar gate of zero."""

    def __init__(self, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.branches = nn.ModuleList(plain(width, width, width) for _ in range(depth))
        self.gates = nn.Parameter(torch.zeros(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for gate, branch in zip(self.gates, self.branches, strict=True):
            x = x + gate * branch(x)
        return self.head(x)


control("ReZero", with_model(Gated, flat, F.cross_entropy))
control("ReZero, trained", after_training(with_model(Gated, flat, F.cross_entropy)))


class LayerScale(nn.Module):
    def __init__(self, layer: nn.Module, width: int, start: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.full((width,), start))

    def forward(self, *arguments: Tensor) -> Tensor:
        return self.scale * self.layer(*arguments)


def _layer_scale(s: Subject) -> None:
    for block in s.model.blocks:
        block.attention = LayerScale(block.attention, 32, 1e-5)
        block.mlp = LayerScale(block.mlp, 32, 1e-5)


control("vit with LayerScale", changed(vit, _layer_scale))


class LoRA(nn.Module):
    """A frozen layer beside a product of two small ones, the second of zeros."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = layer.requires_grad_(False)
        self.a = nn.Linear(layer.in_features, rank, bias=False)
        self.b = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def adapt(s: Subject) -> None:
    """Freeze a transformer and put adapters beside its queries and values."""
    s.model.requires_grad_(False)
    for block in s.model.blocks:
        block.attention.q = LoRA(block.attention.q)
        block.attention.v = LoRA(block.attention.v)


control("gpt with fresh LoRA adapters", changed(after_training(gpt), adapt))


def _freeze_trunk(s: Subject) -> None:
    s.model.requires_grad_(False)
    s.model.head.requires_grad_(True)


control("resnet, trunk frozen", changed(after_training(resnet), _freeze_trunk))
control("vit, trunk frozen, fresh head", changed(
    after_training(vit),
    lambda s: (s.model.requires_grad_(False), setattr(s.model, "head", nn.Linear(32, 10))),
))  # fmt: skip


def _fresh_head(s: Subject) -> None:
    nn.init.zeros_(s.model.head.weight)
    nn.init.zeros_(s.model.head.bias)


control("cnn, trained, fresh head of zeros", changed(after_training(cnn), _fresh_head))
control("vit with a zero head", changed(vit, _fresh_head))
control("orthogonal weights", changed(sequential, lambda s: [
    nn.init.orthogonal_(layer.weight, gain=math.sqrt(2)) for layer in s.model[::2]
]))  # fmt: skip

# ---- activations and norms ----------------------------------------------------------------------


def activated(activation: type[nn.Module]) -> Healthy:
    """Return a net of four hidden layers with this activation."""
    return with_model(
        lambda: plain(64, 64, 64, 64, 64, 10, activation=activation), flat, F.cross_entropy
    )


for _activation in (nn.GELU, nn.Tanh, nn.SiLU, nn.SELU, nn.LeakyReLU, nn.Hardswish):
    control(f"{_activation.__name__}, initialised", activated(_activation))
    control(f"{_activation.__name__}, trained", after_training(activated(_activation)))


def normed(norm: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
    """Return a maker of a convolutional net with this norm."""

    def build() -> nn.Module:
        model = CNN()
        model.bn1, model.bn2 = norm(16), norm(32)
        return model

    return build


control("GroupNorm", after_training(
    with_model(normed(functools.partial(nn.GroupNorm, 4)), images, F.cross_entropy)))  # fmt: skip
control("InstanceNorm", with_model(normed(nn.InstanceNorm2d), images, F.cross_entropy))
control("RMSNorm, pre-norm", changed(gpt, lambda s: [
    (setattr(block, "norm1", nn.RMSNorm(32)), setattr(block, "norm2", nn.RMSNorm(32)))
    for block in s.model.blocks
]))  # fmt: skip


class PostNorm(nn.Module):
    """A block with the norm behind the sum; `alpha` as in DeepNorm (Wang et al. 2022)."""

    def __init__(self, width: int = 32, alpha: float = 1.0) -> None:
        super().__init__()
        self.attention, self.norm1 = Attention(width, 4), nn.LayerNorm(width)
        self.mlp, self.norm2 = plain(width, 4 * width, width), nn.LayerNorm(width)
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.alpha * x + self.attention(x))
        return self.norm2(self.alpha * x + self.mlp(x))


def post_norm(depth: int = 4, alpha: float = 1.0) -> Callable[[], nn.Module]:
    """Return a maker of a vision transformer of post-norm blocks."""

    def build() -> nn.Module:
        model = ViT(depth=1)
        model.blocks = nn.Sequential(*(PostNorm(alpha=alpha) for _ in range(depth)))
        return model

    return build


control("post-norm", with_model(post_norm(), images, F.cross_entropy, 32))
control("DeepNorm, 12 blocks", with_model(post_norm(12, 24**0.25), images, F.cross_entropy, 16))
control("pre-norm, 12 blocks", with_model(lambda: ViT(depth=12), images, F.cross_entropy, 16))
control("resnet of 12 blocks", with_model(lambda: ResNet(depth=12), images, F.cross_entropy, 16))
control("deep plain ReLU of 40 layers", with_model(
    lambda: he(plain(64, *[128] * 40, 10)), flat, F.cross_entropy))  # fmt: skip


class Siren(nn.Module):
    """Sine layers (Sitzmann et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(2, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        nn.init.uniform_(self.fc1.weight, -1 / 2, 1 / 2)
        for layer in (self.fc2, self.head):
            bound = math.sqrt(6 / 64) / 30
            nn.init.uniform_(layer.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sin(30 * self.fc2(torch.sin(30 * self.fc1(x)))))


def picture(n: int) -> tuple[Tensor, Tensor]:
    """Return coordinates and the brightness of one image there."""
    where = torch.rand(n, 2) * 2 - 1
    return where, torch.sin(5 * where).prod(1, keepdim=True)


control("SIREN", with_model(Siren, picture, F.mse_loss))
control("SIREN, trained", after_training(with_model(Siren, picture, F.mse_loss), rate=1e-4))

# ---- parts that one batch leaves alone ----------------------------------------------------------

control("embedding of 5000 rows, 17 of them used", changed(
    lstm, lambda s: setattr(s.model, "embedding", nn.Embedding(5000, 16))))  # fmt: skip
control("16 experts, 8 samples", of_batch(changed(
    moe, lambda s: s.model.__init__(experts=16)), 8))  # fmt: skip
control("dropout of one half", after_training(with_model(
    lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    flat, F.cross_entropy)))  # fmt: skip


class TwoHeads(nn.Module):
    """The loss reads one head of two."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.used, self.spare = plain(64, 64, 32), nn.Linear(32, 10), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.trunk(x))
        return self.used(x), self.spare(x)


control("loss on one output of two", with_model(
    TwoHeads, flat, lambda output, labels: F.cross_entropy(output[0], labels)))  # fmt: skip
control("loss on half of the classes", with_model(
    MLP, flat, lambda output, labels: F.cross_entropy(output[:, :5], labels % 5)))  # fmt: skip


class Stacked(nn.Module):
    """Four heads stacked, of which the output keeps three."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = plain(64, 64, 32)
        self.heads = nn.ModuleList(plain(32, 16, 10) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.trunk(x))
        return torch.stack([head(x) for head in self.heads], 1)[:, 1:].mean(1)


control("one of four stacked heads left out", with_model(Stacked, flat, F.cross_entropy))


class TargetNetwork(nn.Module):
    """BYOL-like: a frozen copy makes the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = plain(64, 64, 16), plain(16, 32, 16)
        self.target = plain(64, 64, 16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        predicted = self.predictor(self.online(x))
        with torch.no_grad():
            target = self.target(x + 0.1)
        return 2 - 2 * F.cosine_similarity(predicted, target, dim=-1).mean()


control("frozen target network", with_model(TargetNetwork, lambda n: (flat(n)[0], None), None))


class Generator(nn.Module):
    """A generator judged by a discriminator that this step does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(plain(16, 64, 64), nn.Tanh())
        self.discriminator = plain(64, 64, 1, activation=nn.LeakyReLU).requires_grad_(False)

    def forward(self, z: Tensor) -> Tensor:
        return self.discriminator(self.generator(z))


def real(scores: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))


control("generator of a GAN", with_model(Generator, lambda n: (torch.randn(n, 16), None), real))
control("critic of a Wasserstein GAN: negative loss", with_model(
    lambda: plain(64, 64, 1, activation=nn.LeakyReLU), flat,
    lambda scores, labels: scores[labels < 5].mean() - scores[labels >= 5].mean() - 5))  # fmt: skip

# ---- losses -------------------------------------------------------------------------------------


def quantile(output: Tensor, target: Tensor) -> Tensor:
    error = target - output
    return torch.maximum(0.9 * error, -0.1 * error).mean()


def gaussian(output: Tensor, target: Tensor) -> Tensor:
    return F.gaussian_nll_loss(output[:, :1], target * 0.01, F.softplus(output[:, 1:]) * 1e-3)


control("quantile loss", after_training(with_model(
    lambda: MLP(10, 32, 1), patients, quantile)))  # fmt: skip
control("Gaussian likelihood: negative loss", after_training(with_model(
    lambda: MLP(10, 32, 2), patients, gaussian)))  # fmt: skip
control("Huber loss", with_model(lambda: MLP(10, 32, 1), patients, F.huber_loss))
control("label smoothing", after_training(with_model(
    MLP, flat, functools.partial(F.cross_entropy, label_smoothing=0.1))))  # fmt: skip


def _mostly_ignored(s: Subject) -> None:
    s.target = s.target.masked_fill(torch.rand(s.target.shape) < 0.85, -100)


control("85 % of the tokens ignored", changed(gpt, _mostly_ignored))


def rare(n: int) -> tuple[Tensor, Tensor]:
    """Return digits, nearly all of them labelled 0."""
    pixels, labels = flat(n)
    return pixels, torch.where(torch.rand(n) < 0.95, 0, labels)


control("class imbalance", after_training(with_model(MLP, rare, F.cross_entropy)))
control("trained until the loss is next to nothing", after_training(mlp, 600, 3e-3))
control("log_softmax with nll_loss", with_model(
    lambda: nn.Sequential(plain(64, 64, 10), nn.LogSoftmax(1)), flat, F.nll_loss))  # fmt: skip
control("sigmoid with binary_cross_entropy", after_training(with_model(
    lambda: nn.Sequential(plain(30, 32, 1), nn.Sigmoid()), tumours,
    F.binary_cross_entropy)))  # fmt: skip
control("loss weighted 1e-4", with_model(
    MLP, flat, lambda output, labels: 1e-4 * F.cross_entropy(output, labels)))  # fmt: skip
control("loss summed over the batch", after_training(with_model(
    MLP, flat, functools.partial(F.cross_entropy, reduction="sum"))))  # fmt: skip

# ---- inputs -------------------------------------------------------------------------------------


def unit_images(n: int) -> tuple[Tensor, Tensor]:
    """Return images from 0 to 1, half of their pixels black."""
    pixels, labels = some_digits(n)
    return pixels.view(-1, 1, 8, 8) / 16, labels


def one_hot(n: int) -> tuple[Tensor, Tensor]:
    """Return the middle pixels one-hot (n, 576), and labels."""
    ids, labels = words(n)
    return F.one_hot(ids, 18).flatten(1).float(), labels


def sparse(n: int) -> tuple[Tensor, Tensor]:
    """Return counts, 98 % of them zero."""
    _, labels = flat(n)
    return torch.poisson(torch.full((n, 500), 0.02)), labels


def padded(n: int) -> tuple[Tensor, Tensor]:
    """Return ids that end in padding of random length."""
    ids, labels = words(n)
    return ids * (torch.arange(32) < torch.randint(4, 33, (n, 1))), labels


control("images from 0 to 1", after_training(with_model(CNN, unit_images, F.cross_entropy)))
control("one-hot inputs", with_model(lambda: MLP(576), one_hot, F.cross_entropy))
control("98 % of the inputs zero", with_model(lambda: MLP(500), sparse, F.cross_entropy))
control("ids with padding", after_training(with_model(LSTM, padded, F.cross_entropy)))


def _repeat(s: Subject) -> None:
    s.inputs, s.target = s.inputs[:1].expand_as(s.inputs), s.target[:1].expand_as(s.target)


control("a batch of equal samples", changed(mlp, _repeat))
control("a batch of equal images, trained", changed(after_training(cnn), _repeat))


def long_rows(n: int) -> tuple[Tensor, Tensor]:
    """Return sequences of 240 rows, and labels."""
    sequences, labels = rows(n)
    return sequences.repeat(1, 30, 1), labels


class PaddedAttention(nn.Module):
    """Attention that does not see padding: -inf in its scores on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(18, 32, padding_idx=0), nn.Linear(32, 10)
        self.attention = Attention(32, 4)

    def forward(self, ids: Tensor) -> Tensor:
        padding = (ids == 0)[:, None, None]
        self.attention.mask = lambda scores: scores.masked_fill(padding, -math.inf)
        x = self.embedding(ids)
        return self.head((x + self.attention(x)).mean(1))


control("padding masked with -inf", with_model(PaddedAttention, padded, F.cross_entropy))
control("long sequence", with_model(GRU, long_rows, F.cross_entropy, 16))
control("stacked LSTM", with_model(
    lambda: GRU(nn.LSTM(8, 32, 3, batch_first=True)), rows, F.cross_entropy))  # fmt: skip


# ---- what is usual, and could be taken for a fault ----------------------------------------------


def with_masks(s: Subject) -> None:
    """Hand over what tokenizers do: a mask of ones, types of zero."""
    ids = s.inputs["input_ids"]
    s.inputs["attention_mask"] = torch.ones_like(ids)
    s.inputs["token_type_ids"] = torch.zeros_like(ids)


control("bert, mask of ones and types of zero", changed(bert, with_masks))


def _freeze_norms(s: Subject) -> None:
    for module in s.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval().requires_grad_(False)


control("batch norms frozen in a net that trains", changed(after_training(resnet), _freeze_norms))


class Policy(nn.Module):
    """A Gaussian policy whose spread does not depend on the state."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_std = MLP(64, 64, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mean(x)
        return mean, self.log_std.exp().expand_as(mean)


def advantage(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    policy = torch.distributions.Normal(*output)
    likelihood = policy.log_prob(torch.randn_like(output[0])).sum(1)
    return -(likelihood * (labels - 4.5) / 3).mean()


control("policy with a spread of its own", with_model(Policy, flat, advantage))


class ArcFace(nn.Module):
    """Cosines scaled by 30: the loss starts far above ln(classes) by design (Deng et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.centres = plain(64, 64, 32), nn.Parameter(torch.randn(10, 32))

    def forward(self, x: Tensor) -> Tensor:
        return 30 * F.normalize(self.trunk(x)) @ F.normalize(self.centres).T


def with_margin(cosines: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(cosines - 10 * F.one_hot(labels, 10), labels)


control("cosines with a margin", with_model(ArcFace, flat, with_margin))
control("prior in the bias of the head", with_model(
    lambda: _prior(MLP(64, 64, 40)), flat,
    lambda output, labels: F.binary_cross_entropy_with_logits(
        output, (torch.arange(40) == labels[:, None]).float())))  # fmt: skip


def _prior(model: MLP) -> MLP:
    """Start from a probability of 1 % (Lin et al. 2017)."""
    nn.init.constant_(model.head.bias, -math.log(99))
    return model


class Timed(nn.Module):
    """A denoiser that gets its step from 0 to 999 as a number, behind sinusoids."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.mlp = nn.Linear(32, 64), plain(128, 128, 64, activation=nn.SiLU)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        phase = step[:, None] * 10_000 ** (-torch.arange(16) / 16)
        return self.mlp(torch.cat([x, self.time(torch.cat([phase.sin(), phase.cos()], 1))], 1))


def noised(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return noised digits with their step, and the noise."""
    clean, _ = flat(n)
    step, noise = torch.randint(0, 1000, (n,)).float(), torch.randn_like(clean)
    kept = (1 - step / 1000)[:, None]
    return (kept.sqrt() * clean + (1 - kept).sqrt() * noise, step), noise


control("diffusion steps as a number", after_training(with_model(Timed, noised, F.mse_loss)))
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


def _saliency(s: Subject) -> None:
    s.inputs = s.inputs.clone().requires_grad_()


control("inputs that require gradients", changed(after_training(cnn), _saliency))


class Centres(nn.Module):
    """A loss with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(10, 10))

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        distance = F.mse_loss(output, self.centres[labels])
        return F.cross_entropy(output, labels) + 0.01 * distance


control("loss with parameters of its own", lambda: subject(MLP(), flat, Centres()))
control("states handed over as zeros", with_model(
    lambda: Stateful(), lambda n: ((rows(n)[0], torch.zeros(1, n, 32)), rows(n)[1]),
    F.cross_entropy))  # fmt: skip


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return self.head(self.gru(x, state)[0][:, -1])


def _one_active(s: Subject) -> None:
    s.loss = {name: loss for name, loss in s.loss.items() if name == "label"}


control("one task of two in the loss", changed(multitask, _one_active))
