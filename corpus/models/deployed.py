"""Small trained models as they are before they are deployed: in evaluation mode, and scriptable."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.models.small import flat, images, language_loss, next_words, words
from corpus.subject import Subject, subject, trained


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return F.relu(x + branch)


class Residual(nn.Module):
    """Digits by convolutions, batch norms and residual blocks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*(ResidualBlock(width) for _ in range(3)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.stem(x))))
        return self.head(x.mean((2, 3)))


class Perceptron(nn.Module):
    """Digits by linear layers, layer norms, a gate, and activations that are functions."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.fc1, self.norm1 = nn.Linear(64, width), nn.LayerNorm(width)
        self.fc2, self.norm2 = nn.Linear(width, width), nn.LayerNorm(width)
        self.gate, self.fc3 = nn.Linear(width, width), nn.Linear(width, width)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(self.fc1(x)))
        x = x + F.silu(self.norm2(self.fc2(x)))
        x = F.leaky_relu(self.fc3(x) * F.softmax(self.gate(x), -1) * 8, 0.1)
        return self.head(self.dropout(x))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.fc = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.act, self.proj = nn.GELU(), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.proj(self.act(self.fc(self.norm2(x))))


class GPT(nn.Module):
    """A language model of the pixels of digits."""

    def __init__(self, width: int = 32, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(18, width), nn.Embedding(32, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 18)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place(torch.ones_like(ids).cumsum(1) - 1)
        return self.head(self.norm(self.blocks(x)))


def _residual() -> Subject:
    return subject(Residual(), images, F.cross_entropy, batch=32)


def _perceptron() -> Subject:
    return subject(Perceptron(), flat, F.cross_entropy, batch=32)


def _gpt() -> Subject:
    return subject(GPT(), next_words, language_loss, batch=16)


def sentences(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return token ids by the name of the model's input, and labels."""
    ids, labels = words(n)
    return {"input_ids": ids}, labels


def _bert() -> Subject:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 18, "hidden_size": 32, "intermediate_size": 64, "num_labels": 10}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
    model = BertForSequenceClassification(BertConfig(**sizes, **heads))
    return subject(model, sentences, lambda out, y: F.cross_entropy(out.logits, y), batch=16)


def _llama() -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 18, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))
    return subject(
        model,
        lambda n: ({"input_ids": (ids := words(n)[0])}, ids),
        lambda out, ids: language_loss(out.logits[:, :-1], ids[:, 1:]),
        batch=16,
    )


MAKERS = {
    "residual": _residual,
    "perceptron": _perceptron,
    "gpt": _gpt,
    "bert": _bert,
    "llama": _llama,
}
STEPS, EARLIER = 60, 25


def checkpoint(name: str, steps: int = STEPS) -> Subject:
    """Return a model of `MAKERS` after so many steps of training, in evaluation mode."""
    made = trained(MAKERS[name], steps)
    made.model.eval()
    return made


def residual() -> Subject:
    return checkpoint("residual")


def perceptron() -> Subject:
    return checkpoint("perceptron")


def gpt() -> Subject:
    return checkpoint("gpt")


def bert() -> Subject:
    return checkpoint("bert")


def llama() -> Subject:
    return checkpoint("llama")


def batch_of(name: str) -> Any:
    """Return another batch of the size that a model of `MAKERS` has."""
    draw, n = {
        "residual": (images, 32),
        "perceptron": (flat, 32),
        "gpt": (next_words, 16),
        "bert": (sentences, 16),
        "llama": (sentences, 16),
    }[name]
    return draw(n)[0]
