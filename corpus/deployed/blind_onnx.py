"""ONNX models as exported, and as edited or exported wrongly, written before they were judged."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from corpus.cards import Shelf
from corpus.deploying import (
    edited,
    legacy_file,
    new_file,
    onnx_file,
    onnx_program,
    operators,
    quietly,
    replaced_initializer,
    session,
    set_attribute,
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

# ---- the same ------------------------------------------------------------------------------------


@refactor("ONNX file of the exporter over TorchScript", residual)
def _(model: Residual) -> str:
    return legacy_file(model, batch_of("residual"))


@refactor("ONNX file of the exporter over TorchScript", perceptron)
def _(model: Perceptron) -> str:
    return legacy_file(model, batch_of("perceptron"), opset_version=20)


@refactor("ONNX file of the exporter over TorchScript", gpt)
def _(model: GPT) -> str:
    return legacy_file(model, batch_of("gpt"))


@refactor("ONNX file", residual)
def _(model: Residual) -> str:
    return onnx_file(model, batch_of("residual"))


@refactor("ONNX program", residual)
def _(model: Residual) -> Any:
    return onnx_program(model, batch_of("residual"))


@refactor("ONNX session", perceptron)
def _(model: Perceptron) -> Any:
    return session(onnx_file(model, batch_of("perceptron")))


@refactor("ONNX file", gpt)
def _(model: GPT) -> str:
    return onnx_file(model, batch_of("gpt"))


@refactor("ONNX file", bert)
def _(model: nn.Module) -> str:
    return onnx_file(model, batch_of("bert"))


@refactor("ONNX file that is not optimised", residual)
def _(model: Residual) -> str:
    return onnx_file(model, batch_of("residual"), optimize=False)


@refactor("ONNX file with a batch of any size", perceptron)
def _(model: Perceptron) -> str:
    shapes = ({0: torch.export.Dim("batch")},)
    return onnx_file(model, batch_of("perceptron"), dynamic_shapes=shapes)


@refactor("ONNX file with its weights beside it", gpt)
def _(model: GPT) -> str:
    path = new_file(".onnx")
    with quietly():
        onnx_program(model, batch_of("gpt")).save(path, external_data=True)
    return path


@refactor("ONNX file optimised by onnxruntime", gpt)
def _(model: GPT) -> str:
    import onnxruntime

    options, path = onnxruntime.SessionOptions(), new_file(".onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = path
    onnxruntime.InferenceSession(onnx_file(model, batch_of("gpt")), options)
    return path


# ---- mode -------------------------------------------------------------------------------------


@change(
    "exported to ONNX in training mode",
    residual,
    ("bn", "stem"),
    why="Batch norms use the statistics of the batch.",
)
def _(model: Residual) -> str:
    mode = torch.onnx.TrainingMode.TRAINING
    return legacy_file(
        model.train(), batch_of("residual"), training=mode, do_constant_folding=False
    )


# ---- weights -------------------------------------------------------------------------------------


@change(
    "one layer of an earlier checkpoint in an ONNX file",
    residual,
    ("blocks.1.conv2", "blocks.1.bn2"),
    why="One layer's weights are of an earlier day of training.",
)
def _(model: Residual) -> str:
    import onnx

    early = onnx.load(onnx_file(checkpoint("residual", EARLIER).model, batch_of("residual")))
    weights = {one.name: one for one in early.graph.initializer}

    def edit(graph: Any) -> None:
        for name in ("blocks.1.conv2.weight", "blocks.1.conv2.bias"):
            if name in weights:
                array = onnx.numpy_helper.to_array(weights[name])
                replaced_initializer(graph, name, lambda _, array=array: array)

    return edited(onnx_file(model, batch_of("residual")), edit)


@change(
    "shift of a folded batch norm lost in an ONNX file",
    residual,
    ("blocks.0.conv1", "blocks.0.bn1"),
    why="The channels keep the scale of the norm, and lose its shift.",
)
def _(model: Residual) -> str:
    def edit(graph: Any) -> None:
        bias = operators(graph, "Conv")[1].input[2]
        replaced_initializer(graph, bias, np.zeros_like)

    return edited(onnx_file(model, batch_of("residual")), edit)


@change(
    "bias dropped by an ONNX Gemm",
    perceptron,
    "fc3",
    why="The layer loses what it learnt to add.",
)
def _(model: Perceptron) -> str:
    def edit(graph: Any) -> None:
        weights = [one.input[1] for one in operators(graph, "Gemm")]
        node = operators(graph, "Gemm")[weights.index("fc3.weight")]
        set_attribute(node, "beta", 0.0)

    return edited(onnx_file(model, batch_of("perceptron")), edit)


@change(
    "queries and keys swapped in an ONNX file of the exporter over TorchScript",
    gpt,
    ("blocks.0.attention.q", "blocks.0.attention.k"),
    why="Scores are transposed, and with a causal mask that is another attention.",
)
def _(model: GPT) -> str:
    def edit(graph: Any) -> None:
        query, key = operators(graph, "MatMul")[:2]
        query.input[1], key.input[1] = key.input[1], query.input[1]

    return edited(legacy_file(model, batch_of("gpt")), edit)


@change(
    "layer norm as before training, in a session",
    bert,
    "bert.encoder.layer.1.output.LayerNorm",
    why="The norm's scale and shift are those that it started with.",
)
def _(model: nn.Module) -> Any:
    norm = model.bert.encoder.layer[1].output.LayerNorm
    norm.reset_parameters()
    return session(onnx_file(model, batch_of("bert")))


@change(
    "two words of the table exchanged in an ONNX program",
    gpt,
    "token",
    why="Each of two tokens gets the embedding of the other.",
)
def _(model: GPT) -> Any:
    with torch.no_grad():
        model.token.weight[[1, 17]] = model.token.weight[[17, 1]]
    return onnx_program(model, batch_of("gpt"))


# ---- attributes ----------------------------------------------------------------------------------


@change(
    "epsilon 1e-3 for 1e-5 in an ONNX layer norm",
    gpt,
    "blocks.0.norm2",
    why="Rows of little variance are scaled differently.",
)
def _(model: GPT) -> str:
    def edit(graph: Any) -> None:
        set_attribute(operators(graph, "LayerNormalization")[1], "epsilon", 1e-3)

    return edited(onnx_file(model, batch_of("gpt")), edit)


@change(
    "slope 0.01 for 0.1 in an ONNX LeakyRelu",
    perceptron,
    ("leaky_relu*", "dropout", "head"),
    why="What is below zero is ten times smaller.",
)
def _(model: Perceptron) -> str:
    def edit(graph: Any) -> None:
        set_attribute(operators(graph, "LeakyRelu")[0], "alpha", 0.01)

    return edited(onnx_file(model, batch_of("perceptron")), edit)


@change(
    "axis 0 for -1 in an ONNX Softmax",
    perceptron,
    ("softmax*", "gate"),
    why="A sample's gates depend on the other samples of its batch.",
)
def _(model: Perceptron) -> Any:
    def edit(graph: Any) -> None:
        set_attribute(operators(graph, "Softmax")[0], "axis", 0)

    return session(edited(onnx_file(model, batch_of("perceptron")), edit))


@change(
    "padding on one side in an ONNX Conv",
    residual,
    ("blocks.2.conv1", "blocks.2.bn1"),
    why="The image is shifted by a pixel in one layer.",
)
def _(model: Residual) -> str:
    def edit(graph: Any) -> None:
        set_attribute(operators(graph, "Conv")[5], "pads", [2, 2, 0, 0])

    return edited(onnx_file(model, batch_of("residual")), edit)


# ---- operators -----------------------------------------------------------------------------------


@change(
    "tanh for exact GELU in an ONNX file",
    perceptron,
    ("gelu*", "fc2", "norm1"),
    why="The two differ by up to 5e-4.",
)
def _(model: Perceptron) -> str:
    def edit(graph: Any) -> None:
        set_attribute(operators(graph, "Gelu")[0], "approximate", "tanh")

    return edited(onnx_file(model, batch_of("perceptron")), edit)


@change(
    "LeakyRelu for Relu in an ONNX file",
    residual,
    ("blocks.1.relu*", "blocks.1.conv2"),
    why="What was zero is a hundredth of what it was before the ReLU.",
)
def _(model: Residual) -> str:
    def edit(graph: Any) -> None:
        operators(graph, "Relu")[3].op_type = "LeakyRelu"

    return edited(onnx_file(model, batch_of("residual")), edit)


@change(
    "residual Add bypassed in an ONNX file",
    residual,
    ("blocks.1", "blocks.1.add*", "blocks.1.relu*"),
    why="The block forgets what it was given.",
)
def _(model: Residual) -> str:
    def edit(graph: Any) -> None:
        added = operators(graph, "Add")[1]
        branch = next(
            name for one in operators(graph, "Conv") for name in one.output if name in added.input
        )
        added.op_type = "Identity"
        del added.input[:]
        added.input.append(branch)

    return edited(onnx_file(model, batch_of("residual")), edit)


@change(
    "Add bypassed in an ONNX file of the exporter over TorchScript",
    gpt,
    ("blocks.0", "blocks.0.add*", "blocks.0.norm2"),
    why="What attention adds to the stream is thrown away.",
)
def _(model: GPT) -> str:
    def edit(graph: Any) -> None:
        sums = {name: one for one in operators(graph, "Add") for name in one.output}
        norm = operators(graph, "LayerNormalization")[1]
        added, first = sums[norm.input[0]], operators(graph, "LayerNormalization")[0].input[0]
        added.op_type = "Identity"
        del added.input[:]
        added.input.append(first)

    return edited(legacy_file(model, batch_of("gpt")), edit)
