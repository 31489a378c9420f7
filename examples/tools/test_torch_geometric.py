"""torch_geometric: graphs as the batch, classes of nodes and of whole graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("torch_geometric")

from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GCNConv, global_mean_pool
from torch_geometric.utils import grid

from pytest_modelhealth import ModelHealthError

# what torch_geometric says about itself
pytestmark = pytest.mark.filterwarnings("ignore:::torch_geometric")

EDGES, PLACES = grid(8, 8)


def graph_of(image, label):
    """Return an image as a graph: a node a pixel, joined to its neighbours."""
    features = torch.cat([image.reshape(64, 1), PLACES / 8], dim=1)
    return Data(x=features, edge_index=EDGES, y=label.reshape(1))


class Nodes(nn.Module):
    """Two rounds of messages, and classes for each node."""

    def __init__(self, convolution) -> None:
        super().__init__()
        self.first, self.second = convolution(3, 64), convolution(64, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, data):
        hidden = F.relu(self.first(data.x, data.edge_index))
        return self.head(F.relu(self.second(hidden, data.edge_index)))


class Graphs(Nodes):
    """The mean over the nodes of each graph, and classes for it."""

    def forward(self, data):
        return global_mean_pool(super().forward(data), data.batch)


@pytest.fixture
def loader(digits):
    """Batches of digits as graphs."""
    torch.manual_seed(0)
    pairs = zip(digits.train_images[:256], digits.train_labels[:256], strict=True)
    return DataLoader([graph_of(*pair) for pair in pairs], batch_size=32)


@pytest.mark.parametrize("convolution", [GCNConv, GATConv])
def test_classes_of_nodes_are_healthy(convolution, loader, inspector):
    """A `Data` object is the one argument of the model; the target is taken from it."""
    graph = loader.dataset[0]
    ink = (graph.x[:, 0] * 9).long()
    report = inspector(Nodes(convolution)).run_inspection(
        graph, target=ink, loss=F.cross_entropy, probes=True
    )
    report.assert_healthy()
    # neighbours see each other, as they should: they are no samples
    assert report.probes["sample_independence"].outcome == "not_applicable"


@pytest.mark.parametrize("convolution", [GCNConv, GATConv])
def test_classes_of_graphs_are_healthy(convolution, loader, inspector):
    """So is a batch of several."""
    batch = next(iter(loader))
    report = inspector(Graphs(convolution)).run_inspection(
        batch, target=batch.y, loss=F.cross_entropy, probes=True
    )
    report.assert_healthy()


def test_step_trains_the_model(loader, inspector):
    """The step of every tutorial."""

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch), batch.y)
        loss.backward()
        optimizer.step()
        return loss

    model = Graphs(GCNConv)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    inspector(model).run_step(step, optimizer, next(iter(loader))).assert_healthy()


class Unread(Graphs):
    """Classes of what came before the second round of messages: its result is dropped."""

    def forward(self, data):
        hidden = F.relu(self.first(data.x, data.edge_index))
        self.second(hidden, data.edge_index)
        return global_mean_pool(self.head(hidden), data.batch)


def test_messages_that_nobody_reads_fail(loader, inspector):
    """The convolution runs, and no gradient comes back to it."""
    batch = next(iter(loader))
    with pytest.raises(ModelHealthError, match=r"second\.lin \(missing_gradients\)"):
        inspector(Unread(GCNConv)).run_inspection(
            batch, target=batch.y, loss=F.cross_entropy
        ).assert_healthy()
