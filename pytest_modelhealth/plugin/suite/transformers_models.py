"""Models of transformers: a small one of a class, and a batch of the sizes in its config.

This covers what reads tokens or images, with the labels of the usual heads; sound, video, and
heads with targets of their own shape are left to the user.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.step.bare import in_mode
from pytest_modelhealth.capture.step.batch import Inputs

_SIZES: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embed_dim": 64,
    "embedding_size": 64, "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2,
    "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "head_dim": 16, "d_kv": 16,
    "intermediate_size": 128, "d_ff": 128, "hidden_dim": 128, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "projection_dim": 32, "image_size": 32, "patch_size": 8,
}  # fmt: skip
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
_FIRST_WORD = 3
_MOST_PARAMETERS = 100_000_000
_LENGTH, _SAMPLES, _FEW_SAMPLES, _LARGE_IMAGE = 12, 32, 8, 20_000


def is_pretrained(kind: object) -> bool:
    """Whether it is a class of models of transformers, which is not imported for the answer."""
    bases = kind.__mro__ if isinstance(kind, type) else ()
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.")
        for base in bases
    )


def small_sizes(config: Any) -> dict[str, Any]:
    """Return the sizes of a default config that are larger than a test needs, made smaller."""
    aliases = getattr(config, "attribute_map", None) or {}
    sizes: dict[str, Any] = {}
    for name, size in _SIZES.items():
        own = None if name in aliases else getattr(config, name, None)
        if type(own) is int and own > size:
            sizes[name] = size
    words = sizes.get("vocab_size", 0)
    needed = ("pad_token_id", "decoder_start_token_id") if _is_pair(config) else ("pad_token_id",)
    for name, token in _TOKENS.items() if words else ():
        own = getattr(config, name, None)
        if name in needed if own is None else type(own) is int and own >= words:
            sizes[name] = token
    for name in ("text_config", "vision_config"):
        if hasattr(getattr(config, name, None), "to_dict"):
            sizes[name] = small_sizes(getattr(config, name))
    by_stage = {"hidden_sizes": [16, 32], "depths": [1, 1]}
    return sizes | {n: v for n, v in by_stage.items() if isinstance(getattr(config, n, None), list)}


def _is_pair(config: Any) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False))


def small_model(kind: Any) -> nn.Module:
    """Return a model of a class, of a small config.

    Raises:
        ValueError: it would be large all the same.
        Exception: what the class raises at sizes that do not go together.
    """
    config = kind.config_class(**small_sizes(kind.config_class()))
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        size = sum(p.numel() for p in kind(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"it has {size:,} parameters at the smallest config that is known here")
    model: nn.Module = kind(config)
    return model


def batch_of(model: Any) -> dict[str, Any]:
    """Return tokens or images, with labels where the model computes its own loss of them.

    Raises:
        ValueError: it takes neither tokens nor images.
        Exception: what its forward raises on the batch, which is tried once.
    """
    takes = inspect.signature(model.forward).parameters
    batch: dict[str, Any] = {}
    if "pixel_values" in takes:
        batch["pixel_values"] = _pixels(getattr(model.config, "vision_config", model.config))
    if "input_ids" in takes:
        samples = len(batch["pixel_values"]) if batch else _SAMPLES
        batch["input_ids"] = _ids(model.config, samples)
    if not batch:
        raise ValueError("its forward takes neither input_ids nor pixel_values")
    if "decoder_input_ids" in takes and "labels" not in takes:
        batch["decoder_input_ids"] = batch["input_ids"]
    batch |= _labels(model, batch, takes)
    with torch.no_grad(), in_mode(model, False):
        Inputs.of(batch).call(model)
    return batch


def _ids(config: Any, samples: int) -> Tensor:
    text = config.get_text_config()
    length = min(_LENGTH, getattr(text, "max_position_embeddings", None) or _LENGTH)
    ids = torch.randint(min(_FIRST_WORD, text.vocab_size - 1), text.vocab_size, (samples, length))
    if _is_pair(config):  # heads of Bart read the state of the last token of a sentence
        ids[:, -1] = config.eos_token_id
    return ids


def _pixels(config: Any) -> Tensor:
    side = getattr(config, "image_size", None) or 64
    height, width = side if isinstance(side, list | tuple) else (side, side)
    shape = (getattr(config, "num_channels", 3), height, width)
    is_large = torch.Size(shape).numel() > _LARGE_IMAGE
    return torch.randn(_FEW_SAMPLES if is_large else _SAMPLES, *shape)


def _labels(model: Any, batch: dict[str, Any], takes: Any) -> dict[str, Any]:
    """Return labels as the head of a model takes them, by the name that its task has."""
    name, classes = type(model).__name__, model.config.num_labels
    ids, pixels = batch.get("input_ids"), batch.get("pixel_values")
    samples = len(next(iter(batch.values())))
    if ids is not None and "start_positions" in takes:
        places = ("start_positions", "end_positions")
        return {place: torch.randint(ids.shape[1], (samples,)) for place in places}
    if "labels" not in takes:
        return {"return_loss": True} if "return_loss" in takes else {}
    if ids is not None and ("CausalLM" in name or "LMHead" in name):
        return {"labels": ids}
    if ids is not None and any(t in name for t in ("MaskedLM", "ConditionalGeneration", "MTModel")):
        return {"labels": _ids(model.config, samples)}
    if ids is not None and "TokenClassification" in name:
        return {"labels": torch.randint(classes, ids.shape)}
    if pixels is not None and "SemanticSegmentation" in name:
        return {"labels": torch.randint(classes, (samples, *pixels.shape[2:]))}
    if "Classification" not in name and "NextSentencePrediction" not in name:
        raise ValueError(f"what labels {name} takes is not known here")
    return {"labels": torch.randint(classes, (samples,)) if classes > 1 else torch.randn(samples)}
