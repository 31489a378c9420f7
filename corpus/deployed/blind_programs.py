"""Frozen, exported and compiled models, and passes over graphs, written before they were judged."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from corpus.cards import Shelf
from corpus.deploying import (
    bypassed,
    decomposed,
    exported,
    folded,
    frozen,
    nodes,
    optimised,
    quietly,
    rewritten,
    through_file,
    traced,
    with_argument,
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
aten = torch.ops.aten

# ---- TorchScript: the same -----------------------------------------------------------------------


@refactor("scripted and frozen", residual)
def _(model: Residual) -> nn.Module:
    return frozen(model)


@refactor("scripted and frozen", perceptron)
def _(model: Perceptron) -> nn.Module:
    return frozen(model)


@refactor("scripted and frozen", gpt)
def _(model: GPT) -> nn.Module:
    return frozen(model)


@refactor("traced and frozen", residual)
def _(model: Residual) -> nn.Module:
    return frozen(model, batch_of("residual"))


@refactor("traced and frozen", gpt)
def _(model: GPT) -> nn.Module:
    return frozen(model, batch_of("gpt"))


@refactor("optimised for inference", residual)
def _(model: Residual) -> nn.Module:
    return optimised(model)


@refactor("optimised for inference", perceptron)
def _(model: Perceptron) -> nn.Module:
    return optimised(model)


# ---- TorchScript: something else -----------------------------------------------------------------


@change(
    "frozen with the statistics of an earlier batch norm",
    residual,
    ("blocks.0.conv2", "blocks.0.bn2"),
    why="What the norm took away and divided by is of an earlier day of training.",
)
def _(model: Residual) -> nn.Module:
    early = checkpoint("residual", EARLIER).model.blocks[0].bn2
    model.blocks[0].bn2.running_mean.copy_(early.running_mean)
    model.blocks[0].bn2.running_var.copy_(early.running_var)
    return frozen(model)


@change(
    "traced in training mode, set to evaluation and frozen",
    residual,
    ("stem", "bn"),
    why="The trace has the mode in it: batch norms keep using the statistics of the batch.",
)
def _(model: Residual) -> nn.Module:
    with quietly():
        made = torch.jit.trace(model.train(), batch_of("residual"), check_trace=False)
    return torch.jit.freeze(made.eval())


@change(
    "optimised with one layer of an earlier checkpoint",
    residual,
    ("blocks.2.conv1", "blocks.2.bn1"),
    why="One layer's weights are of an earlier day of training.",
)
def _(model: Residual) -> nn.Module:
    early = checkpoint("residual", EARLIER).model.blocks[2].conv1
    model.blocks[2].conv1.load_state_dict(early.state_dict())
    return optimised(model)


@change(
    "dropout baked in by a trace in training mode, then frozen",
    perceptron,
    ("dropout", "head"),
    why="The same sample gets another answer at each call.",
)
def _(model: Perceptron) -> nn.Module:
    with quietly():
        made = torch.jit.trace(model.train(), batch_of("perceptron"), check_trace=False)
    return torch.jit.freeze(made.eval())


@change(
    "frozen with queries and keys taken for each other",
    gpt,
    ("blocks.1.attention.q", "blocks.1.attention.k", "blocks.1.attention"),
    why="Scores are transposed, and with a causal mask that is another attention.",
)
def _(model: GPT) -> nn.Module:
    attention = model.blocks[1].attention
    attention.q, attention.k = attention.k, attention.q
    return frozen(model)


# ---- exported: the same --------------------------------------------------------------------------


@refactor("exported and decomposed", residual)
def _(model: Residual) -> ExportedProgram:
    return decomposed(model, batch_of("residual"))


@refactor("exported and decomposed", perceptron)
def _(model: Perceptron) -> ExportedProgram:
    return decomposed(model, batch_of("perceptron"))


@refactor("exported and decomposed", gpt)
def _(model: GPT) -> ExportedProgram:
    return decomposed(model, batch_of("gpt"))


@refactor("exported and decomposed", bert)
def _(model: nn.Module) -> ExportedProgram:
    return decomposed(model, batch_of("bert"))


@refactor("exported, saved and loaded", gpt)
def _(model: GPT) -> ExportedProgram:
    return through_file(exported(model, batch_of("gpt")))


@refactor("decomposed, saved and loaded", residual)
def _(model: Residual) -> ExportedProgram:
    return through_file(decomposed(model, batch_of("residual")))


@refactor("decomposed and turned into a module", perceptron)
def _(model: Perceptron) -> nn.Module:
    return decomposed(model, batch_of("perceptron")).module()


# ---- exported: something else --------------------------------------------------------------------


@change(
    "softmax over the batch in a decomposed program",
    perceptron,
    ("softmax*", "gate"),
    why="A sample's gates depend on the other samples of its batch.",
)
def _(model: Perceptron) -> ExportedProgram:
    def edit(graph: fx.Graph) -> None:
        (node,) = nodes(graph, aten._softmax.default)
        with_argument(node, 1, 0)

    return rewritten(decomposed(model, batch_of("perceptron")), edit)


@change(
    "epsilon 1e-3 for 1e-5 in a decomposed layer norm",
    gpt,
    "blocks.1.norm2",
    why="Rows of little variance are scaled differently.",
)
def _(model: GPT) -> ExportedProgram:
    def edit(graph: fx.Graph) -> None:
        with_argument(nodes(graph, aten.native_layer_norm.default)[3], 4, 1e-3)

    return rewritten(decomposed(model, batch_of("gpt")), edit)


@change(
    "residual sum bypassed, saved and loaded",
    gpt,
    ("blocks.0", "blocks.0.add*", "blocks.1.norm1", "blocks.0.proj"),
    why="What the feed-forward of the block computes is thrown away.",
)
def _(model: GPT) -> ExportedProgram:
    def edit(graph: fx.Graph) -> None:
        bypassed(graph, nodes(graph, aten.add.Tensor)[4])
        graph.eliminate_dead_code()

    return through_file(rewritten(decomposed(model, batch_of("gpt")), edit))


@change(
    "one layer of an earlier checkpoint in a file",
    gpt,
    "blocks.0.fc",
    why="One layer's weights are of an earlier day of training.",
)
def _(model: GPT) -> ExportedProgram:
    program = through_file(exported(model, batch_of("gpt")))
    early = checkpoint("gpt", EARLIER).model.blocks[0].fc
    for name in ("weight", "bias"):
        program.state_dict[f"blocks.0.fc.{name}"].data.copy_(getattr(early, name))
    return program


@change(
    "exported in training mode",
    residual,
    ("bn", "stem"),
    why="Batch norms use the statistics of the batch, and change them at each call.",
)
def _(model: Residual) -> ExportedProgram:
    return exported(model.train(), batch_of("residual"))


@change(
    "padding of one convolution moved in a decomposed program",
    residual,
    ("blocks.1", "blocks.1.conv1"),
    why="The image is shifted by a pixel in one layer.",
)
def _(model: Residual) -> ExportedProgram:
    def edit(graph: fx.Graph) -> None:
        node = nodes(graph, aten.convolution.default)[3]
        with graph.inserting_before(node):
            moved = graph.call_function(aten.roll.default, (node.args[0], [1], [2]))
            moved.meta = dict(node.args[0].meta)
        with_argument(node, 0, moved)

    return rewritten(decomposed(model, batch_of("residual")), edit)


@change(
    "scale of attention left out in a program",
    gpt,
    ("blocks.0.attention", "blocks.0.attention.out", "blocks.0.attention.scaled_dot*"),
    why="Attention is sharper by the root of the width of a head.",
)
def _(model: GPT) -> ExportedProgram:
    def edit(graph: fx.Graph) -> None:
        node = nodes(graph, aten.scaled_dot_product_attention.default)[0]
        node.kwargs = {**node.kwargs, "scale": 1.0}

    return rewritten(exported(model, batch_of("gpt")), edit)


# ---- passes of torch.fx: the same ----------------------------------------------------------------


@refactor("batch norms folded by torch.fx", residual)
def _(model: Residual) -> nn.Module:
    from torch.fx.experimental.optimization import fuse

    with quietly():
        return fuse(model)


@refactor("GELU written out by a pass", perceptron)
def _(model: Perceptron) -> nn.Module:
    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x * 2**-0.5))

    def edit(graph: fx.Graph) -> None:
        for node in nodes(graph, F.gelu):
            node.target = gelu

    return traced(model, edit)


@refactor("ReLU as a clamp by a pass", residual)
def _(model: Residual) -> nn.Module:
    def edit(graph: fx.Graph) -> None:
        for node in nodes(graph, F.relu):
            node.target, node.args, node.kwargs = torch.clamp_min, (node.args[0], 0.0), {}

    return traced(model, edit)


# ---- passes of torch.fx: something else ----------------------------------------------------------


@change(
    "batch norm folded with epsilon 1e-3 for 1e-5",
    residual,
    ("blocks.1.conv1", "blocks.1.bn1"),
    why="Channels of little variance are scaled differently.",
)
def _(model: Residual) -> nn.Module:
    block = model.blocks[1]
    block.conv1, block.bn1 = folded(block.conv1, block.bn1, 1e-3), nn.Identity()
    return fx.symbolic_trace(model)


@change(
    "batch norm folded into the wrong convolution",
    residual,
    ("blocks.0.conv1", "blocks.0.bn1"),
    why="Each channel gets the scale and shift of another layer's.",
)
def _(model: Residual) -> nn.Module:
    block = model.blocks[0]
    block.conv1, block.bn1 = folded(block.conv1, block.bn2), nn.Identity()
    return fx.symbolic_trace(model)


@change(
    "tanh for exact GELU by a pass",
    perceptron,
    ("gelu*", "fc2", "norm1"),
    why="The two differ by up to 5e-4.",
)
def _(model: Perceptron) -> nn.Module:
    def edit(graph: fx.Graph) -> None:
        for node in nodes(graph, F.gelu):
            node.kwargs = {"approximate": "tanh"}

    return traced(model, edit)


@change(
    "leaky ReLU for ReLU by a pass",
    residual,
    ("blocks.1", "blocks.1.relu*", "blocks.1.leaky_relu*", "blocks.2.conv1"),
    why="What was zero is a hundredth of what it was before the ReLU.",
)
def _(model: Residual) -> nn.Module:
    def edit(graph: fx.Graph) -> None:
        node = nodes(graph, F.relu)[2]
        node.target, node.kwargs = F.leaky_relu, {"negative_slope": 0.01}

    return traced(model, edit)


@change(
    "residual sum bypassed by a pass",
    residual,
    ("blocks.2", "blocks.2.add*", "blocks.2.relu*"),
    why="The block forgets what it was given.",
)
def _(model: Residual) -> nn.Module:
    def edit(graph: fx.Graph) -> None:
        bypassed(graph, nodes(graph, operator.add)[2], 1)

    return traced(model, edit)


@change(
    "causal mask lost by a pass",
    gpt,
    ("blocks.0.attention", "blocks.0.attention.out", "blocks.0.attention.scaled_dot*"),
    why="Each token sees those after it.",
)
def _(model: GPT) -> nn.Module:
    def edit(graph: fx.Graph) -> None:
        node = nodes(graph, F.scaled_dot_product_attention)[0]
        node.kwargs = {**node.kwargs, "is_causal": False}

    return traced(model, edit)
