"""Models for the suite: a fault for each of its tests, and healthy models that look like faults.

Written before the verdicts that judge them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class SuiteCase:
    """What a suite is given, and the tests that are right to fail; none for a healthy model."""

    make: Callable[[], Any]
    fails: tuple[str, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)


VOCABULARY = 50
_FLOAT16 = {"limits": {"test_headroom": {"planned_dtype": "float16"}}}


def _rows(samples: int = 32, width: int = 12) -> Tensor:
    return torch.randn(samples, width)


def _labels(samples: int = 32, classes: int = 3) -> Tensor:
    return torch.randint(classes, (samples,))


def _classified(model: nn.Module) -> tuple[Any, ...]:
    return model, _rows(), _labels(), F.cross_entropy


def _next_word(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _written(model: nn.Module) -> tuple[Any, ...]:
    ids = torch.randint(VOCABULARY, (8, 17))
    return model, ids[:, :-1], ids[:, 1:], _next_word


class Mlp(nn.Module):
    """Two hidden layers."""

    def __init__(self, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 32), nn.Linear(32, 32)
        self.act1, self.act2 = activation(), activation()
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act2(self.second(self.act1(self.first(x)))))


class Attention(nn.Module):
    """A residual block of self-attention."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.causal = causal

    def forward(self, x: Tensor, padded: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / math.sqrt(x.shape[-1])
        if self.causal:
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        if padded is not None:
            scores = scores.masked_fill(padded[:, None, :], -torch.inf)
        return x + self.out(scores.softmax(-1) @ v)


class Writer(nn.Module):
    """Predicts the next token."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 24)
        self.blocks = nn.ModuleList([Attention(24, causal), Attention(24, causal)])
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Reader(nn.Module):
    """Classifies padded sentences."""

    def __init__(self, pools_padding: bool = False) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(VOCABULARY, 24), Attention(24, causal=False)
        self.head, self.pools_padding = nn.Linear(24, 3), pools_padding

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.block(self.words(ids), attention_mask == 0)
        if self.pools_padding:
            return self.head(x.mean(1))
        real = attention_mask[..., None].to(x.dtype)
        return self.head((x * real).sum(1) / real.sum(1))


def _read(model: nn.Module) -> tuple[Any, ...]:
    lengths = torch.randint(4, 12, (16,))
    lengths[0] = 12
    mask = (torch.arange(12) < lengths[:, None]).long()
    ids = torch.randint(1, VOCABULARY, (16, 12)) * mask
    return model, {"ids": ids, "attention_mask": mask}, _labels(16), F.cross_entropy


# Faults.


def nan_weight() -> Any:
    model = Mlp()
    with torch.no_grad():
        model.second.weight[0, 0] = float("nan")
    return _classified(model)


def dead_units() -> Any:
    model = Mlp()
    nn.init.constant_(model.first.bias, -20.0)
    return _classified(model)


class WrongInEvaluation(Mlp):
    """Divides by a statistic that training never set."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act1(self.first(x))
        hidden = hidden if self.training else hidden / self.scale
        return self.head(self.act2(self.second(hidden)))


def nan_in_evaluation() -> Any:
    return _classified(WrongInEvaluation())


class Detached(Mlp):
    """The first layer is cut off from the loss."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act2(self.second(self.act1(self.first(x)).detach())))


def frozen_by_detach() -> Any:
    return _classified(Detached())


def mlp() -> Any:
    return _classified(Mlp())


def _head_left_out(model: nn.Module) -> Any:
    held = [p for name, p in model.named_parameters() if not name.startswith("head")]
    return torch.optim.AdamW(held, lr=1e-3)


def _climbing(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=1e-2, maximize=True)


class DropsAlways(Mlp):
    """Dropout that evaluation does not switch off."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.act2(self.second(self.act1(self.first(x)))), 0.3))


def dropout_in_evaluation() -> Any:
    return _classified(DropsAlways())


class Centred(Mlp):
    """Subtracts the mean over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act1(self.first(x))
        return self.head(self.act2(self.second(hidden - hidden.mean(0))))


def batch_leak() -> Any:
    return _classified(Centred())


class Deaf(Mlp):
    """Takes a second input and forgets it."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return super().forward(x)


def unused_input() -> Any:
    return Deaf(), (_rows(), _rows(width=4)), _labels(), F.cross_entropy


def padding_leak() -> Any:
    return _read(Reader(pools_padding=True))


def future_leak() -> Any:
    return _written(Writer(causal=False))


class Projected(Mlp):
    """Random features in a plain attribute, which no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.randn(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.features / math.sqrt(12))


def lost_attribute() -> Any:
    return _classified(Projected())


class Tracked(Mlp):
    """Keeps a running mean in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(12)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


def lost_running_mean() -> Any:
    return _classified(Tracked())


class Large(Mlp):
    """Values that float16 does not hold, scaled down again."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act1(self.first(x)) * 1e5
        return self.head(self.act2(self.second(hidden / 1e5)))


class LargeLayer(nn.Module):
    """Multiplies."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def overflow_in_float16() -> Any:
    model = nn.Sequential(
        nn.Linear(12, 32), nn.ReLU(), LargeLayer(1e5), LargeLayer(1e-5), nn.Linear(32, 3)
    )
    return _classified(model)


class FastPath(Mlp):
    """Takes another way where it is compiled, and forgets an activation there."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self.head(self.second(self.act1(self.first(x))))
        return super().forward(x)


def miscompiled() -> Any:
    return _classified(FastPath())


FAULTS = {
    "nan_weight": SuiteCase(nan_weight, ("test_healthy_in_training",)),
    "dead_units": SuiteCase(dead_units, ("test_healthy_in_training",)),
    "nan_in_evaluation": SuiteCase(nan_in_evaluation, ("test_healthy_in_evaluation",)),
    "frozen_by_detach": SuiteCase(frozen_by_detach, ("test_every_parameter_learns",)),
    "optimizer_misses_head": SuiteCase(
        mlp,
        ("test_every_parameter_learns",),
        {"make_optimizer": lambda self, model: _head_left_out(model)},
    ),
    "climbing": SuiteCase(
        mlp, ("test_training_step",), {"make_optimizer": lambda self, model: _climbing(model)}
    ),
    "dropout_in_evaluation": SuiteCase(dropout_in_evaluation, ("test_deterministic",)),
    "batch_leak": SuiteCase(batch_leak, ("test_samples_independent",)),
    "unused_input": SuiteCase(unused_input, ("test_inputs_used",)),
    "padding_leak": SuiteCase(padding_leak, ("test_padding_ignored",)),
    "future_leak": SuiteCase(future_leak, ("test_causal",)),
    "lost_attribute": SuiteCase(lost_attribute, ("test_state_survives_saving",)),
    "lost_running_mean": SuiteCase(lost_running_mean, ("test_state_survives_saving",)),
    "overflow_in_float16": SuiteCase(overflow_in_float16, ("test_headroom",), _FLOAT16),
    "miscompiled": SuiteCase(miscompiled, ("test_compiled_equals_eager",)),
}


# Healthy models that look like faults.


def dropout() -> Any:
    return _classified(
        nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 3))
    )


def cnn() -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip
    return model, torch.randn(16, 3, 12, 12), _labels(16), F.cross_entropy


class Recurrent(nn.Module):
    """Reads the last step of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(12, 24, 2, batch_first=True), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def lstm() -> Any:
    return Recurrent(), torch.randn(16, 9, 12), _labels(16), F.cross_entropy


class Graph(nn.Module):
    """Two rounds of messages between nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 24), nn.Linear(24, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            hidden = layer(x)
            received = torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]])
            x = hidden + received / 3
            x = x.relu() if layer is self.first else x
        return x


def graph() -> Any:
    return Graph(), (_rows(40), torch.randint(40, (2, 120))), _labels(40), F.cross_entropy


class Vae(nn.Module):
    """Draws its latent in both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean = nn.Sequential(nn.Linear(12, 32), nn.SiLU()), nn.Linear(32, 4)
        self.spread = nn.Linear(32, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.SiLU(), nn.Linear(32, 12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, spread = self.mean(hidden), self.spread(hidden)
        return self.decoder(mean + torch.randn_like(mean) * (spread / 2).exp()), mean, spread


def _evidence(output: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    drawn, mean, spread = output
    divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1).mean()
    return F.mse_loss(drawn, x, reduction="none").sum(1).mean() + divergence


def vae() -> Any:
    x = _rows()
    return Vae(), x, x, _evidence


class Experts(nn.Module):
    """Each sample goes to the one expert that its gate chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)) for _ in range(4)
        )
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        best, chosen = weights.max(-1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().flatten()
            if len(mine):
                mixed = mixed.index_add(0, mine, expert(x[mine]) * best[mine, None])
        return self.head(x + mixed)


def experts() -> Any:
    return Experts(), _rows(64), _labels(64), F.cross_entropy


def writer() -> Any:
    return _written(Writer())


def reader() -> Any:
    return _read(Reader())


class Tied(Writer):
    """One matrix for reading and for writing words."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.words.weight, std=0.1)
        self.head = nn.Linear(24, VOCABULARY, bias=False)
        self.head.weight = self.words.weight


def tied() -> Any:
    return _written(Tied())


class ZeroStart(nn.Module):
    """A residual branch and a head that start at zero: at first no input has an effect."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.branch = nn.Linear(12, 24), nn.Linear(24, 24)
        self.head = nn.Linear(24, 3)
        for layer in (self.branch, self.head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        return self.head(hidden + self.branch(hidden))


def zero_start() -> Any:
    return _classified(ZeroStart())


def frozen_backbone() -> Any:
    model = Mlp(nn.GELU)
    model.first.requires_grad_(False)
    return _classified(model)


def autoencoder() -> Any:
    x = _rows(64)
    model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 4), nn.Linear(4, 12))
    return model, x, x, F.mse_loss


class TwoHeads(nn.Module):
    """Returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.SiLU())
        self.kind, self.size = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        return {"kind": self.kind(hidden), "size": self.size(hidden).squeeze(-1)}


def _both(output: dict[str, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    kind, size = target
    return F.cross_entropy(output["kind"], kind) + F.mse_loss(output["size"], size)


def two_heads() -> Any:
    return TwoHeads(), _rows(), (_labels(), torch.randn(32)), _both


def without_loss() -> Any:
    return Mlp(nn.GELU), _rows()


class Seeded(Mlp):
    """A buffer of fixed features, which the state_dict has."""

    def __init__(self) -> None:
        super().__init__(nn.GELU)
        self.register_buffer("features", torch.randn(12, 12) / math.sqrt(12))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.features)


def random_features() -> Any:
    return _classified(Seeded())


class Positions(Writer):
    """Sines for positions in a buffer that is made anew, not saved."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(32)[:, None] / 100 ** (torch.arange(12) / 12)
        table = torch.cat([angles.sin(), angles.cos()], 1)
        self.register_buffer("table", table, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.table[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def positions() -> Any:
    return _written(Positions())


def one_sample() -> Any:
    return Mlp(nn.GELU), _rows(1), _labels(1), F.cross_entropy


def seeded_inside() -> Any:
    torch.manual_seed(7)
    return _classified(Mlp(nn.GELU))


def _model_of_one() -> Callable[[], Any]:
    made: list[Any] = []

    def same() -> Any:
        if not made:
            made.append(_classified(Mlp(nn.GELU)))
        return made[0]

    return same


def lazy() -> Any:
    return _classified(nn.Sequential(nn.LazyLinear(32), nn.SiLU(), nn.LazyLinear(3)))


def half() -> Any:
    model = Mlp(nn.GELU).bfloat16()
    return model, _rows().bfloat16(), _labels(), F.cross_entropy


def in_evaluation_mode() -> Any:
    model, *rest = dropout()
    return (model.eval(), *rest)


class Spectral(nn.Module):
    """Spectral normalisation, whose vectors move in each training forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.utils.parametrizations.spectral_norm(nn.Linear(12, 32))
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.leaky_relu(self.body(x), 0.2))


def spectral() -> Any:
    return _classified(Spectral())


HEALTHY = {
    make.__name__: SuiteCase(make)
    for make in (
        mlp, dropout, cnn, lstm, graph, vae, experts, writer, reader, tied, zero_start,
        frozen_backbone, autoencoder, two_heads, without_loss,
        random_features, positions, one_sample, seeded_inside, lazy, half, in_evaluation_mode,
        spectral,
    )
} | {
    "same_model": SuiteCase(_model_of_one()),
    "mlp_in_float16": SuiteCase(mlp, (), _FLOAT16),
}  # fmt: skip


# Architectures of the transformers library, small, from their configurations.

_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 99,
}


def _padded_ids(samples: int = 8, length: int = 12) -> dict[str, Tensor]:
    lengths = torch.randint(4, length, (samples,))
    lengths[0] = length
    mask = (torch.arange(length) < lengths[:, None]).long()
    return {"input_ids": torch.randint(3, 99, (samples, length)) * mask, "attention_mask": mask}


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(**_SMALL, num_labels=3))
    return model, {**_padded_ids(), "labels": _labels(8)}


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=99, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    )
    ids = torch.randint(99, (8, 16))
    return model, {"input_ids": ids, "labels": ids}


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), {
        **_padded_ids(),
        "labels": torch.randint(3, 99, (8, 9)),
    }


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {key: value for key, value in _SMALL.items() if key != "vocab_size"}
    config = ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=3)
    images = {"pixel_values": torch.randn(8, 3, 16, 16), "labels": _labels(8)}
    return ViTForImageClassification(config), images


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = torch.randint(99, (8, 16))
    return LlamaForCausalLM(LlamaConfig(**_SMALL)), {"input_ids": ids, "labels": ids}


def resnet() -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=3
    )
    images = {"pixel_values": torch.randn(16, 3, 32, 32), "labels": _labels(16)}
    return ResNetForImageClassification(config), images


def wav2vec2() -> Any:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        **{**_SMALL, "vocab_size": 20}, conv_dim=(32, 32), conv_stride=(5, 4), conv_kernel=(10, 8),
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, mask_time_length=2,
        ctc_loss_reduction="mean",
    )  # fmt: skip
    return Wav2Vec2ForCTC(config), {
        "input_values": torch.randn(4, 1000),
        "labels": torch.randint(1, 20, (4, 6)),
    }


def clip() -> Any:
    from transformers import CLIPConfig, CLIPModel

    sizes = {key: value for key, value in _SMALL.items() if key != "vocab_size"}
    config = CLIPConfig(
        text_config={**_SMALL, "max_position_embeddings": 16, "eos_token_id": 2},
        vision_config={**sizes, "image_size": 16, "patch_size": 4},
        projection_dim=16,
    )
    ids = torch.randint(3, 98, (8, 10))
    ids[:, -1] = 98
    return CLIPModel(config), {
        "input_ids": ids,
        "pixel_values": torch.randn(8, 3, 16, 16),
        "return_loss": True,
    }


TRANSFORMERS = {
    make.__name__: SuiteCase(make) for make in (bert, gpt2, t5, vit, llama, resnet, wav2vec2, clip)
}
