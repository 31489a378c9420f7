"""Healthy models that look like a fault of wiring."""

from __future__ import annotations

import functools

import torch.nn.functional as F

from corpus.cards import Shelf
from corpus.models.designs import SparseMoE, Tied
from corpus.models.fields import Ensemble, Scheduled, played
from corpus.models.libraries import Compressed, Rows, StatesOnly, WithoutContext, single_rows
from corpus.models.perception import EfficientNet, Masked, colours
from corpus.models.routed import (
    cached_angles,
    cached_keys,
    chunked_weights,
    dynamic_edges,
    equilibrium,
    equivariant,
    experts_that_choose,
    fast_weights,
    full_experts,
    gate_per_task,
    inner_step,
    kernels_by_image,
    links,
    looped_block,
    made_adapters,
    memory_bank,
    messages,
    mixture_of_depths,
    moving_digits,
    pondering,
    queue_of_keys,
    refining,
    relations,
    reservoir,
    sage,
    segments,
    shared_expert,
    slots,
    soft_experts,
    streaming,
    translator,
    truncated_gradients,
)
from corpus.models.small import flat, halves, itself, language_loss, rows
from corpus.variants import add_each, after_training, of_batch, with_model

SHELF = Shelf("wiring")
control = SHELF.control
add = functools.partial(add_each, SHELF)


control("five critics by stacked weights", with_model(
    Ensemble, played, lambda q, target: F.mse_loss(q, target[1].expand(5, -1))))  # fmt: skip

control("decoder that reads its own words", with_model(Scheduled, halves, language_loss, 32))


control("stochastic depth that drops whole blocks", with_model(
    lambda: EfficientNet(depth=6, drop=0.8), colours, F.cross_entropy, 2))  # fmt: skip

control("masked autoencoder", with_model(Masked, lambda n: (colours(n)[0], None), None, 16))
control("masked autoencoder, trained", after_training(with_model(
    Masked, lambda n: (colours(n)[0], None), None, 16), 20))  # fmt: skip

control("decoder tied to the encoder", with_model(Tied, itself, F.mse_loss))
control("2 of 32 experts", of_batch(with_model(SparseMoE, flat, F.cross_entropy), 16))
control("an adapter without its context", with_model(WithoutContext, flat, F.cross_entropy))
control("states of a tower without its summary", with_model(StatesOnly, rows, F.cross_entropy))
control("attention over one token", with_model(Rows, single_rows, F.cross_entropy))

for _window, _what in ((4, "two windows"), (16, "shorter than a window")):
    _healthy = with_model(lambda window=_window: Compressed(window), rows, F.cross_entropy)
    control(f"compressed attention, {_what}", _healthy)
    control(f"compressed attention, {_what}, trained", after_training(_healthy))

# ---- experts -------------------------------------------------------------------------------------


add(soft_experts, experts_that_choose, full_experts, shared_expert, mixture_of_depths,
    gate_per_task)  # fmt: skip

# ---- caches and memories -------------------------------------------------------------------------


add(segments, cached_keys, queue_of_keys, streaming, memory_bank, cached_angles,
    with_evaluation=False)  # fmt: skip

# ---- nets that make weights ----------------------------------------------------------------------


add(chunked_weights, kernels_by_image, inner_step, made_adapters, with_evaluation=False)

# ---- states carried from step to step ------------------------------------------------------------


add(truncated_gradients, fast_weights, equilibrium, looped_block, pondering, translator,
    moving_digits, slots, refining, reservoir)  # fmt: skip

# ---- graph nets ----------------------------------------------------------------------------------


add(messages, sage, equivariant, relations, dynamic_edges, links)
