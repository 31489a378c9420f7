"""The steps of a sequence in another order, and whether positions tell a model that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from pytest_modelhealth.capture.step.bare import copied
from pytest_modelhealth.checks.facts import at, flow_of
from pytest_modelhealth.operations import having
from pytest_modelhealth.probes.conventions import Effects, NotApplicableError, UntellableError
from pytest_modelhealth.probes.intervening.batches import SEED, is_number, permutation
from pytest_modelhealth.probes.intervening.running import Runs
from pytest_modelhealth.report import Parting
from pytest_modelhealth.report.flow import Flow, Kind, Vertex

_EQUAL = 1e-11
"""By the root mean square: fresh attention is nearly uniform, and float32 would not tell."""
_SHORTEST = 4
_AT = 1  # the dimension of steps
_TEXT = "steps permuted, in float64"
_HELD, _WAVES = {Kind.PARAMETER, Kind.BUFFER, Kind.CALL, Kind.UNKNOWN}, {"sin", "cos"}
"""What a table is kept in or looked up by, and what it is made with."""
_FUSED = {"scaled_dot_product_attention", "multi_head_attention_forward"}


def tables_met(flow: Flow) -> Iterator[tuple[Vertex, list[Vertex]]]:
    """Yield where values of the batch meet what comes of a table alone, and what that is made of.

    They are added, multiplied number by number or joined.
    """
    vertices, of_batch = flow.graph.vertices, _of_batch(flow)
    for number in sorted(n for n in of_batch if vertices[n].has("sum", "product", "join")):
        tables = [o for o in vertices[number].operands if o not in of_batch]
        parts = [vertices[n] for n in flow.walk(tables, back=True)]
        if any(one.kind in _HELD or one.function in _WAVES for one in parts):
            yield vertices[number], parts


def _of_batch(flow: Flow) -> set[int]:
    return flow.walk(n for n, v in enumerate(flow.graph.vertices) if v.kind is Kind.INPUT)


def what_positions_do(runs: Runs) -> Effects:
    """Permute the steps of a copy in float64; an output that only follows knows no positions.

    Constant parameters get random numbers in it: gates and tables that open by training.
    """
    given = [tensor for tensor in runs.batch.tensors if tensor.ndim > 1]
    if len(given) != 1 or runs.batch.has_others or given[0].shape[_AT] < _SHORTEST:
        raise NotApplicableError("the batch is not one sequence of four steps or more")
    length = given[0].shape[_AT]
    lines = list(_lines_of_tables(runs, length))
    if not lines:
        raise NotApplicableError("nothing that differs by step is added to or multiplied with it")
    model, order = copied(runs.model).double(), permutation(length)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and parameter.amin() == parameter.amax():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))

    def permuted(_: int, tensor: Tensor) -> Tensor | None:
        return tensor.index_select(_AT, order.to(tensor.device)) if tensor.ndim > 1 else None

    def in_double(_: int, tensor: Tensor) -> Tensor | None:
        wide = torch.promote_types(tensor.dtype, torch.float64)
        return tensor.to(wide) if is_number(tensor) else None

    request = replace(runs.request, model=model)
    doubled = replace(runs, request=request, _base=None, _read=None, _guard=None)
    ran = [doubled.forward(runs.batch.copy(*first, in_double)) for first in ((), (permuted,))]
    if error := ran[0].error or ran[1].error:
        raise UntellableError(f"in float64 it raises {error}")
    before, after = ([t for t in one.outputs if t.is_floating_point()] for one in ran)
    if not before or any(tensor.dtype is not torch.float64 for tensor in before):
        raise UntellableError("it computes in another dtype whatever it is given")
    if not all(_follows(*pair, order) for pair in zip(before, after, strict=True)):
        return Effects(_TEXT)
    return Effects(_TEXT, [Parting("order", 0.0, line=lines[0], detail=at(lines[0]))])


def _lines_of_tables(runs: Runs, length: int) -> Iterator[str]:
    """Yield where a row for each step meets the steps, or an embedding of numbers of steps is made.

    Behind a softmax steps may be no longer those of the batch, but queries or slots.
    """
    flow = flow_of(runs.observation)
    vertices, of_batch = flow.graph.vertices, _of_batch(flow)
    behind = flow.walk(n for n, v in enumerate(vertices) if v.name in having("softmax") | _FUSED)
    for vertex, parts in tables_met(flow):
        is_part = any(one.has("slice", "choice") for one in parts)
        rows = (_is_long(runs, one, length, is_part) for one in parts)
        if any(rows) and not behind.intersection(vertex.operands):
            yield vertex.line
    for number, vertex in enumerate(vertices):
        is_call = vertex.kind is Kind.CALL and number not in of_batch
        if is_call and runs.observation.layers[vertex.name].type_name == "Embedding":
            yield from [vertex.line] * _is_long(runs, vertex, length, False)


def _is_long(runs: Runs, vertex: Vertex, length: int, is_part: bool) -> bool:
    """Whether what is held has a row for each step, or more where a part is taken."""
    layer, _, own = vertex.name.rpartition(".")
    layer = vertex.name if vertex.kind is Kind.CALL else layer
    record = runs.observation.layers.get(layer)
    if record is None or vertex.kind not in (Kind.CALL, Kind.PARAMETER, Kind.BUFFER):
        return vertex.function in _WAVES
    held = {**record.parameters, **record.buffers}.get(own)
    held = record.activations if vertex.kind is Kind.CALL else held
    sizes = () if held is None else held.shape[:-1]
    return any(size == length or (is_part and size > length) for size in sizes)


def _follows(before: Tensor, after: Tensor, order: Tensor) -> bool:
    """Whether a tensor is unchanged, or its steps are only in the other order."""
    if before.shape != after.shape:
        return False
    size = _EQUAL * max(float(before.square().mean().sqrt()), 1e-30)
    axes = [axis for axis in range(1, before.ndim) if before.shape[axis] == len(order)]
    ways = [before, *(before.index_select(axis, order.to(before.device)) for axis in axes)]
    return any(bool(((after - way).abs() <= size).all()) for way in ways)
