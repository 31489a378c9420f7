"""What the layers of torch take: how wide, of how many dimensions, numbers or indices."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from pytest_modelhealth.guessing.drawing import LENGTH

SIDE, CLIP, WAVE = 32, 8, 1024
"""The sides of an image and of a clip, and the length of a waveform, where nothing says others."""

_CONVOLUTIONS: dict[type[nn.Module], int] = {
    nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3,
    nn.ConvTranspose1d: 1, nn.ConvTranspose2d: 2, nn.ConvTranspose3d: 3,
}  # fmt: skip
_NORMS: dict[type[nn.Module], int] = {nn.BatchNorm2d: 2, nn.BatchNorm3d: 3, nn.InstanceNorm2d: 2}
_SPACE = {1: (WAVE,), 2: (SIDE, SIDE), 3: (CLIP, SIDE, SIDE)}


@dataclass(frozen=True)
class Expected:
    """What a layer takes.

    Args:
        width: size of the dimension of features; for indices, of the dictionary.
        axis: which dimension that is: 1, or -1.
        space: the sizes of further dimensions; of a sequence, its length.
        is_index: whether it takes indices.
        why: for people: ``Linear.in_features``.
        least: the least index.
    """

    width: int
    axis: int = -1
    space: tuple[int, ...] = ()
    is_index: bool = False
    why: str = ""
    least: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        if self.is_index:
            return self.space
        return (self.width, *self.space) if self.axis == 1 else (*self.space, self.width)


def expected(layer: nn.Module) -> Expected | None:
    """Return what a layer takes; ``None`` where it takes anything or is not known."""
    kind = type(layer).__name__
    for table, attribute in ((_CONVOLUTIONS, "in_channels"), (_NORMS, "num_features")):
        for known, dims in table.items():
            if isinstance(layer, known):
                width = int(getattr(layer, attribute))
                return (
                    Expected(width, 1, _SPACE[dims], why=f"{kind}.{attribute}") if width else None
                )
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        low = 1 if layer.padding_idx == 0 else 0
        return Expected(
            layer.num_embeddings, -1, (LENGTH,), True, f"{kind}.num_embeddings", least=low
        )
    return _of_features(layer, kind)


def _of_features(layer: nn.Module, kind: str) -> Expected | None:
    if isinstance(layer, nn.RNNBase):
        return Expected(layer.input_size, -1, (LENGTH,), why=f"{kind}.input_size")
    if isinstance(layer, nn.RNNCellBase):
        return Expected(layer.input_size, why=f"{kind}.input_size")
    if isinstance(layer, nn.MultiheadAttention):
        return Expected(layer.embed_dim, -1, (LENGTH,), why=f"{kind}.embed_dim")
    if isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        width = layer.self_attn.embed_dim
        return Expected(width, -1, (LENGTH,), why=f"{kind}.d_model")
    if isinstance(layer, nn.LazyLinear | nn.LazyConv2d):
        return None
    for attribute in ("in_features", "num_features", "in_channels"):
        width = getattr(layer, attribute, None)
        if type(width) is int and width > 0:
            return Expected(width, why=f"{kind}.{attribute}")
    shape = getattr(layer, "normalized_shape", None)
    if isinstance(shape, tuple) and shape:
        return Expected(shape[-1], -1, shape[:-1], why=f"{kind}.normalized_shape")
    return None
