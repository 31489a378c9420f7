"""Architectures of the transformers library, built small from their configurations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn


@dataclass(frozen=True)
class Architecture:
    """An architecture with random weights, and a batch for it.

    Args:
        build: makes the model.
        inputs: makes the batch.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[..., Any]


TEXT = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
}


def ids(name: str = "input_ids") -> Callable[..., dict[str, Tensor]]:
    """Return a function that makes token ids under this name."""
    return lambda batch=2: {name: torch.randint(3, 30, (batch, 6))}


def encoder_decoder() -> dict[str, Tensor]:
    """Return token ids for both halves of the model."""
    return ids()() | ids("decoder_input_ids")()


def pixels(size: int = 8) -> Callable[[], dict[str, Tensor]]:
    """Return a function that makes two square images."""
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


ARCHITECTURES: dict[str, Architecture] = {}


def add(name: str, model: str, config: str, inputs: Callable[[], Any], **options: Any) -> None:
    """Add an architecture by the names of its classes."""

    def build() -> nn.Module:
        return getattr(transformers, model)(getattr(transformers, config)(**options))

    ARCHITECTURES[name] = Architecture(build, inputs)


def causal(name: str) -> None:
    """Add a decoder whose configuration takes the usual names."""
    sizes = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
    add(name.lower(), f"{name}ForCausalLM", f"{name}Config", ids(), **sizes)


def vision(name: str, **options: Any) -> None:
    """Add a vision transformer whose configuration takes the usual names."""
    add(name.lower(), f"{name}Model", f"{name}Config", pixels(), **VISION, **options)


add("bert", "BertModel", "BertConfig", ids(), **TEXT)
add("roberta", "RobertaModel", "RobertaConfig", ids(), pad_token_id=0, **TEXT)
add("albert", "AlbertModel", "AlbertConfig", ids(), embedding_size=8, **TEXT)
add("distilbert", "DistilBertModel", "DistilBertConfig", ids(),
    vocab_size=31, dim=16, hidden_dim=24, n_layers=2, n_heads=2)  # fmt: skip
add("electra", "ElectraModel", "ElectraConfig", ids(), embedding_size=8, **TEXT)
GPT2 = {"vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
add("gpt2", "GPT2LMHeadModel", "GPT2Config", ids(), bos_token_id=0, eos_token_id=1, **GPT2)
for decoder in ("Llama", "Mistral", "Qwen2", "Gemma", "GPTNeoX", "Phi"):
    causal(decoder)
add("mixtral", "MixtralForCausalLM", "MixtralConfig", ids(), num_local_experts=3,
    num_key_value_heads=2, **TEXT)  # fmt: skip
add("mamba", "MambaForCausalLM", "MambaConfig", ids(), vocab_size=31, hidden_size=16,
    state_size=4, num_hidden_layers=2)  # fmt: skip
T5 = {"vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
add("t5", "T5Model", "T5Config", encoder_decoder, **T5)
SPEECH = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 16, "encoder_attention_heads": 2}
SPEECH |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
SPEECH |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
add("bart", "BartModel", "BartConfig", encoder_decoder, vocab_size=31,
    max_position_embeddings=32, forced_eos_token_id=2, **SPEECH)  # fmt: skip
add("whisper", "WhisperModel", "WhisperConfig",
    lambda: {"input_features": torch.randn(1, 8, 16)} | ids("decoder_input_ids")(batch=1),
    vocab_size=31, num_mel_bins=8, max_source_positions=8, max_target_positions=16,
    **SPEECH)  # fmt: skip
add("wav2vec2", "Wav2Vec2Model", "Wav2Vec2Config",
    lambda: {"input_values": torch.randn(2, 400)}, hidden_size=16, num_hidden_layers=2,
    num_attention_heads=2, intermediate_size=24, conv_dim=(8, 8), conv_stride=(5, 4),
    conv_kernel=(10, 4), num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2, mask_time_length=2)  # fmt: skip
for transformer in ("ViT", "DeiT", "Dinov2"):
    vision(transformer)
add("swin", "SwinModel", "SwinConfig", pixels(16), image_size=16, patch_size=2, embed_dim=8,
    depths=[1, 1], num_heads=[1, 2], window_size=4)  # fmt: skip
add("resnet", "ResNetModel", "ResNetConfig", pixels(16), embedding_size=8, hidden_sizes=[8, 16],
    depths=[1, 2], layer_type="basic")  # fmt: skip
add("convnext", "ConvNextModel", "ConvNextConfig", pixels(16), hidden_sizes=[8, 16],
    depths=[1, 1], num_stages=2)  # fmt: skip
add("mobilenet", "MobileNetV2Model", "MobileNetV2Config", pixels(32), depth_multiplier=0.1,
    min_depth=4, depth_divisible_by=4)  # fmt: skip
add("clip", "CLIPModel", "CLIPConfig", lambda: ids()() | pixels()(), projection_dim=8,
    text_config=TEXT | {"eos_token_id": 30}, vision_config=VISION)  # fmt: skip

# ---- further attention: relative positions, windows, pooling, two streams -----------------------

add("deberta", "DebertaV2Model", "DebertaV2Config", ids(), relative_attention=True,
    pos_att_type=["p2c", "c2p"], **TEXT)  # fmt: skip
add("xlnet", "XLNetModel", "XLNetConfig", ids(), vocab_size=31, d_model=16, n_layer=2, n_head=2,
    d_inner=24)  # fmt: skip
add("longformer", "LongformerModel", "LongformerConfig", ids(), attention_window=4, **TEXT)
add("funnel", "FunnelModel", "FunnelConfig", ids(), vocab_size=31, d_model=16, n_head=2, d_head=8,
    d_inner=24, block_sizes=[1, 1])  # fmt: skip
add("modernbert", "ModernBertModel", "ModernBertConfig", ids(), pad_token_id=0, bos_token_id=1,
    eos_token_id=2, cls_token_id=1, sep_token_id=2, **TEXT)  # fmt: skip
add("bloom", "BloomForCausalLM", "BloomConfig", ids(), vocab_size=31, hidden_size=16, n_layer=2,
    n_head=2)  # fmt: skip
add("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", ids(), num_key_value_heads=2, head_dim=8,
    **TEXT)  # fmt: skip

# ---- mixture of experts -------------------------------------------------------------------------

EXPERTS = TEXT | {"num_experts_per_tok": 2, "num_key_value_heads": 2}
add("qwen2 moe", "Qwen2MoeForCausalLM", "Qwen2MoeConfig", ids(), num_experts=3,
    moe_intermediate_size=8, shared_expert_intermediate_size=8, **EXPERTS)  # fmt: skip
add("deepseek", "DeepseekV3ForCausalLM", "DeepseekV3Config", ids(), n_routed_experts=4, n_group=2,
    topk_group=1, moe_intermediate_size=8, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
    qk_nope_head_dim=4, v_head_dim=8, first_k_dense_replace=1, **EXPERTS)  # fmt: skip
add("gpt-oss", "GptOssForCausalLM", "GptOssConfig", ids(), num_local_experts=3, head_dim=8,
    **EXPERTS)  # fmt: skip
add("switch", "SwitchTransformersModel", "SwitchTransformersConfig", encoder_decoder,
    num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
    num_experts=3, **T5)  # fmt: skip

# ---- state space and recurrence -----------------------------------------------------------------

add("mamba2", "Mamba2ForCausalLM", "Mamba2Config", ids(), vocab_size=31, hidden_size=16,
    state_size=4, num_hidden_layers=2, num_heads=4, head_dim=8, n_groups=1,
    chunk_size=4)  # fmt: skip
add("jamba", "JambaForCausalLM", "JambaConfig", ids(), num_experts=2, mamba_d_state=4,
    mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
    expert_layer_offset=1, **EXPERTS)  # fmt: skip
add("rwkv", "RwkvForCausalLM", "RwkvConfig", ids(), vocab_size=31, hidden_size=16,
    attention_hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    context_length=16)  # fmt: skip
add("recurrent gemma", "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", ids(), vocab_size=31,
    hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24,
    lru_width=16, attention_window_size=8)  # fmt: skip

# ---- sound, time series, video, detection, segmentation -----------------------------------------

add("ast", "ASTModel", "ASTConfig", lambda: {"input_values": torch.randn(2, 16, 16)},
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, patch_size=8,
    max_length=16, num_mel_bins=16, frequency_stride=8, time_stride=8)  # fmt: skip
add("encodec", "EncodecModel", "EncodecConfig", lambda: {"input_values": torch.randn(1, 1, 640)},
    num_filters=4, hidden_size=8, upsampling_ratios=[4, 2], codebook_size=8, codebook_dim=8,
    num_lstm_layers=1, target_bandwidths=[24.0, 48.0], sampling_rate=2400)  # fmt: skip
add("patchtst", "PatchTSTModel", "PatchTSTConfig",
    lambda: {"past_values": torch.randn(2, 16, 3)}, num_input_channels=3, context_length=16,
    patch_length=4, patch_stride=4, d_model=16, num_hidden_layers=2, num_attention_heads=2,
    ffn_dim=24)  # fmt: skip
add("videomae", "VideoMAEModel", "VideoMAEConfig",
    lambda: {"pixel_values": torch.randn(1, 4, 3, 8, 8)}, num_frames=4, **VISION)  # fmt: skip
add("regnet", "RegNetModel", "RegNetConfig", pixels(16), embedding_size=8, hidden_sizes=[8, 16],
    depths=[1, 1], groups_width=4)  # fmt: skip
BACKBONE = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]}
BACKBONE |= {"layer_type": "basic", "out_features": ["stage2"]}
add("detr", "DetrModel", "DetrConfig", pixels(16), use_timm_backbone=False, backbone=None,
    use_pretrained_backbone=False, backbone_config=BACKBONE, num_queries=3,
    **SPEECH)  # fmt: skip
add("segformer", "SegformerForSemanticSegmentation", "SegformerConfig", pixels(32),
    num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16],
    patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
    decoder_hidden_size=16)  # fmt: skip
add("sam", "SamModel", "SamConfig",
    lambda: pixels(32)() | {"input_points": torch.full((2, 1, 1, 2), 5.0)},
    vision_config=VISION | {"image_size": 32, "patch_size": 8, "output_channels": 16, "mlp_dim": 24,
                            "global_attn_indexes": [1], "window_size": 2, "num_pos_feats": 8},
    prompt_encoder_config={"hidden_size": 16, "image_size": 32, "patch_size": 8,
                           "mask_input_channels": 4},
    mask_decoder_config={"hidden_size": 16, "mlp_dim": 24, "num_hidden_layers": 1,
                         "num_attention_heads": 2, "iou_head_hidden_dim": 16})  # fmt: skip

# ---- text and images ----------------------------------------------------------------------------

IMAGE_TOKEN = 30
add("vilt", "ViltModel", "ViltConfig", lambda: ids()() | pixels()(), **(TEXT | VISION))
add("llava", "LlavaForConditionalGeneration", "LlavaConfig",
    lambda: {"input_ids": torch.cat([torch.full((2, 4), IMAGE_TOKEN), ids()()["input_ids"]], 1),
             **pixels()()},
    text_config=TEXT | {"model_type": "llama", "num_key_value_heads": 2},
    vision_config=VISION | {"model_type": "clip_vision_model"},
    image_token_id=IMAGE_TOKEN, image_token_index=IMAGE_TOKEN, vision_feature_layer=-1)  # fmt: skip
