"""Models to guess the inputs of, written before anything that guesses.

`MODELS` has a function for each, by its name; `TAUGHT` those of transformers, which compute a loss
of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        return self.net(x)


class HeadFirst(nn.Module):
    """Registers its layers in another order than it calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(24, 5)
        self.body = nn.Linear(9, 24)

    def forward(self, features):
        return self.head(torch.tanh(self.body(features)))


class LeNet(nn.Module):
    """Of a width that fits one size of image only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2 = nn.Linear(16 * 4 * 4, 84), nn.Linear(84, 10)

    def forward(self, img):
        x = F.max_pool2d(F.relu(self.conv1(img)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class DeepConv(nn.Module):
    """Too deep for small images."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 8, 8, 16, 16, 16, 16]
        blocks = [
            nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)
            )
            for a, b in pairwise(widths)
        ]
        self.features, self.head = nn.Sequential(*blocks), nn.Linear(16 * 2 * 2, 7)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = (
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.Conv2d(8, 8, 3, 1, 1),
            nn.BatchNorm2d(8),
        )
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(x + self.b(self.a(x)))
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.mid = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(9, 2, 1)

    def forward(self, image):
        return self.out(torch.cat([image, self.up(self.mid(F.relu(self.down(image))))], 1))


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(2, 8, 9, 4), nn.GELU(), nn.Conv1d(8, 16, 9, 4))
        self.head = nn.Linear(16, 6)

    def forward(self, waveform):
        return self.head(self.conv(waveform).mean(-1))


class MonoWaves(nn.Module):
    """Adds the channel itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 8, 9, 4), nn.Linear(8, 6)

    def forward(self, audio):
        return self.head(self.conv(audio.unsqueeze(1)).mean(-1))


class Video(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv3d(3, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, clip):
        return self.head(self.conv(clip).mean((2, 3, 4)))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 24, batch_first=True, bidirectional=True)
        self.out = nn.Linear(48, 9)

    def forward(self, tokens):
        return self.out(self.lstm(self.embed(tokens))[0])


class Series(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(7, 20, batch_first=True), nn.Linear(20, 1)

    def forward(self, x, h0=None):
        return self.head(self.gru(x, h0)[0][:, -1]).squeeze(-1)


class Packed(nn.Module):
    """Takes lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.out = (
            nn.Embedding(30, 8),
            nn.GRU(8, 8, batch_first=True),
            nn.Linear(8, 3),
        )

    def forward(self, ids, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(ids), lengths, batch_first=True, enforce_sorted=False
        )
        return self.out(self.rnn(packed)[1][-1])


class TinyGpt(nn.Module):
    """Learned positions bound its length."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(65, 32), nn.Embedding(8, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.head = nn.Linear(32, 65, bias=False)

    def forward(self, idx):
        length = idx.shape[1]
        x = self.wte(idx) + self.wpe(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.head(self.block(x, src_mask=mask, is_causal=True))


class NanoGpt(nn.Module):
    """Returns logits and, with targets, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(40, 16), nn.Linear(16, 40)

    def forward(self, idx, targets=None):
        logits = self.out(self.emb(idx))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.goal = nn.Embedding(31, 16), nn.Embedding(37, 16)
        self.net = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
        self.out = nn.Linear(16, 37)

    def forward(self, src, tgt):
        return self.out(self.net(self.source(src), self.goal(tgt)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(24, 3, batch_first=True)

    def forward(self, query, key, value):
        return self.attend(query, key, value)[0]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1).float()
        return self.out((self.embed(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1))


class Tables(nn.Module):
    """Numbers and categories, each with its own dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.embeds = nn.ModuleList([nn.Embedding(n, 4) for n in (3, 11, 7)])
        self.net = nn.Sequential(nn.Linear(12 + 5, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, categories, numbers):
        parts = [embed(categories[:, i]) for i, embed in enumerate(self.embeds)]
        return self.net(torch.cat([*parts, numbers], 1))


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(100, 8), nn.Embedding(40, 8)

    def forward(self, user_id, item_id):
        return (self.users(user_id) * self.items(item_id)).sum(-1)


class Multimodal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.see, self.read = nn.Conv2d(3, 8, 3, 2), nn.EmbeddingBag(60, 8)
        self.join = nn.Linear(16 + 4, 3)

    def forward(self, image, text, meta):
        return self.join(torch.cat([self.see(image).mean((2, 3)), self.read(text), meta], 1))


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(36, 12), nn.GELU(), nn.Linear(12, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 12), nn.GELU(), nn.Linear(12, 36))

    def forward(self, x):
        return self.decoder(self.encoder(x))


class Vae(nn.Module):
    """Returns three tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.mu, self.logvar = nn.Linear(784, 40), nn.Linear(40, 5), nn.Linear(40, 5)
        self.fc2, self.fc3 = nn.Linear(5, 40), nn.Linear(40, 784)

    def forward(self, x):
        h = F.relu(self.fc1(x.view(-1, 784)))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * (logvar / 2).exp()
        return torch.sigmoid(self.fc3(F.relu(self.fc2(z)))), mu, logvar


class Gcn(nn.Module):
    """Messages by a list of edges, without a library."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(11, 16), nn.Linear(16, 4)

    def forward(self, x, edge_index):
        source, goal = edge_index
        for layer in (self.first, self.second):
            x = torch.zeros_like(x).index_add(0, goal, x[source]) + x
            x = layer(x)
        return x


class DenseGcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 4)

    def forward(self, x, adj):
        return adj @ self.lin(x)


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.inp = nn.Linear(1, 16), nn.Conv2d(3, 16, 3, padding=1)
        self.out = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x, t):
        time = self.time(t.float().unsqueeze(-1) / 1000)
        return self.out(F.silu(self.inp(x) + time[:, :, None, None]))


class Bare(nn.Module):
    """No layer at all: parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(10, 3) / 3)
        self.b = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return x @ self.w + self.b


@dataclass
class NetConfig:
    in_dim: int = 14
    hidden: int = 20
    num_classes: int = 4


class Configured(nn.Module):
    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.config = config
        self.net = nn.Sequential(
            nn.LayerNorm(config.in_dim),
            nn.Linear(config.in_dim, config.hidden),
            nn.GELU(),
            nn.Linear(config.hidden, config.num_classes),
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.net(x)}


class PatchVit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.cls = nn.Conv2d(3, 24, 8, 8), nn.Parameter(torch.zeros(1, 1, 24))
        self.pos = nn.Parameter(torch.randn(1, 37, 24) / 9)
        self.body = nn.TransformerEncoderLayer(24, 3, 48, 0.0, batch_first=True)
        self.head = nn.Linear(24, 10)

    def forward(self, pixels):
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.body(x)[:, 0])


class Mixer(nn.Module):
    """Layers across time fix the length."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels = nn.Linear(12, 12), nn.Linear(20, 20)

    def forward(self, x):
        x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2)
        return x + self.channels(x)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(8, 32), nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(obs))
        return self.actor(h), self.critic(h).squeeze(-1)


class DuelingCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8 + 3, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, state, action):
        return self.net(torch.cat([state, action], -1))


class Keyword(nn.Module):
    """Scalars and flags without defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(15, 3)

    def forward(self, x: Tensor, scale: float, training_step: int, *, normalise: bool) -> Tensor:
        x = self.net(x * scale)
        return x / x.norm(dim=-1, keepdim=True) if normalise else x


class Batched(nn.Module):
    """Takes a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net(batch["features"])


class Listed(nn.Module):
    """Takes several tensors in one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 2), nn.Linear(5, 2)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        first, second = inputs
        return self.a(first) + self.b(second)


class Stars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 2)

    def forward(self, *args, **kwargs):
        return self.net(args[0])


class Fourier(nn.Module):
    """Coordinates; the first layer is wider than the input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bands", torch.randn(2, 16))
        self.net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, coords):
        angles = 2 * math.pi * coords @ self.bands
        return self.net(torch.cat([angles.sin(), angles.cos()], -1))


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 26 * 26, 8))

    def forward(self, x1, x2):
        return F.cosine_similarity(self.net(x1), self.net(x2))


class WithExample(nn.Module):
    """Says what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.randn(16, 2, 9)
        self.net = nn.Linear(18, 3)

    def forward(self, x):
        return self.net(x.flatten(1))


class TimmLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.default_cfg = {"input_size": (3, 48, 48), "num_classes": 6}
        self.stem, self.head = nn.Conv2d(3, 8, 16, 16), nn.Linear(8 * 9, 6)

    def forward(self, x):
        return self.head(self.stem(x).flatten(1))


def lightning() -> nn.Module:
    from lightning.pytorch import LightningModule

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(10, 3)

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(self(x), y)

        def train_dataloader(self):
            data = torch.utils.data.TensorDataset(torch.randn(64, 10), torch.randint(3, (64,)))
            return torch.utils.data.DataLoader(data, batch_size=16)

    return Lit()


def geometric() -> nn.Module:
    from torch_geometric.nn import GCNConv

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = GCNConv(9, 16), GCNConv(16, 3)

        def forward(self, x, edge_index):
            return self.b(self.a(x, edge_index).relu(), edge_index)

    return Net()


class Spectrogram(nn.Module):
    """The height of the image decides the width of the recurrence."""

    def __init__(self, mels: int = 40) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.rnn, self.out = nn.LSTM(8 * mels, 32, batch_first=True), nn.Linear(32, 6)

    def forward(self, spec):
        x = F.relu(self.conv(spec.unsqueeze(1)))
        over_time, _ = self.rnn(x.permute(0, 3, 1, 2).flatten(2))
        return self.out(over_time[:, -1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        Mlp, HeadFirst, LeNet, DeepConv, Residual, UNet, Waves, MonoWaves, Video, Tagger, Series,
        Packed, TinyGpt, NanoGpt, Translator, Attention, Masked, Tables, TwoTowers, Multimodal,
        Autoencoder, Vae, Gcn, DenseGcn, Diffusion, Bare, PatchVit, Mixer, Policy, DuelingCritic,
        Keyword, Batched, Listed, Stars, Fourier, Siamese, WithExample, TimmLike,
        Spectrogram,
    )
}  # fmt: skip
MODELS |= {
    "Bilinear": lambda: nn.Bilinear(8, 6, 5),
    "Configured": lambda: Configured(NetConfig()),
    "lightning": lightning,
    "geometric": geometric,
    "Lazy": lambda: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 2)),
    "Double": lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double(),
    "Encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2
    ),
}

_SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip
_CONV = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3)}


def _taught(kind: str, config: str, **changed: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made = getattr(transformers, config)(**changed)
        return getattr(transformers, kind)(made)

    return make


TAUGHT: dict[str, Callable[[], nn.Module]] = {
    name: _taught(name, config, **changed)
    for name, config, changed in (
        ("BertForSequenceClassification", "BertConfig", {**_SMALL, "vocab_size": 99}),
        ("BertForMaskedLM", "BertConfig", {**_SMALL, "vocab_size": 99}),
        ("BertForTokenClassification", "BertConfig", {**_SMALL, "vocab_size": 99}),
        ("BertForQuestionAnswering", "BertConfig", {**_SMALL, "vocab_size": 99}),
        ("GPT2LMHeadModel", "GPT2Config",
         {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99}),
        ("LlamaForCausalLM", "LlamaConfig", {**_SMALL, "vocab_size": 99}),
        ("T5ForConditionalGeneration", "T5Config",
         {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 99}),
        ("ViTForImageClassification", "ViTConfig", {**_SMALL, "image_size": 32, "patch_size": 8}),
        ("ResNetForImageClassification", "ResNetConfig",
         {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}),
        ("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config",
         {**_SMALL, **_CONV, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}),
        ("CLIPModel", "CLIPConfig",
         {"text_config": {**_SMALL, "vocab_size": 99},
          "vision_config": {**_SMALL, "image_size": 32, "patch_size": 8}, "projection_dim": 16}),
    )
}  # fmt: skip
MODELS["BertModel"] = _taught("BertModel", "BertConfig", **_SMALL, vocab_size=99)
