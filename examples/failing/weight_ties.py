"""A tie that a configuration asks for and the model has not."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def train_step(model, optimizer, batch):
    """Do the usual."""
    optimizer.zero_grad()
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    return loss


def test_step(inspector):
    """Fails: words are read by one matrix and written by another."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=24, n_embd=32, n_layer=2, n_head=2)
    )
    # The fault: a head was loaded by hand, and is a parameter of its own since.
    model.lm_head.weight = torch.nn.Parameter(model.transformer.wte.weight.detach().clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inspector(model).run_step(train_step, optimizer, torch.randint(50, (16, 24)))
