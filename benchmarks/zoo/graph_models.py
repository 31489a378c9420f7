"""The graph networks of torch_geometric: its ready models, and two layers of each convolution."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as geometric
from torch import Tensor, nn

from benchmarks.zoo.architecture import Architecture, NotBuiltError
from corpus.subject import Subject

NODES = 60
EDGES = 240
WIDTH = 16
CLASSES = 4
RELATIONS = 3


def architectures() -> Iterator[Architecture]:
    """Yield the models, then a network for each convolution."""
    for name in ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN"):
        for extra in ({}, {"norm": "batch_norm"}, {"jk": "cat"}):
            said = f"{name} {extra or ''}".strip()
            yield Architecture("torch_geometric", said, _basic(name, extra))
    for name, make in _MODELS.items():
        yield Architecture("torch_geometric", name, make)
    for name in geometric.conv.__all__:
        if name.endswith("Conv") and not name.startswith("CuGraph"):
            yield Architecture("torch_geometric", name, _two_layers(name))


def _graph() -> dict[str, Tensor]:
    edges = torch.randint(0, NODES, (2, EDGES))
    loops = torch.arange(NODES).repeat(2, 1)
    edges = torch.cat([edges, edges.flip(0), loops], 1)
    count = edges.shape[1]
    return {
        "x": torch.randn(NODES, WIDTH),
        "edge_index": edges,
        "edge_type": torch.randint(0, RELATIONS, (count,)),
        "edge_attr": torch.rand(count, 2),
        "pos": torch.randn(NODES, 3),
        "batch": torch.arange(NODES) // (NODES // 6),
        "target": torch.randint(0, CLASSES, (NODES,)),
    }


def _basic(name: str, extra: dict[str, str]) -> Callable[[], Subject]:
    def make() -> Subject:
        model = getattr(geometric.models, name)(WIDTH, 32, 3, CLASSES, **extra)
        graph = _graph()
        inputs = (graph["x"], graph["edge_index"])
        return Subject(model, inputs, graph["target"], F.cross_entropy)

    return make


def _named(name: str, *args: Any, **options: Any) -> Callable[[], Subject]:
    def make() -> Subject:
        model, graph = getattr(geometric.models, name)(*args, **options), _graph()
        takes = inspect.signature(model.forward).parameters
        given = {key: value for key, value in graph.items() if key in takes}
        if "edge_weight" in takes and takes["edge_weight"].default is inspect.Parameter.empty:
            given["edge_weight"] = torch.rand(graph["edge_index"].shape[1])
        if "z" in takes:
            given["z"] = torch.randint(1, 9, (NODES,))
        return Subject(model, given)

    return make


_MODELS = {
    "PNA": _named("PNA", WIDTH, 32, 2, CLASSES, aggregators=["mean", "max"], scalers=["identity"],
                  deg=torch.ones(10, dtype=torch.long)),
    "GraphUNet": _named("GraphUNet", WIDTH, 32, CLASSES, depth=2),
    "SchNet": _named("SchNet", 32, 32, 2, 10, cutoff=2.0),
    "AttentiveFP": _named("AttentiveFP", WIDTH, 32, CLASSES, edge_dim=2, num_layers=2,
                          num_timesteps=2),
    "LINKX": _named("LINKX", NODES, WIDTH, 32, CLASSES, 2),
    "LightGCN": _named("LightGCN", NODES, 16, 2),
    "PMLP": _named("PMLP", WIDTH, 32, CLASSES, 2),
    "NeuralFingerprint": _named("NeuralFingerprint", WIDTH, 32, CLASSES, 2),
    "ViSNet": _named("ViSNet", hidden_channels=32, num_layers=2, num_heads=4, num_rbf=8,
                     cutoff=2.0),
    "SGFormer": _named("SGFormer", WIDTH, 32, CLASSES),
    "Polynormer": _named("Polynormer", WIDTH, 32, CLASSES, heads=2),
    "RECT_L": _named("RECT_L", WIDTH, 32),
}  # fmt: skip


class TwoLayers(nn.Module):
    """Two convolutions with a ReLU between them, and a classifier of nodes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        kind = getattr(geometric, name)
        self.first, self.second = _convolution(kind), _convolution(kind)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, **graph: Tensor) -> Tensor:
        x = _call(self.first, graph).relu()
        return self.head(_call(self.second, graph | {"x": x}))


def _perceptron(inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))


_ARGUMENTS: dict[str, Callable[[], Any]] = {
    "in_channels": lambda: WIDTH, "out_channels": lambda: WIDTH, "channels": lambda: WIDTH,
    "K": lambda: 2, "k": lambda: 4, "nn": _perceptron, "num_relations": lambda: RELATIONS,
    "dim": lambda: 2, "kernel_size": lambda: 3, "edge_dim": lambda: 2, "num_layers": lambda: 2,
    "space_dimensions": lambda: 3, "propagate_dimensions": lambda: WIDTH, "filter_size": lambda: 2,
    "num_node_types": lambda: 1, "alpha": lambda: 0.1, "layer": lambda: 1,
    "edge_channels": lambda: 2, "num_edge_types": lambda: RELATIONS,
    "edge_type_emb_dim": lambda: 4, "edge_attr_emb_dim": lambda: 4,
    "hidden_channels": lambda: WIDTH, "theta": lambda: 0.5,
    "aggregators": lambda: ["mean", "max"], "scalers": lambda: ["identity", "amplification"],
    "deg": lambda: torch.ones(12, dtype=torch.long),
    "conv": lambda: geometric.GCNConv(WIDTH, WIDTH),
    "mlp_h": lambda: _perceptron(WIDTH, 3), "mlp_f": lambda: _perceptron(WIDTH + 3),
    "mlp_g": _perceptron,
}  # fmt: skip
_FOR = {
    "NNConv": {"nn": lambda: _perceptron(2, WIDTH * WIDTH)},
    "EdgeConv": {"nn": lambda: _perceptron(2 * WIDTH)},
    "DynamicEdgeConv": {"nn": lambda: _perceptron(2 * WIDTH)},
    "PointNetConv": {"local_nn": lambda: _perceptron(WIDTH + 3)},
    "GINEConv": {"edge_dim": lambda: 2},
    "TransformerConv": {"edge_dim": lambda: 2},
    "CGConv": {"dim": lambda: 2},
    "GMMConv": {"dim": lambda: 2},
    "XConv": {"dim": lambda: 3},
    "GPSConv": {"conv": lambda: geometric.GCNConv(WIDTH, WIDTH)},
    "FAConv": {},
}  # fmt: skip


def _convolution(kind: type[nn.Module]) -> nn.Module:
    ways = _ARGUMENTS | _FOR.get(kind.__name__, {})
    given = {}
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name in ("self", "args", "kwargs"):
            continue
        if parameter.default is inspect.Parameter.empty or name in _FOR.get(kind.__name__, {}):
            if name not in ways:
                raise NotBuiltError(f"{kind.__name__} wants {name}")
            given[name] = ways[name]()
    return kind(**given)


def _call(layer: nn.Module, graph: dict[str, Tensor]) -> Tensor:
    takes = inspect.signature(layer.forward).parameters
    known = graph | {"x_0": graph["x"], "edge_weight": graph["edge_attr"][:, 0]}
    known |= {"pseudo": graph["edge_attr"], "hyperedge_index": graph["edge_index"] % 20}
    if type(layer).__name__ in ("FAConv", "GCN2Conv"):
        known["x_0"] = graph["x"]
    given = {}
    for name, parameter in takes.items():
        wanted = parameter.default is inspect.Parameter.empty
        if name in known and (wanted or (name == "edge_attr" and _takes_edges(layer))):
            given[name] = known[name]
    return layer(**given)


def _takes_edges(layer: nn.Module) -> bool:
    return getattr(layer, "edge_dim", None) is not None


def _two_layers(name: str) -> Callable[[], Subject]:
    def make() -> Subject:
        graph = _graph()
        target = graph.pop("target")
        return Subject(TwoLayers(name), graph, target, F.cross_entropy)

    return make
