"""Models of transformers: their config says how many tokens, pixels and classes there are."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn

from pytest_modelhealth.guessing.drawing import (
    LENGTH,
    SAMPLES,
    Candidate,
    Drawn,
    fixed,
    normal,
    samples,
    whole,
)
from pytest_modelhealth.guessing.kinds.kind import Kind
from pytest_modelhealth.guessing.trying import Trial
from pytest_modelhealth.training.libraries import is_of

_FRAMES = 48
"""How many steps of an audio model's encoder a guessed waveform gives."""


class TransformersModel(Kind):
    """A `PreTrainedModel`."""

    precedence = 25

    def recognises(self, model: nn.Module) -> bool:
        """Whether it is one, with a config."""
        return is_of(model, "transformers") and hasattr(model, "config")

    def candidates(self, model: nn.Module, trial: Trial) -> Iterator[Candidate]:
        """Yield batches with labels, so that the model computes its loss, then without any."""
        made = list(_inputs(model))
        for batch in made:
            for labels in _labels(model, batch):
                how = f"{batch.how}, and labels, by which {type(model).__name__} makes its own loss"
                yield Candidate(kwargs={**batch.inputs, **labels}, how=how)
        for batch in made:
            yield Candidate(kwargs=batch.inputs, how=batch.how)
        yield from _dummies(model)


@dataclass(frozen=True)
class _Batch:
    """Inputs, and how they were read."""

    inputs: Mapping[str, Drawn]
    size: int
    how: str = ""
    ids: Drawn | None = None
    length: int = field(default=LENGTH)


def _inputs(model: Any) -> Iterator[_Batch]:
    config, main = model.config, getattr(model, "main_input_name", "input_ids")
    takes = inspect.signature(model.forward).parameters
    if "input_ids" in takes and "pixel_values" in takes:
        pixels = _pixels(getattr(config, "vision_config", config))
        words = _ids(getattr(config, "text_config", config), pixels.size)
        how = f"input_ids and pixel_values of the sizes in the configs of {type(model).__name__}"
        yield _Batch({**words.inputs, **pixels.inputs}, pixels.size, how, words.ids)
    if "input_features" in takes:
        yield from _features(config, "input_features")
    if main == "input_values" or "input_values" in takes:
        yield _waveform(config)
        yield from _features(config, "input_values")
    if "pixel_values" in takes:
        yield _pixels(config)
    if "input_ids" in takes:
        yield _ids(getattr(config, "text_config", None) or config, SAMPLES)


def _ids(config: Any, size: int) -> _Batch:
    words = int(getattr(config, "vocab_size", 100))
    longest = getattr(config, "max_position_embeddings", None) or LENGTH
    length = min(LENGTH, int(longest))
    low = 1 if getattr(config, "pad_token_id", None) == 0 else 0
    ids = whole(words, (size, length), low)
    return _Batch({"input_ids": ids}, size, "input_ids of config.vocab_size", ids, length)


def _pixels(config: Any) -> _Batch:
    side = getattr(config, "image_size", None) or 64
    height, width = side if isinstance(side, tuple | list) else (side, side)
    shape = (int(getattr(config, "num_channels", 3)), int(height), int(width))
    size = samples(*shape)
    where = "config.num_channels"
    if getattr(config, "image_size", None):
        where += " and config.image_size"
    return _Batch({"pixel_values": normal(size, *shape)}, size, f"pixel_values of {where}")


def _waveform(config: Any) -> _Batch:
    strides = getattr(config, "conv_stride", (5, 2, 2, 2, 2, 2, 2))
    kernels = getattr(config, "conv_kernel", ())
    length = prod(strides) * _FRAMES + sum(kernels)
    size = samples(length)
    how = f"input_values of {length} samples, {_FRAMES} steps of config.conv_stride"
    return _Batch({"input_values": normal(size, length)}, size, how)


def _features(config: Any, name: str) -> Iterator[_Batch]:
    bins = int(getattr(config, "num_mel_bins", 80))
    if hasattr(config, "max_source_positions"):  # two frames a position
        frames = 2 * int(config.max_source_positions)
        yield _Batch({name: normal(8, bins, frames)}, 8, f"{name} of config.num_mel_bins")
    frames = int(getattr(config, "max_length", 100))
    yield _Batch({name: normal(8, frames, bins)}, 8, f"{name} of config.num_mel_bins")


def _labels(model: Any, batch: _Batch) -> Iterator[dict[str, Drawn]]:
    """Yield labels as the head of this model takes them, by the name that its task has."""
    takes = inspect.signature(model.forward).parameters
    if "return_loss" in takes and "labels" not in takes:
        yield {"return_loss": fixed(True)}
    if "start_positions" in takes:
        place = whole(batch.length, (batch.size,))
        yield {"start_positions": place, "end_positions": whole(batch.length, (batch.size,))}
    if "labels" not in takes:
        return
    for drawn in _label_values(model, batch):
        yield {"labels": drawn}
        if "decoder_input_ids" in takes:  # where the config has no token to start with
            yield {"decoder_input_ids": drawn, "labels": drawn}


def _label_values(model: Any, batch: _Batch) -> Iterator[Drawn]:
    name, config = type(model).__name__, model.config
    classes = int(getattr(config, "num_labels", 2))
    of_tokens = (batch.size, batch.length)
    if "TokenClassification" in name:
        yield whole(classes, of_tokens)
    elif "CausalLM" in name or "LMHead" in name:
        if batch.ids is not None:
            yield batch.ids
    elif "MaskedLM" in name or "ConditionalGeneration" in name or "PreTraining" in name:
        words = int(getattr(config, "vocab_size", 100))
        yield whole(words, of_tokens, 1 if getattr(config, "pad_token_id", None) == 0 else 0)
    elif "ForCTC" in name:
        yield whole(int(config.vocab_size), (batch.size, 4), 1)
    elif classes == 1:
        yield normal(batch.size, dtype=torch.float32)
    else:
        yield whole(classes, (batch.size,))


def _dummies(model: Any) -> Iterator[Candidate]:
    """Yield the model's own dummy inputs."""
    given = getattr(model, "dummy_inputs", None)
    if isinstance(given, Mapping):
        named = {str(k): _dummy(model, str(k)) for k in given}
        yield Candidate(kwargs=named, how=f"the dummy_inputs of {type(model).__name__}")


def _dummy(model: Any, name: str) -> Drawn:
    return Drawn(f'model.dummy_inputs["{name}"]', lambda: model.dummy_inputs[name])
