"""Architectures of the transformers library, built small from their configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.capture.models import Case

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


ARCHITECTURES: dict[str, Case] = {}


def add(name: str, model: str, config: str, inputs: Callable[[], Any], **options: Any) -> None:
    """Add an architecture by the names of its classes."""

    def build() -> nn.Module:
        return getattr(transformers, model)(getattr(transformers, config)(**options))

    ARCHITECTURES[name] = Case(build, inputs, statuses=None)


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
