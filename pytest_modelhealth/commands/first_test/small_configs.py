"""Configs of transformers that are small enough for a test: those sizes that differ by default."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from pytest_modelhealth.errors import InspectionError

_SIZES: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embed_dim": 64,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_decoder_layers": 2,
    "num_attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_kv": 16,
    "intermediate_size": 128, "d_ff": 128, "hidden_dim": 128, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "projection_dim": 32, "image_size": 32, "patch_size": 8,
    "max_source_positions": 50,
}  # fmt: skip
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
_MOST_PARAMETERS = 100_000_000


def small_config(model_class: Any, config_class: Any) -> dict[str, Any]:
    """Return the arguments of a config by which a model is small, and can be made.

    Raises:
        InspectionError: none could be found, and the model of the default config is large.
    """
    plain = config_class()
    for changed in _choices(plain):
        size = _parameters(model_class, config_class, changed)
        if size is not None and size <= _MOST_PARAMETERS:
            return changed
    raise InspectionError(
        f"{model_class.__name__} of a default {config_class.__name__} is large or cannot be made, "
        "and no small config was found. Write a function without arguments, and name that one:\n"
        f"    def make_model():\n        return {model_class.__name__}"
        f"({config_class.__name__}(hidden_size=..., num_hidden_layers=...))"
    )


def _choices(plain: Any) -> Iterator[dict[str, Any]]:
    changed = _smaller(plain)
    for name in ("text_config", "vision_config"):
        inner = getattr(plain, name, None)
        if inner is not None and hasattr(inner, "to_dict"):
            changed[name] = _smaller(inner)
    for name, values in (("hidden_sizes", [16, 32]), ("depths", [1, 1])):
        if isinstance(getattr(plain, name, None), list):
            changed[name] = values
    if isinstance(getattr(plain, "conv_dim", None), tuple | list):
        changed["conv_dim"] = [32] * len(plain.conv_dim)
    yield changed
    heads = {"num_key_value_heads": 2, "head_dim": 16}
    yield {**changed, **{n: v for n, v in heads.items() if hasattr(plain, n)}}
    yield {k: v for k, v in changed.items() if k not in ("image_size", "patch_size")}
    yield {}


def _smaller(plain: Any) -> dict[str, Any]:
    """Return the sizes of a config that are larger than a test needs, by their own names."""
    aliases = getattr(plain, "attribute_map", None) or {}
    changed: dict[str, Any] = {}
    for name, value in _SIZES.items():
        own = getattr(plain, name, None) if name not in aliases else None
        if type(own) is int and own > value:
            changed[name] = value
    words = changed.get("vocab_size")
    if words:
        for name, value in _TOKENS.items():
            token = getattr(plain, name, None)
            if type(token) is int and token >= words:
                changed[name] = value
    return changed


def _parameters(model_class: Any, config_class: Any, changed: dict[str, Any]) -> int | None:
    """Return how many parameters a model has, without any memory; ``None`` if it is not made."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = model_class(config_class(**changed))
        return int(sum(p.numel() for p in model.parameters()))
    except Exception:  # noqa: BLE001 - sizes that do not go together
        return None
