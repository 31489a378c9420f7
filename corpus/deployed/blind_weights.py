"""Pruned and parametrized models and adapters, kept and merged, written before they were judged."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from corpus.cards import Shelf
from corpus.deploying import quietly
from corpus.models.deployed import GPT, Perceptron, Residual, gpt, llama, perceptron, residual
from corpus.pair import remade

SHELF = Shelf("deployed", "blind")
change, refactor = SHELF.change, SHELF.refactor

# ---- pruned --------------------------------------------------------------------------------------


@torch.no_grad()
def pruned(model: GPT) -> None:
    """Mask three of ten weights of each layer that is not a norm or a table, the smallest."""
    for layer in [one for one in model.modules() if isinstance(one, nn.Linear)]:
        prune.l1_unstructured(layer, "weight", amount=0.3)


def made_permanent(model: nn.Module) -> None:
    for layer in list(model.modules()):
        if hasattr(layer, "weight_mask"):
            prune.remove(layer, "weight")


@torch.no_grad()
def pruned_channels(model: Residual) -> None:
    """Mask a quarter of the channels inside each block, the smallest."""
    for block in model.blocks:
        prune.ln_structured(block.conv1, "weight", amount=0.25, n=2, dim=0)


@refactor("mask made permanent", remade(gpt, pruned))
def _(model: GPT) -> None:
    made_permanent(model)


@refactor("mask of channels made permanent", remade(residual, pruned_channels))
def _(model: Residual) -> None:
    made_permanent(model)


@refactor("mask over weights that are zero", perceptron)
def _(model: Perceptron) -> None:
    prune.custom_from_mask(model.fc2, "weight", model.fc2.weight != 0)


@change(
    "mask transposed",
    remade(gpt, pruned),
    "blocks.0.attention.out",
    why="The weights that are cut are not those that were chosen.",
)
def _(model: GPT) -> None:
    layer = model.blocks[0].attention.out
    layer.weight_mask.copy_(layer.weight_mask.T.clone())
    made_permanent(model)


@change(
    "mask of another layer made permanent",
    remade(gpt, pruned),
    "blocks.1.fc",
    why="The weights that are cut were chosen for another layer.",
)
def _(model: GPT) -> None:
    model.blocks[1].fc.weight_mask.copy_(model.blocks[0].fc.weight_mask)
    made_permanent(model)


@change(
    "mask lost on the way",
    remade(residual, pruned_channels),
    ("blocks.1.conv1", "blocks.1.bn1"),
    why="One layer has the weights back that were cut from it.",
)
def _(model: Residual) -> None:
    layer = model.blocks[1].conv1
    layer.weight_mask.fill_(1)
    made_permanent(model)


# ---- parametrized --------------------------------------------------------------------------------


@refactor("weight norm put on", perceptron)
def _(model: Perceptron) -> None:
    for layer in (model.fc1, model.fc2, model.head):
        parametrizations.weight_norm(layer)


def baked(model: nn.Module, fresh: nn.Module) -> nn.Module:
    """Return a fresh model with the weights as they come out of their parametrizations."""
    state = {key: one for key, one in model.state_dict().items() if ".parametrizations." not in key}
    for name, layer in model.named_modules():
        if parametrize.is_parametrized(layer):
            state[f"{name}.weight"] = layer.weight.detach().clone()
    fresh.load_state_dict(state)
    return fresh.eval()


def with_weight_norm(model: Residual) -> None:
    for block in model.blocks:
        parametrizations.weight_norm(block.conv1)


@refactor("weight norm made permanent", remade(residual, with_weight_norm))
def _(model: Residual) -> nn.Module:
    return baked(model, Residual())


def with_spectral_norm(model: Perceptron) -> None:
    for layer in (model.fc2, model.fc3):
        parametrizations.spectral_norm(layer, n_power_iterations=8).eval()


def with_orthogonal(model: GPT) -> None:
    for block in model.blocks:
        parametrizations.orthogonal(block.attention.out)


@refactor("spectral norm made permanent", remade(perceptron, with_spectral_norm))
def _(model: Perceptron) -> nn.Module:
    return baked(model, Perceptron())


@refactor("orthogonal parametrization made permanent", remade(gpt, with_orthogonal))
def _(model: GPT) -> nn.Module:
    return baked(model, GPT())


@change(
    "lengths of a weight norm lost",
    remade(residual, with_weight_norm),
    ("blocks.2.conv1", "blocks.2.bn1"),
    why="The directions are kept with lengths of one.",
)
def _(model: Residual) -> nn.Module:
    nn.init.ones_(model.blocks[2].conv1.parametrizations.weight.original0)
    return baked(model, Residual())


@change(
    "spectral norm taken off without dividing",
    remade(perceptron, with_spectral_norm),
    "fc3",
    why="The layer has the weights from before its norm.",
)
def _(model: Perceptron) -> nn.Module:
    made = baked(model, Perceptron())
    made.fc3.weight.data.copy_(model.fc3.parametrizations.weight.original)
    return made


# ---- adapters ------------------------------------------------------------------------------------


def adapted(model: nn.Module) -> nn.Module:
    """Return the model with adapters of rank 4 at queries and values, which do nothing yet."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj"]
    with quietly():
        config = LoraConfig(r=4, lora_alpha=16, target_modules=targets, lora_dropout=0.1)
        return get_peft_model(model, config).eval()


def tuned(model: nn.Module) -> nn.Module:
    """Return the model with adapters as they are after some training."""
    made = adapted(model)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return made


def layers_of(model: nn.Module, name: str) -> list[nn.Module]:
    return [one for path, one in model.named_modules() if path.endswith(f".{name}")]


def merged(model: nn.Module) -> nn.Module:
    with quietly():
        return model.merge_and_unload()


@refactor("adapters that do nothing yet", llama)
def _(model: nn.Module) -> nn.Module:
    return adapted(model)


@refactor("adapters merged", remade(llama, tuned))
def _(model: nn.Module) -> nn.Module:
    return merged(model)


@refactor("adapters merged and kept", remade(llama, tuned))
def _(model: nn.Module) -> None:
    with quietly():
        model.merge_adapter()


@change(
    "adapters merged with a scale of 1 for 4",
    remade(llama, tuned),
    "*layers.0.self_attn.[qv]_proj*",
    why="The adapters count a quarter of what their alpha says.",
)
def _(model: nn.Module) -> nn.Module:
    for name in ("q_proj", "v_proj"):
        for layer in layers_of(model, name):
            layer.scaling["default"] = 1.0
    return merged(model)


@change(
    "one adapter merged twice",
    remade(llama, tuned),
    "*layers.1.self_attn.v_proj*",
    why="The adapter counts twice.",
)
def _(model: nn.Module) -> nn.Module:
    layer = layers_of(model, "v_proj")[1]
    with torch.no_grad():
        layer.base_layer.weight += layer.get_delta_weight("default")
    return merged(model)


@change(
    "one adapter not merged",
    remade(llama, tuned),
    "*layers.1.self_attn.q_proj*",
    why="What the adapter learnt is lost.",
)
def _(model: nn.Module) -> nn.Module:
    nn.init.zeros_(layers_of(model, "q_proj")[1].lora_B["default"].weight)
    return merged(model)


@change(
    "adapters of two layers merged into each other's",
    remade(llama, tuned),
    "*layers.0.self_attn.v_proj*",
    why="Each layer gets what the other's adapter learnt.",
)
def _(model: nn.Module) -> nn.Module:
    first, second = layers_of(model, "v_proj")
    first.lora_A, second.lora_A = second.lora_A, first.lora_A
    first.lora_B, second.lora_B = second.lora_B, first.lora_B
    return merged(model)
