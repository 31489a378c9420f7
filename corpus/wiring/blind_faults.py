"""Faults of wiring, written before the checks that judge them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.written_out import (
    ConvNeXtLayer,
    actor_critic,
    audio_visual,
    bert_classifier,
    both_ways,
    captioner,
    click_model,
    convnext,
    denoiser,
    detector,
    digit_resnet,
    distillation,
    document_classifier,
    dynamics,
    flow,
    future_of,
    gan,
    highway,
    hyper_net,
    incremental_decoder,
    language_model,
    llama_tagger,
    mixer,
    mobilenet,
    molecule_net,
    nbeats,
    patient_model,
    perceiver,
    pixel_vae,
    point_set,
    row_reader,
    segmentation_net,
    simsiam,
    sparse_classifier,
    speech,
    state_space,
    story_memory,
    summarizer,
    temporal_net,
    translator,
    twin_retriever,
    weighted_features,
    wire,
)
from corpus.subject import Subject
from corpus.words import NEVER, ONE_SAMPLE, OVER_BATCH, RESIDUAL, UNUSED

SHELF = Shelf("wiring", "blind")
fault = SHELF.fault

# ---- a decoder: norm before each branch ----------------------------------------------------------


@fault(
    "residual forgotten around one feed-forward",
    language_model,
    ("trunk.3*",),
    RESIDUAL,
    why="Nothing of the stream passes the branch by: what layers before it added is lost.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor, future: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x), hidden=future)
        return self.feed(self.ln_2(x))

    wire(s.model.trunk[3], forward)


@fault(
    "norm left out before one attention",
    language_model,
    ("trunk.1*",),
    ("norm", *NEVER),
    why="The branch reads the stream unscaled, and its norm is never called.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor, future: Tensor) -> Tensor:
        x = x + self.attend(x, hidden=future)
        return x + self.feed(self.ln_2(x))

    wire(s.model.trunk[1], forward)


@fault(
    "mask not handed on in one layer",
    language_model,
    ("trunk.2*",),
    ("mask", "future", "causal", "not used", "unused"),
    why="Each position sees those after it: the model reads the answer.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor, future: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x))
        return x + self.feed(self.ln_2(x))

    wire(s.model.trunk[2], forward)


@fault(
    "one layer twice and its sibling never",
    language_model,
    ("trunk.2*", "trunk.3", "trunk"),
    (*NEVER, "twice"),
    why="A layer's weights are never called and never learn; its sibling is called twice.",
)
def _(s: Subject) -> None:
    def forward(self: Any, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        future = future_of(x)
        for index in (0, 1, 3, 3, 4):
            x = self.trunk[index](x, future)
        return self.unembed(self.ln_out(x))

    wire(s.model, forward)


@fault(
    "position ids all zero",
    language_model,
    ("positions",),
    ("constant", "same", "one row", "single", "index"),
    why="All positions get one embedding: the order of words is lost.",
)
def _(s: Subject) -> None:
    def forward(self: Any, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.zeros_like(ids))
        future = future_of(x)
        for layer in self.trunk:
            x = layer(x, future)
        return self.unembed(self.ln_out(x))

    wire(s.model, forward)


@fault(
    "softmax over the queries in one layer",
    language_model,
    ("trunk.4*",),
    ("softmax", "dim", "axis", "future", "causal"),
    why="Queries compete for a key, and each sum of weights is no average of values.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor, memory: Any = None, hidden: Any = None) -> Tensor:
        q, k = self.split(self.query(x)), self.split(self.key(x))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(hidden, float("-inf"))
        mixed = scores.softmax(-2) @ self.split(self.value(x))
        return self.merge(mixed.transpose(1, 2).flatten(2))

    wire(s.model.trunk[4].attend, forward)


@fault(
    "where with the same tensor on both sides",
    language_model,
    ("trunk.0*",),
    ("mask", "where(", "same", "future", "causal"),
    why="Both sides being equal, the mask has no influence: each position sees those after it.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor, memory: Any = None, hidden: Any = None) -> Tensor:
        q, k = self.split(self.query(x)), self.split(self.key(x))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        scores = torch.where(hidden, scores, scores)
        mixed = scores.softmax(-1) @ self.split(self.value(x))
        return self.merge(mixed.transpose(1, 2).flatten(2))

    wire(s.model.trunk[0].attend, forward)


# ---- an encoder: norm after each sum, documents of unequal length --------------------------------


@fault(
    "branch added to itself",
    document_classifier,
    ("layers.upper*",),
    ("residual", "itself", "twice", " sum", "added"),
    why="The stream is replaced by twice the branch: what layers before it added is lost.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor, padded: Tensor) -> Tensor:
        mixed, _ = self.mix(x, x, x, key_padding_mask=padded, need_weights=False)
        x = self.mix_norm(mixed + mixed)
        return self.out_norm(x + self.narrow(F.relu(self.widen(x))))

    wire(s.model.layers["upper"], forward)


@fault(
    "padding not masked in one layer",
    document_classifier,
    ("layers.inner*",),
    ("mask", "padd", "not used", "unused"),
    why="Words attend to padding, and a document's result depends on the length of its batch.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor, padded: Tensor) -> Tensor:
        mixed, _ = self.mix(x, x, x, need_weights=False)
        x = self.mix_norm(x + mixed)
        return self.out_norm(x + self.narrow(F.relu(self.widen(x))))

    wire(s.model.layers["inner"], forward)


@fault(
    "lengths ignored",
    document_classifier,
    ("",),
    ("lengths", *UNUSED),
    why="Padding counts as words, and a document's result depends on the length of its batch.",
)
def _(s: Subject) -> None:
    def forward(self: Any, ids: Tensor, lengths: Tensor) -> Tensor:
        padded = torch.zeros_like(ids, dtype=torch.bool)
        x = self.words(ids) + self.place
        for layer in self.layers.values():
            x = layer(x, padded)
        return self.label(x.mean(1))

    wire(s.model, forward)


@fault(
    "second sum takes the layer's input",
    document_classifier,
    ("layers.lower*",),
    RESIDUAL,
    why="What attention added to the stream is lost to all but the branch.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor, padded: Tensor) -> Tensor:
        mixed, _ = self.mix(x, x, x, key_padding_mask=padded, need_weights=False)
        y = self.mix_norm(x + mixed)
        return self.out_norm(x + self.narrow(F.relu(self.widen(y))))

    wire(s.model.layers["lower"], forward)


@fault(
    "norm called and its result dropped",
    document_classifier,
    ("layers.top*",),
    ("norm", *UNUSED),
    why="The stream goes on without its norm, which has no influence and never learns.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor, padded: Tensor) -> Tensor:
        mixed, _ = self.mix(x, x, x, key_padding_mask=padded, need_weights=False)
        x = x + mixed
        self.mix_norm(x)
        return self.out_norm(x + self.narrow(F.relu(self.widen(x))))

    wire(s.model.layers["top"], forward)


# ---- an encoder and a decoder --------------------------------------------------------------------


@fault(
    "cross-attention of one layer looks at the decoder",
    translator,
    ("dec_3*",),
    ("memory", "encoder", "same", "itself", "not used", "unused"),
    why="The layer never sees the source: its sentence does not depend on what is translated.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm_self(x), hidden=future_of(x))
        seen = self.norm_cross(x)
        x = x + self.cross_attn(seen, seen)
        return x + self.ff(self.norm_ff(x))

    wire(s.model.dec_3, forward)


@fault(
    "all sentences see the first one's memory",
    translator,
    ("enc_norm", "enc_2*"),
    ONE_SAMPLE,
    why="Every sentence is translated from the first one.",
)
def _(s: Subject) -> None:
    def encode(self: Any, source: Tensor) -> Tensor:
        x = self.source_embed(source) + self.source_place
        x = self.enc_norm(self.enc_2(self.enc_1(x)))
        return x[0:1].expand(len(source), -1, -1)

    wire(s.model, encode)


@fault(
    "one decoder layer's result not handed on",
    translator,
    ("dec_3*",),
    UNUSED,
    why="The layer runs and nothing reads its result, so that it never learns.",
)
def _(s: Subject) -> None:
    def forward(self: Any, source: Tensor, ids: Tensor) -> Tensor:
        memory = self.encode(source)
        x = self.target_embed(ids) + self.target_place[: ids.shape[1]]
        x = self.dec_1(x, memory)
        x = self.dec_2(x, memory)
        y = self.dec_3(x, memory)  # noqa: F841
        x = self.dec_4(x, memory)
        return self.vocabulary(self.dec_norm(x))

    wire(s.model, forward)


@fault(
    "keys made by the projection of the queries",
    translator,
    ("enc_2", "enc_2.attn*"),
    (*NEVER, "same"),
    why="The keys' own projection is never called, and each score is of a vector with its like.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor, memory: Any = None, hidden: Any = None) -> Tensor:
        q, k = self.split(self.query(x)), self.split(self.query(x))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        mixed = scores.softmax(-1) @ self.split(self.value(x))
        return self.merge(mixed.transpose(1, 2).flatten(2))

    wire(s.model.enc_2.attn, forward)


@fault(
    "heads merged without the transpose",
    translator,
    ("dec_2", "dec_2.self_attn*"),
    ("reshape", "transpose", "position", "future", "causal", "view"),
    why="Without it, features of different positions are mixed.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor, memory: Any = None, hidden: Any = None) -> Tensor:
        q, k = self.split(self.query(x)), self.split(self.key(x))
        scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(hidden, float("-inf"))
        mixed = scores.softmax(-1) @ self.split(self.value(x))
        return self.merge(mixed.reshape(x.shape))

    wire(s.model.dec_2.self_attn, forward)


# ---- a decoder with caches -----------------------------------------------------------------------


@fault(
    "cache of one layer overwritten at each step",
    incremental_decoder,
    ("steps.2*",),
    ("softmax", "constant", "single", "size 1", "length 1", "overwr", "cache"),
    why="The cache holds one step: attention over a single key is always one.",
)
def _(s: Subject) -> None:
    def remember(self: Any, cache: dict[str, Tensor], name: str, new: Tensor) -> Tensor:
        cache[name] = new
        return cache[name]

    wire(s.model.steps[2], remember)


@fault(
    "all layers write to the first cache",
    incremental_decoder,
    ("", "steps", "steps.?", "steps.?.to_k", "steps.?.to_v"),
    ("cache", "shared", "same"),
    why="Layers read the keys of others: none attends to what it made itself.",
)
def _(s: Subject) -> None:
    def forward(self: Any, ids: Tensor) -> Tensor:
        caches: list[dict[str, Tensor]] = [{}] * len(self.steps)
        logits = []
        for time in range(ids.shape[1]):
            x = self.wte(ids[:, time : time + 1]) + self.wpe.weight[time]
            for layer, cache in zip(self.steps, caches, strict=True):
                x = layer(x, cache)
            logits.append(self.lm_head(self.lm_norm(x)))
        return torch.cat(logits, 1)

    wire(s.model, forward)


# ---- a diffusion transformer ---------------------------------------------------------------------


@fault(
    "time overwritten by the label",
    denoiser,
    ("time_net*",),
    UNUSED,
    why="The time has no influence, and its net never learns.",
)
def _(s: Subject) -> None:
    def condition(self: Any, time: Tensor, label: Tensor) -> Tensor:
        condition = self.time_net(self.waves(time))
        condition = self.label_table(label)
        return condition  # noqa: RET504

    wire(s.model, condition)


@fault(
    "one gate computed and not applied",
    denoiser,
    ("transformer.2", "transformer.2.modulation*", "transformer.2.attention*"),
    ("gate", "chunk", *UNUSED),
    why="The gate has no influence, and what computes it never learns.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(condition)[:, None].chunk(6, -1)
        shift_a, scale_a, _gate_a, shift_m, scale_m, gate_m = parts
        x = x + self.attention(self.norm_a(x) * (1 + scale_a) + shift_a)
        return x + gate_m * self.mlp(self.norm_m(x) * (1 + scale_m) + shift_m)

    wire(s.model.transformer[2], forward)


@fault(
    "one layer conditioned on zeros",
    denoiser,
    ("transformer.1", "transformer.1.modulation*"),
    ("constant", "zeros", *UNUSED),
    why="The layer ignores time and label, and its modulation never learns from them.",
)
def _(s: Subject) -> None:
    def forward(self: Any, noised: Tensor, time: Tensor, label: Tensor) -> Tensor:
        x = self.patch_in(noised).flatten(2).transpose(1, 2) + self.place
        condition = self.condition(time, label)
        blank = torch.zeros_like(condition)
        for index, layer in enumerate(self.transformer):
            x = layer(x, blank if index == 1 else condition)
        patches = self.patch_out(self.final_norm(x)).transpose(1, 2)
        return F.fold(patches, (8, 8), 2, stride=2)

    wire(s.model, forward)


@fault(
    "time always zero",
    denoiser,
    ("time_net*",),
    ("constant", "zeros", "same", *UNUSED),
    why="The net is never told how noisy its image is.",
)
def _(s: Subject) -> None:
    def condition(self: Any, time: Tensor, label: Tensor) -> Tensor:
        return self.time_net(self.waves(torch.zeros_like(time))) + self.label_table(label)

    wire(s.model, condition)


# ---- a perceiver ---------------------------------------------------------------------------------


@fault(
    "latents read themselves",
    perceiver,
    ("read*", "row_in"),
    ("same", "itself", *UNUSED),
    why="The latents never see the image: all samples are the same.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        seen = self.row_in(x) + self.row_place  # noqa: F841
        latents = self.latents.expand(len(x), -1, -1)
        latents = latents + self.read(latents, latents)
        latents = self.ponder(self.think(latents))
        return self.vote(self.write(self.queries.expand(len(x), -1, -1), latents)).squeeze(-1)

    wire(s.model, forward)


@fault(
    "attention mixes keys in place of values",
    perceiver,
    ("think", "think.attn*"),
    (*NEVER, "same"),
    why="The values' projection is never called, and what is mixed is what was matched.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor, memory: Any = None, hidden: Any = None) -> Tensor:
        q, k = self.split(self.query(x)), self.split(self.key(x))
        mixed = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ k
        return self.merge(mixed.transpose(1, 2).flatten(2))

    wire(s.model.think.attn, forward)


# ---- transformers from the library ---------------------------------------------------------------


@fault(
    "residual forgotten in one output",
    bert_classifier,
    ("bert.encoder.layer.2", "bert.encoder.layer.2.output*"),
    (*RESIDUAL, "input_tensor"),
    why="Nothing of the stream passes the branch by: what layers before it added is lost.",
)
def _(s: Subject) -> None:
    def forward(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        hidden_states = self.dropout(self.dense(hidden_states))
        return self.LayerNorm(hidden_states)

    wire(s.model.bert.encoder.layer[2].output, forward)


@fault(
    "attention of one layer computed and not used",
    bert_classifier,
    ("bert.encoder.layer.3", "bert.encoder.layer.3.attention*"),
    UNUSED,
    why="Attention runs and nothing reads it: words of this layer see no others.",
)
def _(s: Subject) -> None:
    def forward(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        hidden_states = self.dropout(self.dense(hidden_states))
        return self.LayerNorm(input_tensor)

    wire(s.model.bert.encoder.layer[3].attention.output, forward)


@fault(
    "position ids all zero",
    llama_tagger,
    ("", "backbone", "backbone.rotary_emb*"),
    ("position", "constant", "same", "zeros"),
    why="All positions are turned alike: the order of words is lost.",
)
def _(s: Subject) -> None:
    def forward(self: Any, ids: Tensor) -> Tensor:
        places = torch.zeros_like(ids)
        states = self.backbone(ids, position_ids=places, use_cache=False).last_hidden_state
        return self.tag(states.mean(1))

    wire(s.model, forward)


@fault(
    "head reads the embeddings",
    llama_tagger,
    ("backbone", "backbone.layers*", "backbone.norm"),
    UNUSED,
    why="The whole backbone runs and nothing reads it, so that it never learns.",
)
def _(s: Subject) -> None:
    def forward(self: Any, ids: Tensor) -> Tensor:
        states = self.backbone(ids, output_hidden_states=True, use_cache=False).hidden_states
        return self.tag(states[0].mean(1))

    wire(s.model, forward)


@fault(
    "encoder fed the decoder's ids",
    summarizer,
    ("", "t5.encoder*"),
    UNUSED,
    why="The encoder reads the answer, and the text to summarise has no influence.",
)
def _(s: Subject) -> None:
    def forward(self: Any, source: Tensor, ids: Tensor) -> Tensor:
        memory = self.t5.encoder(input_ids=ids).last_hidden_state
        made = self.t5.decoder(input_ids=ids, encoder_hidden_states=memory, use_cache=False)
        return self.project(made.last_hidden_state)

    wire(s.model, forward)


# ---- convolutional nets --------------------------------------------------------------------------


@fault(
    "shortcut forgotten in one block",
    digit_resnet,
    ("stage1.2*",),
    (*RESIDUAL, *NEVER),
    why="Nothing of the stream passes the block by, and its gradient neither.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        out = F.relu(self.bn_a(self.conv_a(x)))
        out = self.bn_b(self.conv_b(out))
        return F.relu(out)

    wire(s.model.stage1[2], forward)


@fault(
    "shortcut written over the branch",
    digit_resnet,
    ("stage1.1*",),
    ("in-place", "in place", "copy", "erase", *UNUSED),
    why="What the branch computed is overwritten: its layers never learn.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        out = F.relu(self.bn_a(self.conv_a(x)))
        out = self.bn_b(self.conv_b(out))
        out[:] = self.shortcut(x)
        return F.relu(out)

    wire(s.model.stage1[1], forward)


@fault(
    "batch norm left out after one convolution",
    digit_resnet,
    ("stage2.2*",),
    ("norm", *NEVER),
    why="The norm is never called and never learns; its convolution goes on unscaled.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        out = F.relu(self.conv_a(x))
        out = self.bn_b(self.conv_b(out))
        return F.relu(out + self.shortcut(x))

    wire(s.model.stage2[2], forward)


@fault(
    "first block called for all",
    digit_resnet,
    ("stage1", "stage1.0", "stage1.[123]*"),
    (*NEVER, "same", "4 times", "repeat"),
    why="The other blocks are never called: the stage has the weights of one.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in self.stage1:
            x = self.stage1[0](x)
        return self.fc(self.stage2(x).mean((2, 3)))

    wire(s.model, forward)


@fault(
    "upsampled half joined to itself",
    segmentation_net,
    ("dec_half*", "enc_half*"),
    ("skip", "same", "twice", "itself", "duplicate", *UNUSED),
    why="The details of the encoder's level are lost to the decoder.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        full = self.enc_full(x)
        half = self.enc_half(F.max_pool2d(full, 2))
        quarter = self.enc_quarter(F.max_pool2d(half, 2))
        x = self.bottom(F.max_pool2d(quarter, 2))
        x = self.dec_quarter(torch.cat([self.up(x), quarter], 1))
        x = self.dec_half(torch.cat([self.up(x), self.up(x)], 1))
        x = self.dec_full(torch.cat([self.up(x), full], 1))
        return self.mask(x)

    wire(s.model, forward)


@fault(
    "skip from the wrong level",
    segmentation_net,
    ("dec_full*", "enc_full*", "enc_half*"),
    ("skip", "level", "twice"),
    why="Details of the level wanted are lost, and another's are read twice.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        full = self.enc_full(x)
        half = self.enc_half(F.max_pool2d(full, 2))
        quarter = self.enc_quarter(F.max_pool2d(half, 2))
        x = self.bottom(F.max_pool2d(quarter, 2))
        x = self.dec_quarter(torch.cat([self.up(x), quarter], 1))
        x = self.dec_half(torch.cat([self.up(x), half], 1))
        x = self.dec_full(torch.cat([self.up(x), self.up(half)], 1))
        return self.mask(x)

    wire(s.model, forward)


@fault(
    "bottom weighed by a constant zero",
    segmentation_net,
    ("bottom*", "dec_quarter*"),
    ("constant", "by zero", "by 0", "multipl", "zeros"),
    why="Times zero the bottom has no influence and no gradient.",
)
def _(s: Subject) -> None:
    s.model.bottom_weight = 0.0

    def forward(self: Any, x: Tensor) -> Tensor:
        full = self.enc_full(x)
        half = self.enc_half(F.max_pool2d(full, 2))
        quarter = self.enc_quarter(F.max_pool2d(half, 2))
        x = self.bottom_weight * self.bottom(F.max_pool2d(quarter, 2))
        x = self.dec_quarter(torch.cat([self.up(x), quarter], 1))
        x = self.dec_half(torch.cat([self.up(x), half], 1))
        x = self.dec_full(torch.cat([self.up(x), full], 1))
        return self.mask(x)

    wire(s.model, forward)


@fault(
    "drop rates that end at one",
    convnext,
    ("body.4*",),
    ("drop", "zeros", "by zero", "constant", "multipl"),
    why="The last block is always dropped: it never learns, in training at least.",
)
def _(s: Subject) -> None:
    rates = torch.linspace(0, 1, 5).tolist()
    s.model.body = nn.Sequential(*(ConvNeXtLayer(16, rate) for rate in rates))


@fault(
    "layer scale of one block a zero buffer",
    convnext,
    ("body.2*",),
    ("constant", "buffer", "gamma", "zeros", "by zero", "multipl"),
    why="A scale of zero that is no parameter never opens: the block stays without influence.",
)
def _(s: Subject) -> None:
    block = s.model.body[2]
    del block.gamma
    block.register_buffer("gamma", torch.zeros(16))


@fault(
    "gate of one block computed, not applied",
    mobilenet,
    ("features.3*",),
    ("gate", *UNUSED),
    why="The gate has no influence, and what computes it never learns.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate = self.excite(F.silu(self.squeeze(x.mean((2, 3))))).sigmoid()
        gate = gate[:, :, None, None]
        return x

    wire(s.model.features[3].se, forward)


@fault(
    "one smoothing for all levels",
    detector,
    ("smooth*",),
    (*NEVER, "same", "3 times"),
    why="The other two convolutions are never called: all levels share one.",
)
def _(s: Subject) -> None:
    def pyramid(self: Any, x: Tensor) -> list[Tensor]:
        c2 = self.c2(x)
        c3 = self.c3(c2)
        c4 = self.c4(c3)
        p4 = self.lateral["p4"](c4)
        p3 = self.lateral["p3"](c3) + F.interpolate(p4, scale_factor=2)
        p2 = self.lateral["p2"](c2) + F.interpolate(p3, scale_factor=2)
        return [self.smooth["p2"](level) for level in (p2, p3, p4)]

    wire(s.model, pyramid)


@fault(
    "boxes from the tower of the classes",
    detector,
    ("box_tower*", "cls_tower*", "box_pred"),
    (*NEVER, "same"),
    why="The boxes' own tower is never called and never learns.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        classes, found = [], []
        for level in self.pyramid(x):
            classes.append(self.cls_logits(self.cls_tower(level)).flatten(2))
            found.append(self.box_pred(self.cls_tower(level)).flatten(2))
        return torch.cat(classes, 2).squeeze(1), torch.cat(found, 2)

    wire(s.model, forward)


@fault(
    "residual forgotten around one token mixing",
    mixer,
    ("mixers.3*",),
    RESIDUAL,
    why="Nothing of the stream passes the branch by: what layers before it added is lost.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.token_mlp(self.token_norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mlp(self.channel_norm(x))

    wire(s.model.mixers[3], forward)


@fault(
    "one token mixing without the transpose",
    mixer,
    ("mixers.1*",),
    ("transpose", "dimension", "axis", "dim "),
    why="Features are mixed in place of tokens, which never meet in this layer.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = x + self.token_mlp(self.token_norm(x))
        return x + self.channel_mlp(self.channel_norm(x))

    wire(s.model.mixers[1], forward)


# ---- nets that make something --------------------------------------------------------------------


@fault(
    "loss of the input, not of what was made",
    pixel_vae,
    ("generate*",),
    UNUSED,
    why="What was made is not in the loss: the decoder never learns.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.recognise(x))
        mu, logvar = self.to_mu(hidden), self.to_logvar(hidden)
        made = self.generate(self.sample(mu, logvar))  # noqa: F841
        return x, mu, logvar

    wire(s.model, forward)


@fault(
    "mu passed for the variance",
    pixel_vae,
    ("to_logvar", "to_mu"),
    ("same", "twice", *UNUSED),
    why="The variance's own layer is not read where it is needed, and means stand for variances.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.recognise(x))
        mu, logvar = self.to_mu(hidden), self.to_logvar(hidden)  # noqa: F841
        return self.generate(self.sample(mu, mu)), mu, mu

    wire(s.model, forward)


@fault(
    "generator not told the label",
    gan,
    ("generator_label", "generator*"),
    (*NEVER, "zeros", "constant"),
    why="The generator cannot know which digit is wanted, and its embedding never learns.",
)
def _(s: Subject) -> None:
    def make(self: Any, noise: Tensor, labels: Tensor) -> Tensor:
        return self.generator(torch.cat([noise, torch.zeros(len(noise), 8)], 1))

    wire(s.model, make)


@fault(
    "critic never sees a real digit",
    gan,
    ("", "critic*"),
    ("same", "twice", *UNUSED),
    why="Two fakes are told apart: the critic cannot learn what is real.",
)
def _(s: Subject) -> None:
    def forward(self: Any, noise: Tensor, real: Tensor, labels: Tensor) -> dict[str, Tensor]:
        fake = self.make(noise, labels)
        return {
            "real": self.judge(fake.detach(), labels),
            "caught": self.judge(fake.detach(), labels),
            "fooled": self.fool(fake, labels),
        }

    wire(s.model, forward)


@fault(
    "all couplings keep the same half",
    flow,
    ("", "couple_b*", "couple_d*"),
    ("mask", "kept", "same", "half", "unchanged", "identity", "untouched"),
    why="One half passes all couplings unchanged: the flow cannot model it.",
)
def _(s: Subject) -> None:
    for couple in (s.model.couple_b, s.model.couple_d):
        couple.kept = s.model.couple_a.kept


@fault(
    "log-determinant overwritten",
    flow,
    ("", "couple_[abc]", "couple_[abc].scale_net*"),
    ("last", *UNUSED),
    why="All determinants but the last are lost: the likelihood is wrong.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        for couple in (self.couple_a, self.couple_b, self.couple_c, self.couple_d):
            x, log_det = couple(x)
        return (0.5 * (x**2).sum(1) - log_det).mean()

    wire(s.model, forward)


# ---- recurrent nets and series -------------------------------------------------------------------


@fault(
    "state begun anew at every step",
    row_reader,
    ("", "reset", "update", "propose"),
    ("constant", "zeros", "hidden state", "carr", "recurr"),
    why="Nothing is remembered from one row to the next.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        states = []
        for row in x.unbind(1):
            h = torch.zeros(len(x), self.width)
            h = self.step(row, h)
            states.append(h)
        return self.digit(self.summarise(torch.stack(states, 1)))

    wire(s.model, forward)


@fault(
    "softmax over a dimension of one",
    row_reader,
    ("importance",),
    ("softmax", "size 1", "constant", "single", "one element", "dim", "axis"),
    why="A softmax over one value is always one: the importance has no influence.",
)
def _(s: Subject) -> None:
    def summarise(self: Any, states: Tensor) -> Tensor:
        weights = torch.softmax(self.importance(states), dim=-1)
        return (weights * states).sum(1)

    wire(s.model, summarise)


@fault(
    "time and batch confused in a view",
    row_reader,
    ("", "importance"),
    ("view", "reshape", *OVER_BATCH),
    why="Rows of different samples are mixed.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), self.width)
        states = []
        for row in x.unbind(1):
            h = self.step(row, h)
            states.append(h)
        return self.digit(self.summarise(torch.stack(states).view(len(x), -1, self.width)))

    wire(s.model, forward)


@fault(
    "one direction joined to itself",
    both_ways,
    ("right_to_left",),
    ("same", "twice", "itself", *UNUSED),
    why="The other direction runs and nothing reads it, so that it never learns.",
)
def _(s: Subject) -> None:
    def forward(self: Any, ids: Tensor) -> Tensor:
        x = self.lexicon(ids)
        ahead = self.read(self.left_to_right, x)
        back = self.read(self.right_to_left, x.flip(1))  # noqa: F841
        return self.verdict(torch.cat([ahead, ahead], 1))

    wire(s.model, forward)


@fault(
    "cell state not carried on",
    both_ways,
    ("left_to_right", "right_to_left"),
    ("cell state", "constant", "zeros", "carr", *UNUSED),
    why="The long memory begins anew at every step: nothing is remembered by it.",
)
def _(s: Subject) -> None:
    def read(self: Any, cell: nn.LSTMCell, x: Tensor) -> Tensor:
        h = c = torch.zeros(len(x), self.width)
        for word in x.unbind(1):
            h, _ = cell(word, (h, c))
        return h

    wire(s.model, read)


@fault(
    "state of one scan not carried on",
    state_space,
    ("scan1*",),
    ("carr", "recurr", *UNUSED),
    why="Nothing is remembered from one step to the next.",
)
def _(s: Subject) -> None:
    def scan(self: Any, u: Tensor) -> Tensor:
        delta = F.softplus(self.to_delta(u)).unsqueeze(-1)
        drive = delta * self.to_b(u).unsqueeze(2) * u.unsqueeze(-1)
        outputs = []
        for time in range(u.shape[1]):
            state = drive[:, time]
            outputs.append((state * self.to_c(u[:, time]).unsqueeze(1)).sum(-1))
        return torch.stack(outputs, 1) + self.feedthrough * u

    wire(s.model.scan1.ssm, scan)


@fault(
    "branch added to the normed stream",
    state_space,
    ("scan3*",),
    (*RESIDUAL, "norm"),
    why="The stream itself is lost: what goes on was normed at every layer.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.rms(x)
        return x + self.ssm(x)

    wire(s.model.scan3, forward)


@fault(
    "backcast subtracted and the result dropped",
    nbeats,
    ("stages.*.backcast",),
    UNUSED,
    why="Each stage sees the whole series: nothing is left for the next to explain, or all is.",
)
def _(s: Subject) -> None:
    def forward(self: Any, past: Tensor) -> tuple[Tensor, Tensor]:
        rest, total = past, torch.zeros(len(past), 6)
        for stage in self.stages:
            backcast, forecast = stage(rest)
            torch.sub(rest, backcast)
            total = total + forecast
        return total, rest

    wire(s.model, forward)


@fault(
    "forecasts overwritten by the last",
    nbeats,
    ("stages", "stages.[012]", "stages.[012].forecast"),
    ("last", *UNUSED),
    why="Forecasts of all stages but the last are lost.",
)
def _(s: Subject) -> None:
    def forward(self: Any, past: Tensor) -> tuple[Tensor, Tensor]:
        rest = past
        for stage in self.stages:
            backcast, forecast = stage(rest)
            rest = rest - backcast
            total = forecast
        return total, rest

    wire(s.model, forward)


@fault(
    "every level reads the lowest",
    temporal_net,
    ("levels", "levels.0*", "levels.1*", "levels.2*"),
    ("last", "same", *UNUSED),
    why="Levels in between run and nothing reads them, so that they never learn.",
)
def _(s: Subject) -> None:
    def forward(self: Any, past: Tensor) -> Tensor:
        x = self.lift(past.unsqueeze(1))
        for level in self.levels:
            y = level(x)
        return self.predict(y[:, :, -1])

    wire(s.model, forward)


@fault(
    "zip ends before the last level",
    temporal_net,
    ("levels.3*", "levels"),
    NEVER,
    why="The last level is never called and never learns.",
)
def _(s: Subject) -> None:
    def forward(self: Any, past: Tensor) -> Tensor:
        x = self.lift(past.unsqueeze(1))
        for level, dilation in zip(self.levels, (1, 2, 4), strict=False):
            level.dilation = dilation
            x = level(x)
        return self.predict(x[:, :, -1])

    wire(s.model, forward)


@fault(
    "convolution of one block not added",
    speech,
    ("conformer.1*",),
    UNUSED,
    why="The convolution runs and nothing reads its result, so that it never learns.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor, silent: Tensor) -> Tensor:
        x = x + self.att(self.norm_att(x), hidden=silent)
        y = self.convolve(self.norm_conv(x))
        y = x + 0.5 * self.ffn(self.norm_ffn(x))
        return y  # noqa: RET504

    wire(s.model.conformer[1], forward)


@fault(
    "silence not masked in one block",
    speech,
    ("conformer.2*",),
    ("mask", "silent", "padd", "not used", "unused"),
    why="Sound attends to silence, and a result depends on the length of its batch.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor, silent: Tensor) -> Tensor:
        x = x + self.att(self.norm_att(x))
        x = x + self.convolve(self.norm_conv(x))
        return x + 0.5 * self.ffn(self.norm_ffn(x))

    wire(s.model.conformer[2], forward)


@fault(
    "one attention sees the mean of the batch",
    speech,
    ("conformer.0*",),
    ("mean", "average", *OVER_BATCH),
    why="Each sample's result depends on the others in its batch.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor, silent: Tensor) -> Tensor:
        seen = self.norm_att(x).mean(0, keepdim=True).expand_as(x)
        x = x + self.att(seen, hidden=silent)
        x = x + self.convolve(self.norm_conv(x))
        return x + 0.5 * self.ffn(self.norm_ffn(x))

    wire(s.model.conformer[0], forward)


@fault(
    "every step begins at the start",
    dynamics,
    ("", "derivative*", "observe"),
    ("same", "identical", "repeat", "carr", "constant"),
    why="Nothing moves on: each step gives the first one again.",
)
def _(s: Subject) -> None:
    def forward(self: Any, past: Tensor) -> Tensor:
        start, seen = self.initial(past), []
        for _ in range(6):
            state = start + 0.3 * self.derivative(start)
            seen.append(self.observe(state))
        return torch.cat(seen, 1)

    wire(s.model, forward)


@fault(
    "only the last of the list is used",
    dynamics,
    ("", "observe"),
    ("last", "same", "identical", "repeat", *UNUSED),
    why="The steps between are lost: every time gets the last state.",
)
def _(s: Subject) -> None:
    def forward(self: Any, past: Tensor) -> Tensor:
        state, seen = self.initial(past), []
        for _ in range(6):
            state = state + 0.3 * self.derivative(state)
            seen.append(self.observe(state))
        return seen[-1].expand(-1, 6)

    wire(s.model, forward)


# ---- graphs, sets, tables and recommendations ----------------------------------------------------


@fault(
    "messages of one round added out of place",
    molecule_net,
    ("round2*",),
    ("zeros", "constant", "index_add", *UNUSED),
    why="The sum is made in a copy that nobody reads: no atom hears of another in this round.",
)
def _(s: Subject) -> None:
    def gather(self: Any, nodes: Tensor, messages: Tensor, target: Tensor) -> Tensor:
        total = torch.zeros_like(nodes)
        total.index_add(0, target, messages)
        return total

    wire(s.model.round2, gather)


@fault(
    "readout takes the first round for all",
    molecule_net,
    ("round2*", "round3*"),
    ("same", "dead", *UNUSED),
    why="Later rounds run and nothing reads them, so that they never learn.",
)
def _(s: Subject) -> None:
    def forward(self: Any, atoms: Tensor, edges: Tensor, bonds: Tensor) -> Tensor:
        nodes, history = self.atom(atoms), []
        for layer in (self.round1, self.round2, self.round3):
            nodes = layer(nodes, edges, bonds)
            history.append(nodes)
        molecules = torch.cat([history[0] for _ in history], 1).view(-1, 6, 48).sum(1)
        return self.property(molecules)

    wire(s.model, forward)


@fault(
    "bonds set to zero",
    molecule_net,
    ("", "round?", "round?.message*"),
    ("bonds", "zeros", "constant", *UNUSED),
    why="Kinds of bonds cannot be told apart.",
)
def _(s: Subject) -> None:
    def forward(self: Any, atoms: Tensor, edges: Tensor, bonds: Tensor) -> Tensor:
        nodes, history = self.atom(atoms), []
        bonds = torch.zeros_like(bonds)
        for layer in (self.round1, self.round2, self.round3):
            nodes = layer(nodes, edges, bonds)
            history.append(nodes)
        return self.property(torch.cat(history, 1).view(-1, 6, 48).sum(1))

    wire(s.model, forward)


@fault(
    "all tables looked up by the user",
    click_model,
    ("", "tables*"),
    ("same", "column", "index", "indices", *UNUSED),
    why="The other columns are never read: item and device have no influence.",
)
def _(s: Subject) -> None:
    def look_up(self: Any, ids: Tensor) -> list[Tensor]:
        return [table(ids[:, 0] % table.num_embeddings) for table in self.tables.values()]

    wire(s.model, look_up)


@fault(
    "device looked up by the row number",
    click_model,
    ("tables.device",),
    ("index", "indices", "constant", "arange", *UNUSED),
    why="What is learnt for a place in the batch means nothing in the next.",
)
def _(s: Subject) -> None:
    def look_up(self: Any, ids: Tensor) -> list[Tensor]:
        found = [self.tables[name](ids[:, i]) for i, name in enumerate(("user", "item", "city"))]
        found.append(self.tables["device"](torch.arange(len(ids)) % 5))
        return found

    wire(s.model, look_up)


@fault(
    "deep net computed and not added",
    click_model,
    ("deep*", "numbers"),
    UNUSED,
    why="The deep net runs and nothing reads its result, so that it never learns.",
)
def _(s: Subject) -> None:
    def forward(self: Any, ids: Tensor, numbers: Tensor) -> Tensor:
        found = self.look_up(ids)
        total = torch.stack(found, 1)
        logits = self.deep(torch.cat([*found, self.numbers(numbers)], 1)).squeeze(1)
        logits = 0.5 * (total.sum(1) ** 2 - (total**2).sum(1)).sum(1)
        return logits  # noqa: RET504

    wire(s.model, forward)


@fault(
    "two tasks given one head",
    patient_model,
    ("tasks", "tasks.radius", "tasks.texture"),
    ("same", "shared", "twice", "tied", "2 times"),
    why="One head's weights have to serve two tasks, and the other never learns.",
)
def _(s: Subject) -> None:
    s.model.tasks["texture"] = s.model.tasks["radius"]


@fault(
    "loss of one task takes another's output",
    patient_model,
    ("tasks.texture",),
    UNUSED,
    why="The head of the task is not in any loss: it never learns.",
)
def _(s: Subject) -> None:
    def loss(output: Any, target: dict[str, Tensor]) -> Tensor:
        made, log_sigma = output
        benign = F.binary_cross_entropy_with_logits(made["benign"], target["benign"])
        radius = F.mse_loss(made["radius"], target["radius"])
        texture = F.mse_loss(made["radius"], target["texture"])
        losses = torch.stack([benign, radius, texture])
        return (losses * torch.exp(-log_sigma) + log_sigma).sum()

    s.loss = loss


@fault(
    "weights of the points taken over the batch",
    point_set,
    ("", "score"),
    ("softmax", *OVER_BATCH),
    why="Samples compete with each other for weight, in place of points in one sample.",
)
def _(s: Subject) -> None:
    def weights(self: Any, points: Tensor) -> Tensor:
        return self.score(points).softmax(0)

    wire(s.model, weights)


class ClosedGate(nn.Module):
    """A gate fixed shut until training has warmed up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("opening", torch.full((width,), -200.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.opening.expand_as(x)


@fault(
    "one gate closed by a buffer",
    highway,
    ("gates.3", "transforms.3"),
    ("closed", "constant", "buffer", "saturat", "sigmoid"),
    why="A gate shut by a number that is no parameter never opens.",
)
def _(s: Subject) -> None:
    s.model.gates[3] = ClosedGate(48)


@fault(
    "gate weighs the same tensor twice",
    highway,
    ("", "gates*"),
    ("same", "cancel", "both", "carr", "residual"),
    why="Both ways are the same tensor: their weights cancel, and the gate has no influence.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        for transform, gate in zip(self.transforms, self.gates, strict=True):
            share = torch.sigmoid(gate(x))
            x = torch.relu(transform(x))
            x = share * x + (1 - share) * x
        return self.leave(x)

    wire(s.model, forward)


# ---- nets of several parts -----------------------------------------------------------------------


@fault(
    "actions drawn anew, not those taken",
    actor_critic,
    ("", "actor"),
    ("actions", *UNUSED),
    why="The policy is told how good actions were that it did not take.",
)
def _(s: Subject) -> None:
    def forward(self: Any, seen: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
        hidden = self.torso(seen)
        policy = torch.distributions.Categorical(logits=self.actor(hidden))
        value = self.critic(hidden).squeeze(1)
        actions = policy.sample()
        policy_loss = -(policy.log_prob(actions) * (returns - value.detach())).mean()
        value_loss = F.mse_loss(value, returns)
        return policy_loss + 0.5 * value_loss - 0.01 * policy.entropy().mean()

    wire(s.model, forward)


@fault(
    "first expert called for all",
    sparse_classifier,
    ("sparse_a", "sparse_a.experts*"),
    (*NEVER, "same", "4 times"),
    why="The other experts are never called and never learn.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.norm(x)
        weights, balance = self.route(seen)
        for index in range(len(self.experts)):
            x = x + weights[:, index : index + 1] * self.experts[0](seen)
        return x, balance

    wire(s.model.sparse_a, forward)


@fault(
    "balance of the first layer overwritten",
    sparse_classifier,
    ("", "sparse_a", "sparse_a.router"),
    UNUSED,
    why="The first layer's experts are not balanced: its term is lost.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x, balance = self.sparse_a(self.inlet(x))
        x, balance = self.sparse_b(x)
        return self.outlet(x), balance

    wire(s.model, forward)


@fault(
    "both towers fed the anchor",
    twin_retriever,
    ("", "candidate_tower*"),
    ("same", *UNUSED),
    why="The candidates have no influence: each anchor is matched with itself.",
)
def _(s: Subject) -> None:
    def forward(self: Any, anchor: Tensor, candidate: Tensor) -> Tensor:
        left = F.normalize(self.anchor_tower(anchor), dim=1)
        right = F.normalize(self.candidate_tower(anchor), dim=1)
        return left @ right.T * self.log_scale.exp()

    wire(s.model, forward)


@fault(
    "anchors compared with themselves",
    twin_retriever,
    ("candidate_tower*",),
    UNUSED,
    why="The other tower runs and nothing reads it, so that it never learns.",
)
def _(s: Subject) -> None:
    def forward(self: Any, anchor: Tensor, candidate: Tensor) -> Tensor:
        left = F.normalize(self.anchor_tower(anchor), dim=1)
        right = F.normalize(self.candidate_tower(candidate), dim=1)
        right = left
        return left @ right.T * self.log_scale.exp()

    wire(s.model, forward)


@fault(
    "second view never looked at",
    simsiam,
    ("", "backbone*"),
    ("same", "twice", *UNUSED),
    why="A view is compared with itself: nothing is learnt of what two have in common.",
)
def _(s: Subject) -> None:
    def forward(self: Any, one: Tensor, two: Tensor) -> Tensor:
        z1 = self.projector(F.relu(self.backbone(one)))
        z2 = self.projector(F.relu(self.backbone(one)))
        p1, p2 = self.predictor(z1), self.predictor(z2)
        return 0.5 * self.distance(p1, z2) + 0.5 * self.distance(p2, z1)

    wire(s.model, forward)


@fault(
    "result of the second hop not handed on",
    story_memory,
    ("hop_2",),
    UNUSED,
    why="The second hop runs and nothing reads its result, so that it never learns.",
)
def _(s: Subject) -> None:
    def forward(self: Any, story: Tensor, question: Tensor) -> Tensor:
        query = self.ask(question).sum(1)
        first = self.hop_1(query) + self.look(query, story)
        second = self.hop_2(first) + self.look(first, story)  # noqa: F841
        third = self.hop_3(first) + self.look(first, story)
        return self.answer(third)

    wire(s.model, forward)


@fault(
    "memory filled with the question",
    story_memory,
    ("", "keys"),
    ("softmax", "constant", *UNUSED),
    why="The memory holds the question alone: the story has no influence.",
)
def _(s: Subject) -> None:
    def forward(self: Any, story: Tensor, question: Tensor) -> Tensor:
        story = question.unsqueeze(1)
        query = self.ask(question).sum(1)
        query = self.hop_1(query) + self.look(query, story)
        query = self.hop_2(query) + self.look(query, story)
        query = self.hop_3(query) + self.look(query, story)
        return self.answer(query)

    wire(s.model, forward)


@fault(
    "weights made from the first sample",
    hyper_net,
    ("make_weight", "context*"),
    (*ONE_SAMPLE, "same"),
    why="All samples are classified with the weights of the first one's context.",
)
def _(s: Subject) -> None:
    def made_layer(self: Any, x: Tensor, context: Tensor) -> Tensor:
        weight = self.make_weight(context)[0].view(16, 16)
        return F.linear(x, weight) + self.make_bias(context)

    wire(s.model, made_layer)


@fault(
    "picture joined to itself",
    audio_visual,
    ("senses.audio*",),
    ("same", "twice", "itself", *UNUSED),
    why="The sound has no influence, and what reads it never learns.",
)
def _(s: Subject) -> None:
    def forward(self: Any, audio: Tensor, video: Tensor) -> Tensor:
        heard, seen = self.senses["audio"](audio), self.senses["video"](video)
        heard = seen
        return self.speak(F.relu(self.fuse(torch.cat([heard, seen], 1))))

    wire(s.model, forward)


@fault(
    "sound waits for a step that never comes",
    audio_visual,
    ("senses.audio*",),
    (*NEVER, "zeros", "constant"),
    why="The sound has no influence, and what reads it never learns.",
)
def _(s: Subject) -> None:
    s.model.steps_done = 0

    def forward(self: Any, audio: Tensor, video: Tensor) -> Tensor:
        seen = self.senses["video"](video)
        heard = torch.zeros_like(seen)
        if self.steps_done > 1000:
            heard = self.senses["audio"](audio)
        return self.speak(F.relu(self.fuse(torch.cat([heard, seen], 1))))

    wire(s.model, forward)


@fault(
    "student taught by itself",
    distillation,
    ("", "teacher*"),
    (*NEVER, "same", "itself", "twice"),
    why="The teacher is never asked: a student that agrees with itself learns nothing.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.student(x)
        return self.student(x), wanted

    wire(s.model, forward)


@fault(
    "caption not shifted",
    captioner,
    ("", "glossary", "writer"),
    ("leak", "target", "shift", "label"),
    why="The writer reads the word that it has to predict.",
)
def _(s: Subject) -> None:
    def forward(self: Any, picture: Tensor, caption: Tensor) -> Tensor:
        start = torch.tanh(self.picture(picture)).unsqueeze(0)
        states, _ = self.writer(self.glossary(caption), start)
        return F.cross_entropy(self.token(states).flatten(0, 1), caption.flatten())

    wire(s.model, forward)


@fault(
    "writer begins from zeros like the picture",
    captioner,
    ("picture",),
    ("zeros", "constant", *UNUSED),
    why="The picture has no influence on the caption, and what reads it never learns.",
)
def _(s: Subject) -> None:
    def forward(self: Any, picture: Tensor, caption: Tensor) -> Tensor:
        start = torch.zeros_like(self.picture(picture)).unsqueeze(0)
        begin = torch.zeros_like(caption[:, :1])
        states, _ = self.writer(self.glossary(torch.cat([begin, caption[:, :-1]], 1)), start)
        return F.cross_entropy(self.token(states).flatten(0, 1), caption.flatten())

    wire(s.model, forward)


@fault(
    "last level taken for every level",
    weighted_features,
    ("", "mixture", "level*"),
    ("same", "identical", "last", "cancel", "repeat"),
    why="A mixture of equal levels is that level whatever the weights: these never learn.",
)
def _(s: Subject) -> None:
    def levels(self: Any, x: Tensor) -> list[Tensor]:
        found = []
        for layer in self.level.values():
            x = F.relu(layer(x))
            found.append(x)
        return [found[-1] for _ in found]

    wire(s.model, levels)


@fault(
    "head reads the first level",
    weighted_features,
    ("level.h1", "level.h2", "level.h3"),
    ("dead", *UNUSED),
    why="Levels above run and nothing reads them, so that they never learn.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        found = torch.stack(self.levels(x), -1)
        return self.probe(self.norm(found[..., 0]))

    wire(s.model, forward)
