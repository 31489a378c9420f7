"""Quantised models, well and wrongly calibrated and packed, written before they were judged."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from corpus.cards import Shelf
from corpus.deploying import (
    dynamic,
    new_file,
    onnx_file,
    pt2e,
    quietly,
    repacked,
    static,
    torchao,
)
from corpus.models.deployed import (
    EARLIER,
    GPT,
    Perceptron,
    Residual,
    batch_of,
    bert,
    checkpoint,
    gpt,
    perceptron,
    residual,
)

SHELF = Shelf("deployed", "blind")
change, refactor = SHELF.change, SHELF.refactor

# ---- the same, but for rounding ------------------------------------------------------------------


@refactor("static int8 by torch.fx", residual)
def _(model: Residual) -> nn.Module:
    return static(model, batch_of("residual"))


@refactor("static int8 by torch.fx", perceptron)
def _(model: Perceptron) -> nn.Module:
    return static(model, batch_of("perceptron"))


@refactor("dynamic int8", perceptron)
def _(model: Perceptron) -> nn.Module:
    return dynamic(model)


@refactor("dynamic int8", gpt)
def _(model: GPT) -> nn.Module:
    return dynamic(model)


@refactor("dynamic int8", bert)
def _(model: nn.Module) -> nn.Module:
    return dynamic(model)


@refactor("weights in int8 by torchao", gpt)
def _(model: GPT) -> nn.Module:
    return torchao(model, "Int8WeightOnlyConfig")


@refactor("weights and activations in int8 by torchao", perceptron)
def _(model: Perceptron) -> nn.Module:
    return torchao(model, "Int8DynamicActivationInt8WeightConfig")


@refactor("weights in float8 by torchao", gpt)
def _(model: GPT) -> nn.Module:
    return torchao(model, "Float8WeightOnlyConfig")


@refactor("weights in int4 by torchao", gpt)
def _(model: GPT) -> nn.Module:
    from torchao.quantization.granularity import PerGroup

    options = {"weight_dtype": torch.int4, "granularity": PerGroup(32)}
    return torchao(model, "IntxWeightOnlyConfig", **options)


@refactor("int8 by PT2E for inductor", residual)
def _(model: Residual) -> nn.Module:
    return pt2e(model, batch_of("residual"))


@refactor("int8 by PT2E for inductor", perceptron)
def _(model: Perceptron) -> nn.Module:
    return pt2e(model, batch_of("perceptron"))


@refactor("ONNX file with weights in int8 by onnxruntime", gpt)
def _(model: GPT) -> str:
    path = new_file(".onnx")
    with quietly():
        from onnxruntime.quantization import quantize_dynamic

        quantize_dynamic(onnx_file(model, batch_of("gpt")), path)
    return path


# ---- calibration ---------------------------------------------------------------------------------


@change(
    "static int8 calibrated on pixels from 0 to 1 for standardised ones",
    residual,
    ("", "stem", "bn"),
    why="Scales are too small, and what is beyond them is cut off.",
)
def _(model: Residual) -> nn.Module:
    batch = batch_of("residual")
    return static(model, batch, (batch * 6 + 4.9) / 160)


@change(
    "static int8 calibrated on pixels from 0 to 255",
    perceptron,
    ("", "fc1"),
    why="Scales are too coarse for the pixels that come later.",
)
def _(model: Perceptron) -> nn.Module:
    batch = batch_of("perceptron")
    return static(model, batch, (batch * 6 + 4.9) * 16)


@change(
    "PT2E calibrated on pixels from 0 to 1 for standardised ones",
    residual,
    ("", "stem", "bn"),
    why="Scales are too small, and what is beyond them is cut off.",
)
def _(model: Residual) -> nn.Module:
    batch = batch_of("residual")
    return pt2e(model, batch, (batch * 6 + 4.9) / 160)


# ---- scales and zero points ----------------------------------------------------------------------


@change(
    "weights of one static int8 layer a quarter too large",
    residual,
    ("blocks.1.conv1", "blocks.1.bn1", "blocks.1.relu*"),
    why="The scale that the weights were packed with is not theirs.",
)
def _(model: Residual) -> nn.Module:
    made = static(model, batch_of("residual"))
    layer = getattr(made.blocks, "1").conv1
    weight, bias = layer._weight_bias()
    scales = weight.q_per_channel_scales() * 1.25
    larger = torch._make_per_channel_quantized_tensor(
        weight.int_repr(), scales, weight.q_per_channel_zero_points(), weight.q_per_channel_axis()
    )
    repacked(layer, larger, bias)
    return made


@change(
    "zero point of one static int8 layer lost",
    residual,
    ("blocks.0.conv2", "blocks.0.bn2"),
    why="What the layer makes below zero is cut off.",
)
def _(model: Residual) -> nn.Module:
    made = static(model, batch_of("residual"))
    layer = getattr(made.blocks, "0").conv2
    layer.zero_point = 0
    return made


@change(
    "scale of one static int8 layer an eighth of what was found",
    perceptron,
    ("fc2",),
    why="What is beyond the scale is cut off.",
)
def _(model: Perceptron) -> nn.Module:
    made = static(model, batch_of("perceptron"))
    made.fc2.scale = made.fc2.scale / 8
    return made


@change(
    "scale of one torchao layer a quarter too large",
    gpt,
    "blocks.1.fc",
    why="The scale that the weights are multiplied with is not theirs.",
)
def _(model: GPT) -> nn.Module:
    made = torchao(model, "Int8WeightOnlyConfig")
    made.blocks[1].fc.weight.scale.mul_(1.25)
    return made


@change(
    "scale of one PT2E weight a quarter too large",
    residual,
    ("blocks.1.conv2", "blocks.1.bn2"),
    why="The scale that the weights are multiplied with is not theirs.",
)
def _(model: Residual) -> nn.Module:
    made = pt2e(model, batch_of("residual"))
    scales = [value for name, value in made.named_buffers() if name.startswith("_scale")]
    scales[4].mul_(1.25)
    return made


# ---- weights -------------------------------------------------------------------------------------


@change(
    "weights of two static int8 layers swapped",
    residual,
    ("blocks.0.conv1", "blocks.0.bn1", "blocks.0.relu*"),
    why="Each layer has the weights of the other.",
)
def _(model: Residual) -> nn.Module:
    made = static(model, batch_of("residual"))
    first, second = getattr(made.blocks, "0").conv1, getattr(made.blocks, "1").conv1
    mine, theirs = first._weight_bias(), second._weight_bias()
    repacked(first, *theirs)
    repacked(second, *mine)
    return made


@change(
    "one dynamic int8 layer of an earlier checkpoint",
    perceptron,
    "fc2",
    why="One layer's weights are of an earlier day of training.",
)
def _(model: Perceptron) -> nn.Module:
    early = dynamic(checkpoint("perceptron", EARLIER).model)
    made = dynamic(model)
    made.fc2 = early.fc2
    return made


@change(
    "queries and values of a dynamic int8 block swapped",
    gpt,
    ("blocks.1.attention.q", "blocks.1.attention.v"),
    why="Each projection has the weights of the other.",
)
def _(model: GPT) -> nn.Module:
    made = dynamic(model)
    attention = made.blocks[1].attention
    attention.q, attention.v = attention.v, attention.q
    return made


@change(
    "bias of one dynamic int8 layer lost",
    gpt,
    "blocks.0.fc",
    why="The layer loses what it learnt to add.",
)
def _(model: GPT) -> nn.Module:
    made = dynamic(model)
    layer = made.blocks[0].fc
    weight, bias = layer._packed_params._weight_bias()
    repacked(layer, weight, torch.zeros_like(bias))
    return made


@change(
    "weights of two torchao layers swapped",
    gpt,
    "blocks.0.proj",
    why="Each layer has the weights of the other.",
)
def _(model: GPT) -> nn.Module:
    made = torchao(model, "Int8DynamicActivationInt8WeightConfig")
    first, second = made.blocks[0].proj, made.blocks[1].proj
    first.weight, second.weight = second.weight, first.weight
    return made


@change(
    "one float8 layer of an earlier checkpoint",
    gpt,
    "blocks.1.attention.v",
    why="One layer's weights are of an earlier day of training.",
)
def _(model: GPT) -> nn.Module:
    model.blocks[1].attention.v = checkpoint("gpt", EARLIER).model.blocks[1].attention.v
    return torchao(model, "Float8WeightOnlyConfig")


@change(
    "weights of one int8 layer of an ONNX file with the scale of another",
    gpt,
    "blocks.0.fc",
    why="The scale that the weights are multiplied with is not theirs.",
)
def _(model: GPT) -> str:
    import onnx

    path = new_file(".onnx")
    with quietly():
        from onnxruntime.quantization import quantize_dynamic

        quantize_dynamic(onnx_file(model, batch_of("gpt")), path)
    made = onnx.load(path)
    one = next(
        one
        for one in made.graph.initializer
        if one.name.endswith("_scale") and list(_shape_of(made, one.name)) == [32, 64]
    )
    array = onnx.numpy_helper.to_array(one)
    one.CopyFrom(onnx.numpy_helper.from_array(array * 1.5, one.name))
    onnx.save(made, path)
    return path


def _shape_of(made: Any, scale: str) -> list[int]:
    """Return the shape of the quantised weights that a scale belongs to."""
    weight = scale.removesuffix("_scale") + "_quantized"
    return next((list(one.dims) for one in made.graph.initializer if one.name == weight), [])
