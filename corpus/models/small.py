"""Small models by hand and from transformers, on scikit-learn's data.

What a practitioner would write into a forward, and get wrong there, is an attribute (`between`,
`join`, `pool`, ...): a fault replaces that step and leaves the layers' names as they are.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from corpus.subject import Subject, subject

# ---- data ----------------------------------------------------------------------------------------


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits  # a second, which a list of the cases does not need

    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32), torch.tensor(labels)


@functools.cache
def _table(name: str) -> tuple[Tensor, Tensor]:
    from sklearn import datasets

    features, target = getattr(datasets, f"load_{name}")(return_X_y=True)
    features = torch.tensor(features, dtype=torch.float32)
    target = torch.tensor(target, dtype=torch.float32)
    return (features - features.mean(0)) / features.std(0), target


def some_digits(n: int) -> tuple[Tensor, Tensor]:
    """Return pixels from 0 to 16, (n, 64), and labels."""
    pixels, labels = _digits()
    rows = torch.randperm(len(labels))[:n]
    return pixels[rows], labels[rows]


def flat(n: int) -> tuple[Tensor, Tensor]:
    """Return standardised pixels (n, 64) and labels."""
    pixels, labels = some_digits(n)
    return (pixels - 4.9) / 6.0, labels


def images(n: int) -> tuple[Tensor, Tensor]:
    """Return standardised images (n, 1, 8, 8) and labels."""
    pixels, labels = flat(n)
    return pixels.view(-1, 1, 8, 8), labels


def rows(n: int) -> tuple[Tensor, Tensor]:
    """Return images as sequences (n, 8, 8) of rows, and labels."""
    pixels, labels = flat(n)
    return pixels.view(-1, 8, 8), labels


def words(n: int) -> tuple[Tensor, Tensor]:
    """Return the 32 middle pixels as token ids from 1 to 17, and labels."""
    pixels, labels = some_digits(n)
    return pixels[:, 16:48].long() + 1, labels


def next_words(n: int) -> tuple[Tensor, Tensor]:
    """Return token ids, and the ids that follow each."""
    ids, _ = words(n)
    return ids[:, :-1], ids[:, 1:]


def halves(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the ids of the upper half and of the lower one, and what follows in the lower."""
    ids, _ = words(n)
    return (ids[:, :16], ids[:, 16:-1]), ids[:, 17:]


def itself(n: int) -> tuple[Tensor, Tensor]:
    """Return standardised pixels twice: inputs and target of an autoencoder."""
    pixels, _ = flat(n)
    return pixels, pixels


def noisy(n: int) -> tuple[Tensor, Tensor]:
    """Return noisy images and the mask of their ink."""
    clean, _ = images(n)
    return clean + 0.3 * torch.randn_like(clean), (clean > 0).float()


def views(n: int) -> tuple[tuple[Tensor, Tensor], None]:
    """Return two noisy views of the same digits."""
    pixels, _ = flat(n)
    return tuple(pixels + 0.1 * torch.randn_like(pixels) for _ in range(2)), None


def patients(n: int) -> tuple[Tensor, Tensor]:
    """Return 10 standardised features and the standardised progression, (n, 1)."""
    features, target = _table("diabetes")
    rows = torch.randperm(len(target))[:n]
    return features[rows], ((target - target.mean()) / target.std())[rows, None]


def tumours(n: int) -> tuple[Tensor, Tensor]:
    """Return 30 standardised features and whether each is benign, (n, 1)."""
    features, target = _table("breast_cancer")
    rows = torch.randperm(len(target))[:n]
    return features[rows], target[rows, None]


def ratings(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return ids of users and items, and whether one likes the other."""
    users, items = torch.randint(0, 50, (n,)), torch.randint(0, 40, (n,))
    return (users, items), ((users * 7 + items * 3) % 5 < 2).float()


def citations(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return digits as nodes with the normalised graph of the 5 nearest, and labels."""
    nodes, labels = flat(n)
    nearest = torch.cdist(nodes, nodes).topk(min(6, n), largest=False).indices
    edges = torch.zeros(n, n).scatter_(1, nearest, 1.0)
    edges = torch.maximum(edges, edges.T)
    degree = edges.sum(1).rsqrt()
    return (nodes, degree[:, None] * edges * degree), labels


def both_targets(n: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return standardised pixels, with labels and the share of ink as targets."""
    pixels, labels = flat(n)
    ink = pixels.mean(1, keepdim=True)
    return pixels, (labels, (ink + 0.0) / 0.15)


# ---- plain nets ----------------------------------------------------------------------------------


def same(x: Any) -> Any:
    return x


class MLP(nn.Module):
    """Two hidden layers with a functional activation."""

    def __init__(self, inputs: int = 64, width: int = 64, outputs: int = 10) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, width)
        self.fc2 = nn.Linear(width, width)
        self.head = nn.Linear(width, outputs)
        self.activation = F.relu
        self.prepare = self.between = self.finish = same

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.activation(self.fc1(self.prepare(x))))
        return self.finish(self.head(self.activation(self.fc2(x))))


def mlp() -> Subject:
    return subject(MLP(), flat, F.cross_entropy)


def plain(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers of these sizes, with an activation between two."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def sequential() -> Subject:
    return subject(plain(64, 64, 64, 10), flat, F.cross_entropy)


def he(model: nn.Module) -> nn.Module:
    """Initialise for ReLU, after He et al. 2015."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return model


def deep() -> Subject:
    """Twenty layers of ReLU."""
    return subject(he(plain(64, *[64] * 20, 10)), flat, F.cross_entropy)


def regression() -> Subject:
    return subject(MLP(10, 32, 1), patients, F.mse_loss)


def binary() -> Subject:
    return subject(MLP(30, 32, 1), tumours, F.binary_cross_entropy_with_logits)


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu1 = (
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.conv2, self.bn2, self.relu2 = (
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(32, 10)
        self.prepare = self.between = self.finish = same
        self.pool = lambda x: x.mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.relu1(self.bn1(self.conv1(self.prepare(x)))))
        x = self.relu2(self.bn2(self.conv2(F.max_pool2d(x, 2))))
        return self.finish(self.head(self.dropout(self.pool(x))))


def cnn() -> Subject:
    return subject(CNN(), images, F.cross_entropy)


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.conv2, self.bn2 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.relu = nn.ReLU(inplace=True)
        self.join = torch.add

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return F.relu(self.join(x, branch))


class ResNet(nn.Module):
    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)
        self.between = self.finish = same

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(F.relu(self.bn(self.stem(x))))
        for block in self.blocks:
            x = block(x)
        return self.finish(self.head(x.mean((2, 3))))


def resnet() -> Subject:
    return subject(ResNet(), images, F.cross_entropy, batch=32)


# ---- recurrent nets ------------------------------------------------------------------------------


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(18, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, 10)
        self.between = self.finish = same
        self.pool = lambda x: x[:, -1]

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.between(self.embedding(ids)))
        return self.finish(self.head(self.pool(states)))


def lstm() -> Subject:
    return subject(LSTM(), words, F.cross_entropy)


class GRU(nn.Module):
    """Attention over the states of a recurrent layer."""

    def __init__(self, recurrent: nn.Module | None = None) -> None:
        super().__init__()
        self.gru = recurrent or nn.GRU(8, 32, batch_first=True)
        self.score, self.head = nn.Linear(32, 1), nn.Linear(32, 10)
        self.dim, self.between = 1, same

    def forward(self, x: Tensor) -> Tensor:
        states = self.between(self.gru(x)[0])
        weights = torch.softmax(self.score(states), dim=self.dim)
        return self.head((weights * states).sum(1))


def gru() -> Subject:
    return subject(GRU(), rows, F.cross_entropy)


# ---- transformers --------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention of several heads, written out."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.heads, self.causal, self.scale = heads, causal, (width // heads) ** -0.5
        self.mask = lambda scores: scores

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.q(x), self.k(memory), self.v(memory))
        )
        scores = self.mask(q @ k.transpose(-2, -1) * self.scale)
        if self.causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer block with the norm before each branch."""

    def __init__(self, width: int = 32, heads: int = 4, causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.join = torch.add

    def forward(self, x: Tensor) -> Tensor:
        x = self.join(x, self.attention(self.norm1(x)))
        return self.join(x, self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3, heads: int = 4, tied: bool = True) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(18, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 18, bias=False)
        for embedding in (self.embedding, self.position):
            nn.init.normal_(embedding.weight, std=0.02)
        if tied:
            self.head.weight = self.embedding.weight
        self.between = self.finish = same

    def forward(self, ids: Tensor) -> Tensor:
        x = self.between(self.embedding(ids) + self.position(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = block(x)
        return self.finish(self.head(self.norm(x)))


def language_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), ids.flatten())


def gpt() -> Subject:
    return subject(GPT(), next_words, language_loss, batch=16)


class ViT(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        self.place = torch.add
        self.between, self.pool = same, lambda x: x[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = self.place(torch.cat([self.token.expand(len(x), -1, -1), x], 1), self.position)
        return self.head(self.pool(self.norm(self.blocks(self.between(x)))))


def vit() -> Subject:
    return subject(ViT(), images, F.cross_entropy, batch=32)


class Seq2Seq(nn.Module):
    """An encoder and a decoder that attends to it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(18, width)
        self.encoder = nn.Sequential(Block(width), Block(width), nn.LayerNorm(width))
        self.decoder, self.norm = Block(width, causal=True), nn.LayerNorm(width)
        self.cross, self.head = Attention(width, 4), nn.Linear(width, 18)
        self.remember = lambda memory, x: memory

    def forward(self, source: Tensor, ids: Tensor) -> Tensor:
        memory = self.encoder(self.embedding(source))
        x = self.decoder(self.embedding(ids))
        x = x + self.cross(self.norm(x), self.remember(memory, x))
        return self.head(x)


def seq2seq() -> Subject:
    return subject(Seq2Seq(), halves, language_loss, batch=16)


def bert() -> Subject:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 18, "hidden_size": 32, "intermediate_size": 64, "num_labels": 10}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
    model = BertForSequenceClassification(BertConfig(**sizes, **heads))

    def draw(n: int) -> tuple[dict[str, Tensor], None]:
        ids, labels = words(n)
        return {"input_ids": ids, "labels": labels}, None

    return subject(model, draw, None, batch=32)


# ---- nets that make something --------------------------------------------------------------------


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = plain(64, 32, 8), plain(8, 32, 64)
        self.between = self.finish = same

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.decoder(self.between(self.encoder(x))))


def autoencoder() -> Subject:
    return subject(Autoencoder(), itself, F.mse_loss)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = plain(64, 32, 32), plain(8, 32, 64)
        self.mean, self.log_variance = nn.Linear(32, 8), nn.Linear(32, 8)
        self.sample = lambda mean, log_variance: (
            mean + (log_variance / 2).exp() * torch.randn_like(mean)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.encoder(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        return self.decoder(self.sample(mean, log_variance)), mean, log_variance


def evidence_bound(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    made, mean, log_variance = output
    divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()
    return F.mse_loss(made, target) + 0.1 * divergence


def vae() -> Subject:
    return subject(VAE(), itself, evidence_bound)


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = self._double(1, width), self._double(width, 2 * width)
        self.middle = self._double(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.join2 = self._double(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join1, self.out = self._double(2 * width, width), nn.Conv2d(width, 1, 1)
        self.between = self.finish = same

    @staticmethod
    def _double(inputs: int, outputs: int) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        x = self.between(self.middle(F.max_pool2d(b, 2)))
        x = self.join2(torch.cat([self.up2(x), b], 1))
        return self.finish(self.out(self.join1(torch.cat([self.up1(x), a], 1))))


def unet() -> Subject:
    return subject(UNet(), noisy, F.binary_cross_entropy_with_logits, batch=32)


# ---- nets with several parts ---------------------------------------------------------------------


class MoE(nn.Module):
    """Each sample goes through the expert that the router prefers."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.stem, self.router = nn.Linear(64, 32), nn.Linear(32, experts)
        self.experts = nn.ModuleList(plain(32, 64, 32) for _ in range(experts))
        self.head = nn.Linear(32, 10)
        self.between = same
        self.gate = lambda weight: weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(F.relu(self.stem(x)))
        weight, chosen = self.router(x).softmax(-1).max(-1)
        made = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            if mine.any():
                made[mine] = expert(x[mine])
        return self.head(x + self.gate(weight)[:, None] * made)


def moe() -> Subject:
    return subject(MoE(), flat, F.cross_entropy)


class Recommender(nn.Module):
    """The dot product of two embeddings beside a small net on both."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(50, 16), nn.Embedding(40, 16)
        self.mlp = plain(32, 32, 1)
        for embedding in (self.user, self.item):
            nn.init.normal_(embedding.weight, std=0.1)
        self.between = self.finish = same

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        u, i = self.between(self.user(users)), self.item(items)
        return self.finish((u * i).sum(1) + self.mlp(torch.cat([u, i], 1)).squeeze(1))


def recommender() -> Subject:
    return subject(Recommender(), ratings, F.binary_cross_entropy_with_logits)


class GCN(nn.Module):
    """Graph convolutions: mix the neighbours, then a linear layer."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        sizes = [64, *[32] * (depth - 1)]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.head = nn.Linear(sizes[-1], 10)
        self.between = same

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            nodes = self.between(F.relu(layer(edges @ nodes)))
        return self.head(edges @ nodes)


def graph() -> Subject:
    return subject(GCN(), citations, F.cross_entropy)


class Multitask(nn.Module):
    """A trunk that two heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.label, self.ink = nn.Linear(32, 10), nn.Linear(32, 1)
        self.to_label = self.to_ink = same

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.label(self.to_label(x)), self.ink(self.to_ink(x))


def label_loss(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(output[0], target[0])


def ink_loss(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(output[1], target[1])


def multitask() -> Subject:
    return subject(Multitask(), both_targets, {"label": label_loss, "ink": ink_loss})


class Siamese(nn.Module):
    """Two views through one encoder, compared with all of the batch."""

    def __init__(self, temperature: float = 0.2) -> None:
        super().__init__()
        self.encoder, self.temperature = plain(64, 64, 16), temperature
        self.other = lambda encoder, x: encoder(x)
        self.normalize = lambda x: F.normalize(x, dim=-1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self.normalize(self.encoder(a)), self.normalize(self.other(self.encoder, b))
        return a @ b.T / self.temperature


def matching(scores: Tensor) -> Tensor:
    return F.cross_entropy(scores, torch.arange(len(scores)))


def contrastive() -> Subject:
    return subject(Siamese(), views, matching)


class Masked(nn.Module):
    """A linear layer whose first outputs, and first inputs, are multiplied by zero."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 24)
        self.rows, self.columns = rows, columns
        with torch.no_grad():
            self.fc.weight[:rows] = 0.0
            self.fc.weight[:, :columns] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x * (torch.arange(16) >= self.columns))
        return x * (torch.arange(24) >= self.rows)


class Checkpointed(nn.Sequential):
    """Two blocks, whose activations are computed again in the backward pass, if it is on."""

    is_on = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False) if self.is_on else block(x)
        return x
