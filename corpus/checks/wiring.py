"""Models that run and learn and are put together wrongly, and designs that look alike."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.checks.wirings import (
    LENGTH,
    SAMPLES,
    WIDTH,
    Activated,
    Block,
    Bottleneck,
    Cell,
    Deaf,
    Doubled,
    Holding,
    Inverted,
    Model,
    Remembering,
    Skipping,
    T5Block,
    TwoTasks,
    activation_dropped,
    adapted,
    adapted_inside,
    after_a_layer,
    asked_by_one_query,
    attends,
    blocks,
    borrowed_weights,
    both_directions,
    both_lists,
    both_states,
    both_states_carried,
    both_towers_on_one,
    cell_state_dropped,
    chosen_from_one,
    chosen_from_two,
    coded,
    committee,
    convolved,
    counted_from_a_buffer,
    dense,
    dropped_layer,
    dropped_mask,
    each_step,
    early_exit,
    encoded_positions,
    encoder_blocks_decode,
    encoder_decodes,
    ensemble,
    every_other_masked,
    features,
    first_block_for_all,
    first_of_both_twice,
    gate_not_applied,
    gated,
    gated_half,
    halved,
    ids,
    ignores_others,
    in_a_row,
    inputs_with_their_own_state,
    joined,
    joined_to_itself,
    last_layer_reads_one,
    last_left_out,
    linear_tables,
    linears,
    logged,
    many_dropouts,
    mask,
    masked_otherwise_but_once,
    mixture,
    no_state_at_all,
    norms,
    not_added,
    of_a_kind,
    one_convolution,
    one_input_twice,
    one_norm_of_a_list,
    one_row,
    one_tower,
    online_and_target,
    other_ids_not_given,
    packed,
    parts,
    passes_messages,
    position_of_one_row,
    position_table,
    positions_in_a_cell,
    positions_times_zero,
    projections,
    reads_nothing,
    recurrent,
    repeated,
    rotary,
    routed_by_sample,
    same_layers,
    same_position,
    scaled,
    sentences,
    shared_norm,
    siamese,
    skipped,
    state_not_carried,
    steps_by_themselves,
    stored,
    stored_in_vain,
    streamed,
    t5,
    table,
    told_by_list,
    told_by_number,
    told_by_numpy,
    trunk_and_heads,
    two_dropouts,
    two_heads_on_a_trunk,
    two_views,
    u_net,
    universal,
    with_a_kept_sum,
    with_boxes,
    with_context,
    with_types,
    written_to_a_copy,
)

CHECK = "wiring"


# ---- faults -------------------------------------------------------------------------------------

Case = tuple[Callable[[], tuple[nn.Module, tuple[Tensor, ...]]], str, str, str]


def shaped(act: nn.Module) -> nn.Module:
    """Return layers around an activation of which only what it does in place is seen."""
    up, down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return Model(activation_dropped, up=up, act=act, down=down)


def flagged(*, frozen: bool) -> nn.Module:
    """Return a model whose first layer has an attribute that torch does not know."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
    net[0].requires_grad_(not frozen).requires_grad = False  # type: ignore[assignment]
    return net


FAULTS: dict[str, Case] = {
    "an ELU that is dropped, which is never zero": (
        lambda: (shaped(nn.ELU()), (features(),)), "warn", "act", "is dropped", "model.act(h)"
    ),
    "an activation that is dropped": (
        lambda: (shaped(nn.GELU()), (features(),)), "warn", "act", "is dropped", "model.act(h)"
    ),
    "an activation of a mask's copy": (
        lambda: (Model(written_to_a_copy, fc=nn.Linear(WIDTH, WIDTH)), (features(),)),
        "warn", "", "h[h > 0].clamp_(max=1)",
    ),
    "a state that is written and forgotten": (
        lambda: (Model(stored_in_vain, fc=nn.Linear(WIDTH, WIDTH)), (features(),)),
        "warn", "", "kept[:, 0] = h[:, 0]",
    ),
    "half of a projection that is dropped": (
        lambda: (Model(halved, up=nn.Linear(WIDTH, 2 * WIDTH)), (features(),)),
        "warn", "", "piece 1 of 2",
    ),
    "the first block for all": (
        lambda: (Model(first_block_for_all, blocks=blocks(*[""] * 4)), (ids(),)),
        "fail", "blocks.0", "model.blocks[0](x)",
    ),
    "one norm of a list": (
        lambda: (Model(one_norm_of_a_list, layers=linears(), norms=norms()), (ids(),)),
        "fail", "norms.0", "model.norms[0](x)",
    ),
    "the first norm again, in each block": (
        lambda: (Model(in_a_row, blocks=blocks(*["own norm"] * 4)), (ids(),)),
        "fail", "blocks.0.norm1", "second(x)",
    ),
    "the first of two asked twice": (
        lambda: (Model(first_of_both_twice, left=Block(), right=Block()), (features(),)),
        "fail", "left", "torch.minimum(",
    ),
    "the first of a list of two asked twice": (
        lambda: (
            Model(lambda m, x: m.both[0](x) * m.both[0](x), both=blocks("", "")), (features(),)
        ),
        "fail", "both.0", "m.both[0](x)",
    ),
    "one tower for both": (
        lambda: (Model(one_tower, left=Block(), right=Block()), (features(), features())),
        "fail", "left", "model.left(x)",
    ),
    "one convolution for both": (
        lambda: (
            Model(one_convolution, fc1=nn.Linear(WIDTH, WIDTH), fc2=nn.Linear(WIDTH, WIDTH)),
            (ids(),),
        ),
        "fail", "fc1", "model.fc1(",
    ),
    "the encoder decodes": (
        lambda: (Model(encoder_decodes, encoder=Block(), decoder=Block()), (ids(),)),
        "fail", "encoder", "model.encoder(",
    ),
    "a residual forgotten in one block": (
        lambda: (Model(in_a_row, blocks=blocks("", "", "residual", "")), (ids(),)),
        "warn", "blocks.2", "lacks `add`",
    ),
    "all positions the same": (
        lambda: (Model(same_position, position=position_table()), (ids(),)),
        "fail", "position", "torch.zeros(",
    ),
    "all positions three": (
        lambda: (Model(position_of_one_row, position=position_table()), (ids(),)),
        "fail", "position", "torch.full(",
    ),
    "positions times zero": (
        lambda: (Model(positions_times_zero, position=position_table()), (ids(),)),
        "fail", "position", "* 0",
    ),
    "a mask that nothing reads": (
        lambda: (Model(ignores_others, fc=nn.Linear(WIDTH, WIDTH)), (ids(), mask())),
        "warn", "", "'input 1'",
    ),
    "a mask that queries and keys of one input ignore": (
        lambda: (
            Model(lambda m, x, _: m.q(x) * m.k(F.relu(x)) * m.v(x), **projections("q", "k", "v")),
            (features(), mask()),
        ),
        "warn", "", "'input 1'",
    ),
    "a mask that the blocks ignore": (
        lambda: (
            Model(in_a_row, blocks=nn.ModuleList(Deaf() for _ in range(3))),
            (ids(), mask()),
        ),
        "warn", "", "'input 1'",
    ),
    "nothing is read of the batch": (
        lambda: (Model(reads_nothing, fc=nn.Linear(WIDTH, WIDTH), table=table()), (features(),)),
        "fail", "", "'input 0'",
    ),
    "both towers on one input": (
        lambda: (Model(both_towers_on_one, left=Block(), right=Block()), (features(), features())),
        "fail", "right", "'input 1'",
    ),
    "a Siamese tower on one input": (
        lambda: (Model(one_input_twice, tower=Block()), (features(), features())),
        "fail", "tower", "'input 1'",
    ),
    "a state that is never carried on": (
        lambda: (Model(state_not_carried, cell=nn.GRUCell(WIDTH, WIDTH)), (ids(),)),
        "fail", "cell", "model.cell(step, state)",
    ),
    "a cell without a state": (
        lambda: (Model(no_state_at_all, cell=nn.RNNCell(WIDTH, WIDTH)), (ids(),)),
        "fail", "cell", "model.cell(step)",
    ),
    "a sequence cut into steps": (
        lambda: (
            Model(steps_by_themselves, lstm=nn.LSTM(WIDTH, WIDTH, batch_first=True)), (ids(),)
        ),
        "fail", "lstm", "model.lstm(",
    ),
    "a cell state that is dropped": (
        lambda: (Model(cell_state_dropped, cell=nn.LSTMCell(WIDTH, WIDTH)), (ids(),)),
        "fail", "cell", "model.cell(step, (state, memory))",
    ),
    "a block left out for a step": (
        lambda: (Model(in_a_row, blocks=coded(gated, gated, skipped, gated, gated)), (ids(),)),
        "warn", "blocks.2.norm", "never called",
    ),
    "a stack whose last layer is left out": (
        lambda: (Model(last_left_out, **projections("first", "second", "third")), (ids(),)),
        "warn", "third", "never called", "72 parameters",
    ),
    "the blocks of the encoder decode": (
        lambda: (
            Model(encoder_blocks_decode, encoder=blocks("", ""), decoder=blocks("", "")),
            (ids(),),
        ),
        "warn", "decoder", "never called",
    ),
    "a branch added to itself": (
        lambda: (Model(in_a_row, blocks=nn.ModuleList(Doubled() for _ in range(3))), (ids(),)),
        "warn", "blocks.0", "h + h",
    ),
    "a gate computed and not applied": (
        lambda: (
            Model(in_a_row, blocks=coded(gated, gated, gate_not_applied, gated)), (ids(),)
        ),
        "warn", "blocks.2", "lacks `mul`",
    ),
    "a residual forgotten inside one block": (
        lambda: (
            Model(in_a_row, blocks=coded(gated, gated, not_added, gated, block=Holding)),
            (ids(),),
        ),
        "warn", "blocks.2", "lacks `add`",
    ),
    "a value joined to itself": (
        lambda: (Model(joined_to_itself, **parts()), (ids(),)), "warn", "", "torch.cat([one, one]",
    ),
    "a loop that ends before its list": (
        lambda: (Model(early_exit, blocks=blocks(*[""] * 3)), (ids(),)),
        "warn", "blocks.2", "never called",
    ),
    "a layer that is left out": (
        lambda: (Model(dropped_layer, blocks=blocks(*[""] * 5)), (ids(),)),
        "warn", "blocks.2", "never called",
    ),
    "one expert for all samples, one by one": (
        lambda: (Model(routed_by_sample, experts=linears(SAMPLES)), (ids(),)),
        "warn", "experts.1", "never called",
    ),
    "heads of the same layers": (
        lambda: (
            Model(
                two_heads_on_a_trunk,
                **{name: nn.Sequential(*one) for name, one in same_layers("actor", "critic")},
            ),
            (features(),),
        ),
        "warn", "actor.0", "which are the same",
    ),
    "one block times four": (
        lambda: (Model(in_a_row, blocks=nn.ModuleList([Block()] * 4)), (ids(),)),
        "warn", "blocks.0", "stands 4 times in 'blocks'",
    ),
    "one head under two names": (
        lambda: (TwoTasks(fault=True), (features(),)), "warn", "heads.age", "stands 2 times",
    ),
    "one batch normalisation for three blocks": (
        lambda: (
            Model(in_a_row, blocks=shared_norm(lambda: nn.BatchNorm1d(WIDTH))), (features(),)
        ),
        "warn", "blocks.0.norm", "one batch normalisation",
    ),
    "encoder and decoder of the same blocks": (
        lambda: (
            Model(both_lists, encoder=(both := blocks("", "")), decoder=nn.ModuleList([*both])),
            (ids(),),
        ),
        "warn", "encoder.0", "'encoder', 'decoder'", "different inputs",
    ),
    "an activation in a branch that writes over the skip": (
        lambda: (
            Model(
                after_a_layer,
                fc=nn.Linear(WIDTH, WIDTH), blocks=nn.ModuleList([Skipping(inplace=True)]),
            ),
            (features(),),
        ),
        "warn", "blocks.0", "return x + (self.branch(x)",
    ),
    "requires_grad set on a layer, and not on its weights": (
        lambda: (flagged(frozen=False), (features(),)), "warn", "0", "call requires_grad_(False)",
    ),
    "a choice between a value and the same": (
        lambda: (Model(chosen_from_one, fc=nn.Linear(WIDTH, WIDTH)), (ids(), mask())),
        "warn", "", "torch.where(hidden[..., None], h, h)",
    ),
}  # fmt: skip


# ---- designs that look alike --------------------------------------------------------------------

HEALTHY: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "requires_grad as a note of how a layer was made": lambda: (
        flagged(frozen=True), (features(),)
    ),
    "what is written is read": lambda: (
        Model(stored, fc=nn.Linear(WIDTH, WIDTH)), (features(),)
    ),
    "a number of a log that nothing reads": lambda: (
        Model(logged, fc=nn.Linear(WIDTH, WIDTH)), (features(),)
    ),
    "a gated half": lambda: (Model(gated_half, up=nn.Linear(WIDTH, 2 * WIDTH)), (features(),)),
    "the last of several results": lambda: (
        Model(streamed, fc=nn.Linear(WIDTH, WIDTH)), (features(),)
    ),
    "activated in place, then added": lambda: (
        Model(lambda m, x: (h := F.relu_(m.fc(x))) + m.out(h), **projections("fc", "out")),
        (features(),),
    ),
    "GPT": lambda: (Model(in_a_row, blocks=blocks(*[""] * 5, causal=True)), (ids(),)),
    "BERT with a mask": lambda: (Model(in_a_row, blocks=blocks(*[""] * 5)), (ids(), mask())),
    "ALBERT and universal transformers share a block": lambda: (
        Model(universal, block=Block(), steps=nn.Parameter(torch.randn(4, WIDTH))), (ids(),)
    ),
    "idle experts": lambda: (
        Model(mixture, experts=linears(), router=nn.Linear(WIDTH, 4)), (features(),)
    ),
    "an activation in place": lambda: (shaped(nn.ReLU(inplace=True)), (features(),)),
    "one layer norm for three blocks": lambda: (
        Model(in_a_row, blocks=shared_norm(lambda: nn.LayerNorm(LENGTH))), (features(),)
    ),
    "two heads on one trunk": lambda: (
        Model(two_heads_on_a_trunk, **trunk_and_heads()), (features(),)
    ),
    "a list of what a row calls": lambda: (
        Model(
            lambda m, x: m.actor(x),
            **{name: nn.Sequential(*one) for name, one in same_layers("actor", "kept")},
        ),
        (features(),),
    ),
    "other ids that are not given": lambda: (
        Model(
            other_ids_not_given,
            shape=position_table(), join=nn.Linear(2 * WIDTH, WIDTH), position=position_table(),
        ),
        (ids(),),
    ),
    "a list that two modules hold": lambda: (
        Model(both_lists, encoder=(one := blocks("", "")), decoder=one), (ids(),)
    ),
    "an activation that writes over nothing": lambda: (
        Model(
            after_a_layer,
            fc=nn.Linear(WIDTH, WIDTH), blocks=nn.ModuleList([Skipping(False), Skipping(False)]),
        ),
        (features(),),
    ),
    "ResNet, in place": lambda: (
        Model(
            after_a_layer,
            fc=nn.Linear(WIDTH, WIDTH), blocks=nn.ModuleList(Activated() for _ in range(3)),
        ),
        (features(),),
    ),
    "adapters by language": lambda: (
        Model(
            adapted,
            blocks=blocks("", "", ""),
            adapters=nn.ModuleDict({k: nn.Linear(WIDTH, WIDTH) for k in ("en", "de", "fr")}),
        ),
        (ids(),),
    ),
    "weights used by a function": lambda: (
        Model(borrowed_weights, first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, WIDTH)),
        (ids(),),
    ),
    "an ensemble through one template": lambda: (
        Model(ensemble, members=linears(3)), (ids(),)
    ),
    "a slow copy for later": lambda: (online_and_target(), (features(), features())),
    "two towers": lambda: (
        Model(two_views, left=Block(), right=Block()), (features(), features())
    ),
    "a committee": lambda: (Model(committee, left=Block(), right=Block()), (ids(),)),
    "a Siamese tower": lambda: (Model(siamese, tower=Block()), (features(), features())),
    "BERT's types, constants": lambda: (
        Model(with_types, position=position_table(), types=nn.Embedding(2, WIDTH)), (ids(),)
    ),
    "LayoutLM's boxes, all zero by default": lambda: (
        Model(
            with_boxes,
            position=position_table(),
            left=nn.Embedding(64, WIDTH),
            top=nn.Embedding(64, WIDTH),
        ),
        (ids(),),
    ),
    "a table of one row": lambda: (Model(one_row, only=nn.Embedding(1, WIDTH)), (ids(),)),
    "an id for each sample": lambda: (Model(of_a_kind, kind=nn.Embedding(16, WIDTH)), (ids(),)),
    "positions of a parameter, one kind": lambda: (
        Model(encoded_positions, table=table(), kind=nn.Embedding(16, WIDTH)), (ids(),)
    ),
    "positions counted in a cell that is not given": lambda: (
        Model(positions_in_a_cell, position=position_table(), cell=nn.Embedding(16, WIDTH)),
        (ids(),),
    ),
    "positions counted in a buffer": lambda: (
        Model(counted_from_a_buffer, position=position_table(), numbers=torch.arange(8)[None]),
        (ids(),),
    ),
    "a sequence of one": lambda: (Model(same_position, position=position_table()), (ids()[:, :1],)),
    "T5's first block makes the bias": lambda: (
        Model(t5, blocks=nn.ModuleList(T5Block(number == 0) for number in range(5))), (ids(),)
    ),
    "the first block's values go to all": lambda: (
        Model(t5, blocks=nn.ModuleList(Remembering() for _ in range(5))), (ids(),)
    ),
    "Swin masks every other block": lambda: (
        Model(every_other_masked, blocks=blocks(*[""] * 6)), (ids(), mask())
    ),
    "one block of four with a mask of its own": lambda: (
        Model(masked_otherwise_but_once, blocks=blocks(*[""] * 4)), (ids(), mask())
    ),
    "torch's own encoder": lambda: (
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True), num_layers=4
        ),
        (features(),),
    ),
    "stochastic depth that grows": lambda: (Model(in_a_row, blocks=linear_tables(5)), (ids(),)),
    "ResNet": lambda: (
        Model(convolved, blocks=nn.ModuleList(Bottleneck(s) for s in (2, 1, 1, 1, 1))), (ids(),)
    ),
    "MobileNet": lambda: (
        Model(convolved, blocks=nn.ModuleList(Inverted(s) for s in (1, 1, 2, 1, 1))), (ids(),)
    ),
    "DenseNet": lambda: (Model(dense, layers=linears(5)), (ids(),)),
    "U-Net": lambda: (
        Model(u_net, down=linears(), up=linears(), bottom=nn.Linear(WIDTH, WIDTH)), (ids(),)
    ),
    "lengths to pack by": lambda: (
        Model(packed, lstm=nn.LSTM(WIDTH, WIDTH, batch_first=True)),
        (ids(), torch.tensor([6, 4, 2, 1])),
    ),
    "a mask of ones that is dropped": lambda: (
        Model(dropped_mask, block=Block()), (ids(), torch.ones(SAMPLES, LENGTH, dtype=torch.bool))
    ),
    "a target of an inner loss": lambda: (
        Model(adapted_inside, fc=nn.Linear(WIDTH, WIDTH)), (features(8), features(8))
    ),
    "a number read": lambda: (
        Model(told_by_number, fc=nn.Linear(WIDTH, WIDTH)), (ids(), torch.tensor(4))
    ),
    "a list read": lambda: (
        Model(told_by_list, fc=nn.Linear(WIDTH, WIDTH)), (ids(), torch.tensor([6, 4, 2, 1]))
    ),
    "an array read": lambda: (
        Model(told_by_numpy, fc=nn.Linear(WIDTH, WIDTH)), (ids(), torch.tensor([6, 4, 2, 1]))
    ),
    "a recurrence": lambda: (Model(recurrent, cell=nn.GRUCell(WIDTH, WIDTH)), (ids(),)),
    "a recurrence by hand": lambda: (Model(recurrent, cell=Cell()), (ids(),)),
    "a context for each step": lambda: (
        Model(with_context, cell=Cell()), (ids(), features(SAMPLES))
    ),
    "both states carried on": lambda: (
        Model(both_states_carried, cell=nn.LSTMCell(WIDTH, WIDTH)), (ids(),)
    ),
    "parts that begin with a context": lambda: (
        Model(inputs_with_their_own_state, cell=nn.LSTMCell(WIDTH, WIDTH)),
        (ids(), features(SAMPLES)),
    ),
    "one query for each step": lambda: (
        Model(asked_by_one_query, fc=nn.Linear(WIDTH, WIDTH)), (ids(),)
    ),
    "a layer for each step": lambda: (
        Model(each_step, fc=nn.Linear(WIDTH, WIDTH)), (ids(),)
    ),
    "words, then sentences": lambda: (
        Model(
            sentences,
            words=nn.LSTM(WIDTH, WIDTH, batch_first=True),
            sentences=nn.LSTM(WIDTH, WIDTH, batch_first=True),
        ),
        (ids(),),
    ),
    "a gated graph net": lambda: (
        Model(passes_messages, fc=nn.Linear(WIDTH, WIDTH), cell=nn.GRUCell(WIDTH, WIDTH)),
        (features(), torch.randn(SAMPLES, LENGTH, LENGTH)),
    ),
    "one head, many dropouts": lambda: (
        Model(many_dropouts, fc=nn.Linear(WIDTH, WIDTH)), (ids(),)
    ),
    "the output and the state of one layer": lambda: (
        Model(both_directions, lstm=nn.LSTM(WIDTH, WIDTH, batch_first=True)), (ids(),)
    ),
    "the last of three blocks reads one token": lambda: (
        Model(last_layer_reads_one, blocks=blocks("", "", "")), (ids(), mask())
    ),
    "residuals to the block's input": lambda: (
        Model(in_a_row, blocks=nn.ModuleList(Doubled(fault=False) for _ in range(4))), (ids(),)
    ),
    "gates": lambda: (Model(in_a_row, blocks=coded(*[gated] * 4)), (ids(),)),
    "the first block scales": lambda: (
        Model(in_a_row, blocks=coded(scaled, *[gated] * 4)), (ids(),)
    ),
    "the last block has no gate": lambda: (
        Model(in_a_row, blocks=coded(*[gated] * 4, gate_not_applied)), (ids(),)
    ),
    "every other block has no gate": lambda: (
        Model(in_a_row, blocks=coded(*[gated, gate_not_applied] * 3)), (ids(),)
    ),
    "the first block sums for all": lambda: (
        Model(in_a_row, blocks=with_a_kept_sum()), (ids(),)
    ),
    "two states of one layer joined": lambda: (
        Model(both_states, lstm=nn.LSTM(WIDTH, WIDTH), join=nn.Linear(2 * WIDTH, WIDTH)), (ids(),)
    ),
    "two values joined": lambda: (Model(joined, **parts()), (ids(),)),
    "a choice of two": lambda: (
        Model(chosen_from_two, fc=nn.Linear(WIDTH, WIDTH)), (ids(), mask())
    ),
    "a value repeated": lambda: (Model(repeated, fc=nn.Linear(WIDTH, WIDTH)), (ids(),)),
    "two dropouts joined": lambda: (
        Model(two_dropouts, drop=nn.Dropout(0.5), join=nn.Linear(2 * WIDTH, WIDTH)), (ids(),)
    ),
    "rotary angles": lambda: (Model(rotary, fc=nn.Linear(WIDTH, WIDTH)), (ids(),)),
    "attention": lambda: (Model(attends, **projections("q", "k", "v", "out")), (ids(),)),
    "a head for each task": lambda: (TwoTasks(fault=False), (features(),)),
}  # fmt: skip


class TakesKeys(nn.Module):
    """Reads one key of the object that it is given."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 4)

    def forward(self, batch):
        return self.fc(batch["x"])
