"""Configurations of transformers with few layers, narrow ones and a small vocabulary."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

VOCABULARY = 97
IMAGE = 32
FRAMES = 4
HEADS = 4
LAYERS = 2

Sizes = dict[str, int]

_LAYERS = re.compile(
    r"(num_|n_)?(\w+_)?(layers?|blocks|depth)(_per_\w+)?|num_\w*_?hidden_layers|n_layers?|depth"
)
_NOT_LAYERS = re.compile(
    r".*(norm|out|vision_feature|feature|select|intermediate|dense_layers|hash|proj|use|share|"
    r"deepstack|window|nope|freeze|fc|after|every|mlp|return|act|prenet|postnet|lstm).*"
)
_HEADS = re.compile(r"(\w+_)?(num_|n_)?(attention_)?heads?|n_heads?|num_\w*heads|\w*_heads")
_NOT_HEADS = re.compile(r".*(dim|size|per|mask|pred|kv|key_value|group|factor).*")
_KV_HEADS = re.compile(r"\w*(key_value|kv)_heads|n_head_kv")
_MAMBA_HEADS = re.compile(r"mamba_n\w*_heads")
_HEAD_DIM = re.compile(
    r"\w*head_(dim|size)|d_kv|d_head|kv_channels|\w*_head_dim|mamba_d_head|rotary_dim"
)
_WIDE = re.compile(
    r"\w*intermediate_\w*size|\w*ffn_\w*dim|d_ff|ffn_\w+|n_inner|d_inner|mlp_dim|hidden_dim|"
    r"\w*feed_?forward\w*(dim|size)?|ffn_hidden_size|\w*mlp_hidden_size|\w*mlp_\w*dim"
)
_WIDTH = re.compile(
    r"\w*hidden_\w*size|d_model|n_embd|dim|\w*embed(ding)?_(dim|size)|\w*embedding_size|n_embed|"
    r"\w*projection_\w*(dim|size)|\w*proj_dim|\w*hidden_dim|\w*_width|width|lru_width|"
    r"(fpn|mask)_feature_size|\w*_channels|feature_size|\w*output_dim|\w*_dim|\w*_dim_\w+|"
    r"bottleneck_\w+|\w*q_lora_rank|\w*kv_lora_rank|hidden_channels|\w*out_dim|dim_\w+"
)
_NOT_WIDTH = re.compile(
    r"(num_channels|in_channels|\w*num_(input_)?channels|in_chans|audio_channels|image_channels|"
    r"num_output_channels|\w*rope\w*|\w*_ratio|\w*action\w*|\w*act_dim|state_dim|"
    r"\w*max_\w+|\w*num_mel\w*|embed_dim_multiplier|\w*input_dim)"
)
_IMAGE = re.compile(r"(image|input|img)_size")
_TOKEN = re.compile(r"\w+_token_(id|index)|\w+_token_ids|\w+_id|\w+_start_token|\w+_index")

_BOUNDS = {
    _MAMBA_HEADS: 2 * HEADS,
    re.compile(r"(text_|\w*input_)?vocab(_size)?|n_vocab|vocabulary_size"): VOCABULARY,
    re.compile(r"(\w+_)?vocab(_size)?|num_embeddings"): VOCABULARY // 2,
    re.compile(
        r"\w*max_position\w*|n_positions|n_ctx|max_seq\w*|max_sequence_length|context_length|"
        r"max_(source|target)_positions|max_context_length"
    ): 128,
    _KV_HEADS: HEADS // 2,
    _HEAD_DIM: 0,
    _HEADS: HEADS,
    _LAYERS: LAYERS,
    _WIDE: 0,
    re.compile(r"(num|n)_\w*experts|num_local_experts|n_routed_experts|moe_num_experts"): 4,
    re.compile(r"\w*experts_per_tok\w*|\w*top_?k|moe_k|topk_group|n_group|tubelet_size"): 2,
    re.compile(r"\w*_layer_period|full_attention_interval|attn_layer_\w+"): 2,
    re.compile(r"first_k_dense_replace|\w*_layer_offset|moe_layer_start_index"): 1,
    re.compile(r"\w*sliding_window\w*|attention_window\w*|local_attention"): 16,
    re.compile(r"num_queries|num_detections|\w*num_query_tokens|two_stage_num_proposals"): 12,
    re.compile(r"num_frames"): FRAMES,
    re.compile(r"patch_size"): 8,
    _WIDTH: 0,
    _IMAGE: 0,
}
"""The largest value of what a key is about; 0 where it depends on the sizes asked for."""

_ORDER = tuple(_BOUNDS)
_UNLESS = {_HEADS: _NOT_HEADS, _LAYERS: _NOT_LAYERS, _WIDTH: _NOT_WIDTH}


def shrunk(values: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Return the values of a configuration, parts included, with small numbers.

    Args:
        values: as `to_dict` of a configuration returns it.
        sizes: ``width`` of the streams, ``wide`` of what lies inside a block.
    """
    small = dict(_small(values, sizes))
    heads = values.get("num_attention_heads")
    for key in small:
        if _KV_HEADS.fullmatch(key) and isinstance(heads, int) and values[key] == heads:
            small[key] = small["num_attention_heads"]
    for key in ("qk_head_dim", "per_layer_config"):
        small.pop(key, None)
    layers = _number_of_layers(small)
    for key, value in values.items():
        if key in ("layer_types", "mlp_layer_types", "layers_block_type") and value:
            small[key] = _kinds(value, layers)
    return small


def _number_of_layers(values: dict[str, Any]) -> int:
    for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if isinstance(values.get(key), int):
            return int(values[key])
    return LAYERS


def _kinds(kinds: list[Any], layers: int) -> list[Any]:
    """Return a kind for each layer, the different ones first."""
    different = list(dict.fromkeys(kinds)) if all(isinstance(k, str) for k in kinds) else kinds
    return (different + list(kinds))[:layers]


def _small(values: dict[str, Any], sizes: Sizes) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key in ("transformers_version", "architectures", "dtype", "torch_dtype", "id2label",
                   "label2id", "_name_or_path"):  # fmt: skip
            continue
        if isinstance(value, dict):
            yield key, shrunk(value, sizes) if "rope" not in key else value
        elif isinstance(value, bool) or value is None or isinstance(value, str | float):
            yield key, value
        elif isinstance(value, int):
            yield key, _number(key, value, sizes)
        elif isinstance(value, list | tuple) and value:
            yield key, _several(key, value, sizes)
        else:
            yield key, value


def _number(key: str, value: int, sizes: Sizes) -> int:
    """Return the value under a bound that the key tells; as it is where none does."""
    if value <= 1:
        return value
    if _TOKEN.fullmatch(key):
        return value if value < VOCABULARY else VOCABULARY - 1 - value % 8
    bounds = _BOUNDS | {
        _HEAD_DIM: sizes["width"] // HEADS,
        _WIDE: sizes["wide"],
        _WIDTH: sizes["width"],
        _IMAGE: sizes["image"],
    }
    for pattern in _ORDER:
        unless = _UNLESS.get(pattern)
        if pattern.fullmatch(key) and not (unless and unless.fullmatch(key)):
            return min(value, bounds[pattern])
    return value


def _several(key: str, value: list[Any] | tuple[Any, ...], sizes: Sizes) -> Any:
    """Return a list of sizes, such as one a stage, with each of them small."""
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        return value
    kind = type(value)
    if re.fullmatch(r"depths?|num_blocks|block_sizes|\w*layers|\w*depths", key):
        return kind(min(one, LAYERS) for one in value) if min(value) > 0 else value
    if re.fullmatch(r"\w*hidden_sizes?|\w*_dims?|dims?|\w*channels|dim_out|widths", key):
        factor = max(1, max(value) // sizes["width"])
        return kind(max(8, one // factor // 8 * 8) for one in value)
    if key == "type_vocab_sizes":
        return kind(min(one, VOCABULARY // 2) for one in value)
    if key in ("image_size", "input_size"):
        return kind(min(one, sizes["image"]) for one in value)
    if re.fullmatch(r"\w*_index(es)?|\w*indexes|\w*indices|\w*_layers_\w+|deepstack_\w+", key):
        return kind([LAYERS - 1]) if len(value) == 1 or max(value) > LAYERS else value
    return value
