"""Experts, graphs and recurrences, as threads have them wrong; each with its fix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import perceptron
from corpus.models.small import flat, rows
from corpus.subject import Subject, subject

SHELF = Shelf("threads", "blind")
GITHUB = "https://github.com"

CUT = ("gradient", "detach", "no_grad", "graph", "torch.tensor", "copies")
DROPPED = ("never read", "nothing reads", "dropped", "no effect", "dead", "overwr", "not used")
SAMPLES = ("sample", "batch")


# ---- experts -------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Sends each sample to the expert that the router likes best."""

    def __init__(self, number: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(32, number)
        self.experts = nn.ModuleList(perceptron(32, 48, 32) for _ in range(number))
        self.weigh = lambda best: best

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.router(x).softmax(-1)
        best, index = scores.topk(1, -1)
        return scores, self.weigh(best), index[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        _, weight, index = self.chosen(x)
        return self.send(x, index) * weight

    def send(self, x: Tensor, index: Tensor) -> Tensor:
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            at = (index == number).nonzero()[:, 0]
            made = made.index_add(0, at, expert(x[at]))
        return made


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.moe, self.head = nn.Linear(64, 32), Experts(), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.head(x + self.moe(x))


def routed(model: nn.Module, loss: Any = F.cross_entropy) -> Subject:
    return subject(model, flat, loss, 64)


@SHELF.report(
    f"{GITHUB}/jingyaogong/minimind/issues/858",
    "weight of the one expert divided by itself",
    ("moe*", ""),
    ("gradient", "always 1", "constant", "itself", "normalis", "one value", "single", "cancel"),
)
def minimind(fixed: bool) -> Subject:
    """With one expert a token the weights sum to one alone, and the router cannot learn."""
    model = Routed()
    if not fixed:
        model.moe.weigh = lambda best: best / (best.sum(-1, keepdim=True) + 1e-20)
    return routed(model)


@SHELF.report(
    f"{GITHUB}/databricks/megablocks/pull/87",
    "weights of experts normalised over the batch",
    ("moe*", ""),
    (*SAMPLES, "axis", "dimension", "norm"),
)
def megablocks(fixed: bool) -> Subject:
    """Of one expert the axis of choices is squeezed away, and the last is that of samples."""

    class Sparse(Experts):
        def chosen(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            scores = self.router(x).softmax(-1)
            best, index = scores.max(-1)
            if not fixed:
                best = best / best.norm(p=1, dim=-1, keepdim=True)
            return scores, best[:, None], index

    model = Routed()
    model.moe = Sparse()
    return routed(model)


@SHELF.report(
    f"{GITHUB}/labmlai/annotated_deep_learning_paper_implementations/issues/95",
    "router weighs what goes in, and not what comes out",
    ("moe*", ""),
    ("scale", "multipl", "product", "weigh"),
)
def switch(fixed: bool) -> Subject:
    """The probability of the route scales the expert's input."""

    class Switch(Experts):
        def forward(self, x: Tensor) -> Tensor:
            _, weight, index = self.chosen(x)
            return self.send(x, index) * weight if fixed else self.send(x * weight, index)

    model = Routed()
    model.moe = Switch()
    return routed(model)


class Balanced(Routed):
    """Returns the balance of its experts, too."""

    def balance(self, scores: Tensor, index: Tensor) -> Tensor:
        share = F.one_hot(index, 4).float().mean(0)
        return 4 * (share * scores.mean(0)).sum()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x).relu()
        scores, _, index = self.moe.chosen(x)
        return self.head(x + self.moe(x)), self.balance(scores, index)


def with_balance(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target) + 0.1 * output[1]


@SHELF.report(
    f"{GITHUB}/mindspore-ai/hyper-parallel/issues/752",
    "shares of experts times scores of choices",
    ("", "moe*"),
    ("broadcast", "shape", "constant", "sum to", "sums to", "share"),
)
def hyper_parallel(fixed: bool) -> Subject:
    """Shares (experts) meet scores (choices), and sum to one whatever the routes are."""

    class Constant(Balanced):
        def balance(self, scores: Tensor, index: Tensor) -> Tensor:
            if fixed:
                return super().balance(scores, index)
            share = F.one_hot(index, 4).float().mean(0)
            return 4 * (share * scores.topk(1, -1).values.mean(0)).sum()

    return routed(Constant(), with_balance)


@SHELF.report(
    f"{GITHUB}/laekov/fastmoe/issues/49",
    "torch.tensor of the list of balance losses",
    ("", "moe*"),
    CUT,
)
def fastmoe(fixed: bool) -> Subject:
    """torch.tensor reads numbers out: the term is added, and nothing learns from it."""

    class Listed(Balanced):
        def balance(self, scores: Tensor, index: Tensor) -> Tensor:
            terms = [super().balance(scores, index)]
            return (torch.stack(terms) if fixed else torch.tensor(terms)).mean()

    return routed(Listed(), with_balance)


# ---- graphs --------------------------------------------------------------------------------------


def neighbours(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return digits as nodes, edges (2, edges) to each from its 5 nearest, and labels."""
    nodes, labels = flat(n)
    near = torch.cdist(nodes, nodes).topk(min(6, n), largest=False).indices[:, 1:]
    ends = torch.arange(n)[:, None].expand_as(near)
    return (nodes, torch.stack([near.flatten(), ends.flatten()])), labels


@SHELF.report(
    f"{GITHUB}/pyg-team/pytorch_geometric/issues/224",
    "attention of edges normalised by where they start",
    ("", "score*", "value*"),
    ("source", "target", "sum to", "sums to", "edges", "normalis", "softmax"),
)
def graph_attention(fixed: bool) -> Subject:
    """Messages are gathered at their target, and their weights sum to one at the source."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.score, self.head = (
                nn.Linear(64, 32),
                nn.Linear(64, 1),
                nn.Linear(32, 10),
            )

        def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
            source, target = edges
            x = self.value(nodes)
            weight = F.leaky_relu(self.score(torch.cat([x[source], x[target]], 1))).exp()
            group = target if fixed else source
            total = torch.zeros(len(x), 1).index_add(0, group, weight)
            sent = x[source] * weight / total[group]
            return self.head((x + torch.zeros_like(x).index_add(0, target, sent)).relu())

    return subject(Net(), neighbours, F.cross_entropy, 48)


@SHELF.report(
    f"{GITHUB}/dsgiitr/graph_nets/issues/13",
    "degrees without the self-loops that are added",
    ("", "first*", "second*"),
    ("degree", "self-loop", "self loop", "normalis"),
)
def graph_nets(fixed: bool) -> Subject:
    """The matrix has ones on its diagonal, and is divided by sums from before."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 10)

        def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
            linked = torch.zeros(len(nodes), len(nodes)).index_put(
                (edges[1], edges[0]), torch.ones(())
            )
            linked = torch.maximum(linked, linked.T)
            looped = linked + torch.eye(len(nodes))
            degree = (looped if fixed else linked).sum(1).clamp(min=1).rsqrt()
            spread = degree[:, None] * looped * degree
            return spread @ self.second((spread @ self.first(nodes)).relu())

    return subject(Net(), neighbours, F.cross_entropy, 48)


@SHELF.report(
    f"{GITHUB}/materialyzeai/matgl/pull/755",
    "messages gathered where they were sent",
    ("", "send*", "keep*"),
    ("source", "target", "direction", "sender", "receiver", "itself"),
)
def matgl(fixed: bool) -> Subject:
    """edge_index[0] has the senders: each node sums copies of itself."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.send, self.keep, self.head = (
                nn.Linear(64, 32),
                nn.Linear(64, 32),
                nn.Linear(32, 10),
            )

        def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
            source, target = edges
            sent, x = self.send(nodes)[source] / 5, self.keep(nodes)
            gathered = torch.zeros_like(x).index_add(0, target if fixed else source, sent)
            return self.head((x + gathered).relu())

    return subject(Net(), neighbours, F.cross_entropy, 48)


# ---- recurrences ---------------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/XiaLiPKU/RESCAN/issues/2",
    "new state under a name that nobody reads",
    ("", "given*", "kept*"),
    (*DROPPED, "first step", "gradient"),
)
def rescan(fixed: bool) -> Subject:
    """From the second step on the state is computed into z, and h stays as it was."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.given, self.kept, self.head = (
                nn.Linear(8, 24),
                nn.Linear(24, 24),
                nn.Linear(24, 10),
            )

        def forward(self, x: Tensor) -> Tensor:
            h = self.given(x[:, 0]).tanh()
            for step in x[:, 1:].unbind(1):
                z = (self.given(step) + self.kept(h)).tanh()
                h = z if fixed else h
            return self.head(h)

    return subject(Net(), rows, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/yunjey/pytorch-tutorial/issues/149",
    "last output of a recurrent layer that reads both ways",
    ("rnn*", ""),
    ("direction", "reverse", "one step", "last step", "bidirectional", "both ways"),
)
def both_ways(fixed: bool) -> Subject:
    """At the last step the way back has read that step alone."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 24, batch_first=True, bidirectional=True)
            self.head = nn.Linear(48, 10)

        def forward(self, x: Tensor) -> Tensor:
            read, _ = self.rnn(x)
            if fixed:
                return self.head(torch.cat([read[:, -1, :24], read[:, 0, 24:]], 1))
            return self.head(read[:, -1])

    return subject(Net(), rows, F.cross_entropy, 32)
