"""Batches with padding, pairs, graphs and series, in the conventions that models take them in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from corpus.models.parts import clouds
from corpus.models.small import flat, rows, words

LONGEST = 16


def some_lengths(n: int, longest: int = LONGEST, shortest: int = 5) -> Tensor:
    """Return lengths, of which the first is the longest."""
    lengths = torch.randint(shortest, longest, (n,))
    lengths[0] = longest
    return lengths


def ragged(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids (n, 16) with zeros behind each text, their lengths, and labels."""
    ids, labels = words(n)
    lengths = some_lengths(n)
    return ids[:, :LONGEST] * real(lengths), lengths, labels


def real(lengths: Tensor, longest: int = LONGEST) -> Tensor:
    """Return 1 where a text is, 0 where padding is, (n, 16)."""
    return (torch.arange(longest) < lengths[:, None]).long()


def texts(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return padded ids with their mask, and labels."""
    ids, lengths, labels = ragged(n)
    return {"input_ids": ids, "attention_mask": real(lengths)}, labels


def left_texts(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return ids that are padded in front with their mask, and labels."""
    given, labels = texts(n)
    return {name: value.flip(1) for name, value in given.items()}, labels


def measured_texts(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return padded ids with their lengths, the longest first, and labels."""
    ids, lengths, labels = ragged(n)
    order = lengths.argsort(descending=True)
    return (ids[order], lengths[order]), labels[order]


def clips(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return frames (n, 8, 8) with zeros behind each clip, their number, and labels."""
    frames, labels = rows(n)
    lengths = some_lengths(n, 8, 3)
    return {"frames": frames * real(lengths, 8)[..., None], "lengths": lengths}, labels


def later_words(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return padded ids with their mask, and the ids that follow, -100 where there is none."""
    ids, lengths, _ = ragged(n)
    mask = real(lengths)
    return {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1]}, ids[:, 1:].masked_fill(
        mask[:, 1:] == 0, -100
    )


def with_labels(n: int) -> tuple[dict[str, Tensor], None]:
    """Return ids, and the same ones as labels, which the model shifts."""
    ids, _ = words(n)
    return {"input_ids": ids[:, :LONGEST], "labels": ids[:, :LONGEST]}, None


def series(n: int) -> tuple[Tensor, Tensor]:
    """Return 24 steps of noisy sines, (n, 24, 1), and the step that follows each."""
    phase, rate = 6.3 * torch.rand(n, 1), 0.2 + 0.4 * torch.rand(n, 1)
    made = torch.sin(phase + rate * torch.arange(25)) + 0.1 * torch.randn(n, 25)
    return made[:, :-1, None], made[:, 1:, None]


def pairs(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return two batches of digits, and whether each two show the same digit."""
    (a, first), (b, second) = flat(n), flat(n)
    b[::2], second[::2] = a[::2] + 0.1 * torch.randn_like(a[::2]), first[::2]
    return (a, b), (first == second).float()


def meshes(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return clouds (n, 24, 3), edges (n, 2, 96) counted within each, and which axis is longest."""
    points, labels = clouds(n)
    near = torch.cdist(points, points).topk(5, largest=False).indices[..., 1:].flatten(1)
    sink = torch.arange(24).repeat_interleave(4).expand_as(near)
    return {"points": points, "edges": torch.stack([near, sink], 1)}, labels


def ignoring(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy over the places that have a target."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)
