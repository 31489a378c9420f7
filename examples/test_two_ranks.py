"""DistributedDataParallel on the digits: each rank takes half of every batch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from examples.data import shuffled_batches
from examples.models.mlp import MLP
from examples.training import accuracy


@pytest.mark.modelhealth_ranks(2)
def test_trained_on_two_ranks(rank, digits, inspector):
    """It learns, is healthy on each rank, and has the same weights on both."""
    torch.manual_seed(0)  # the same weights, and the same order of batches, on each rank
    model = MLP()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=3e-3)
    for images, labels in shuffled_batches(digits.train_images, digits.train_labels, epochs=3):
        optimizer.zero_grad()
        F.cross_entropy(parallel(images[rank::2]), labels[rank::2]).backward()
        optimizer.step()
    assert accuracy(model, digits.test_images, digits.test_labels) > 0.9

    report = inspector(model).run_inspection(
        digits.test_images, target=digits.test_labels, loss=F.cross_entropy
    )
    report.assert_healthy()

    weights = model.head.weight.detach()
    of_all = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, weights)
    torch.testing.assert_close(of_all[0], of_all[1], rtol=0, atol=0)
