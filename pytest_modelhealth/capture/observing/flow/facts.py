"""Reads facts of operations while they run: sizes, numbers, and what weights of a softmax sum to.

A fact is plain data, or a tensor of a few numbers that is read when the graph is made, so that
nothing waits for a device; no tensor of the model's is held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.autograd_graph import operation
from pytest_modelhealth.capture.observing.flow.attention import NUMBERS, AttentionReader, Facts
from pytest_modelhealth.operations import having

Reader = Callable[["FactReader", tuple[Any, ...], Mapping[str, Any], Any], Facts]


class FactReader:
    """Reads facts; knows which tensors are scores and weights of attentions."""

    def __init__(self) -> None:
        self.attention = AttentionReader()
        self._written: list[tuple[ref[Tensor], Facts]] = []
        self.indices: dict[tuple[int, int], int] = {}

    def read(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> Facts | None:
        """Return the facts of a call of a function; ``None`` where there are none."""
        try:
            self.attention.pass_on(name, args, kwargs, result)
            reader = _READERS.get(name)
            return None if reader is None else reader(self, args, kwargs, result) or None
        except RuntimeError:  # nested and sparse tensors lack sizes and strides
            return None

    def written(self, args: tuple[Any, ...], facts: Facts | None) -> Facts | None:
        """Return the facts of what writes into a tensor, which say later whether it is held."""
        if not (args and isinstance(args[0], Tensor)) or args[0].is_inference():
            return facts
        base, facts = args[0]._base, facts or {}
        self._written.append((ref(args[0] if base is None else base), facts))
        return facts

    def finish(self) -> None:
        """Say what was written into and is held by nothing any longer: nothing can read it."""
        for tensor, facts in self._written:
            facts["is_held"] = tensor() is not None


def _sizes(_: FactReader, args: tuple[Any, ...], __: Mapping[str, Any], result: Any) -> Facts:
    """Of a view the sizes before and after, where they differ."""
    given = args[0] if args else None
    if not (isinstance(given, Tensor) and isinstance(result, Tensor)):
        return {}
    before, after = tuple(given.shape), tuple(result.shape)
    return {} if before == after else {"sizes": (before, after)}


def _number(_: FactReader, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Facts:
    """Of arithmetic the number beside the tensor; the sizes where both are broadcast."""
    facts: Facts = {}
    numbers = [a for a in (*args, *kwargs.values()) if type(a) in NUMBERS]
    if len(numbers) == 1:
        facts["number"] = float(numbers[0])
    tensors = [a for a in args[:2] if isinstance(a, Tensor)]
    is_pair = len(tensors) == 2 and isinstance(result, Tensor)
    if is_pair and result.numel() > max(t.numel() for t in tensors):
        facts["sizes"] = tuple(tuple(t.shape) for t in (*tensors, result))
    return facts


def _times(_: FactReader, args: tuple[Any, ...], kwargs: Mapping[str, Any], r: Any) -> Facts:
    """Of a product with logarithms, or a log_softmax, also the ends of what stands beside them.

    And what a row of that sums to, and the largest of the logarithms.
    """
    facts = _number(_, args, kwargs, r)
    tensors = [a for a in args[:2] if isinstance(a, Tensor) and a.ndim > 1 and a.numel()]
    if len(tensors) == 2 and r.requires_grad and tensors[0].shape == tensors[1].shape:
        known, made = sorted(tensors, key=lambda tensor: tensor.requires_grad)
        maker = "" if known.requires_grad or made.grad_fn is None else operation(made.grad_fn)
        if maker in ("log", "log_softmax"):
            ends, rows = known.aminmax(), known.double().sum(-1).mean()
            facts["likelihood"] = (maker != "log", *ends, rows, made.detach().max())
    return facts


_SMALL = (torch.uint8, torch.int8, torch.int16)
"""Whole numbers that are soon at their end; those of 32 and 64 bits wrap in a hash on purpose."""


def _added(reader: FactReader, args: tuple[Any, ...], kwargs: Mapping[str, Any], r: Any) -> Facts:
    """Of an addition also whether it ``wraps``: whether it is more than its type holds."""
    if isinstance(r, Tensor) and r.dtype in _SMALL and len(args) == 2 and not kwargs:
        added = args[1].long() if isinstance(args[1], Tensor) else args[1]
        before = (r - added).to(r.dtype)  # one in place has written over it
        return {"wraps": ((before.long() + added != r).any(),)}
    return _sum(reader, args, kwargs, r)


def _sum(reader: FactReader, args: tuple[Any, ...], kwargs: Mapping[str, Any], r: Any) -> Facts:
    """Of a sum also along which dimension rows of a table are added to what lies beside it.

    And to how many ``samples`` a single number is added, where one stands for each.
    """
    facts = _number(reader, args, kwargs, r)
    tensors = [a for a in args[:2] if isinstance(a, Tensor) and a.is_floating_point()]
    if sorted(t.ndim for t in tensors) == [0, 1] and r.requires_grad and len(r) > 1:
        facts["samples"] = len(r)
    for table in tensors if len(tensors) == 2 and isinstance(r, Tensor) and r.ndim == 3 else ():
        sizes, is_long = (1, *table.shape)[-3:], min(r.shape) > 1
        if is_long and sizes in ((r.shape[0], 1, r.shape[2]), (1, *r.shape[1:])):
            rows = table.detach().reshape(-1, r.shape[2])
            facts |= {"table": tuple(r.shape), "is_varied": ((rows[1:] != rows[:1]).any(),)}
            facts["along"] = int(sizes[0] == 1)
    return facts


def _among(_: FactReader, args: tuple[Any, ...], kwargs: Mapping[str, Any], __: Any) -> Facts:
    """Of `normalize` and `cosine_similarity` the number of values in a vector."""
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 1)
    return {"among": args[0].shape[dim]} if args and isinstance(dim, int) else {}


def _dimensions(
    reader: FactReader, args: tuple[Any, ...], kwargs: Mapping[str, Any], r: Any
) -> Facts:
    """Of a reduction the dimensions that it runs along, from 0, and the sizes before them."""
    given = args[0] if args else None
    if not isinstance(given, Tensor):
        return {}
    dims = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, list | tuple) or not dims:
        dims = range(given.ndim)
    along = tuple(d % given.ndim for d in dims) if given.ndim else ()
    facts = {"dims": along, "sizes": (tuple(given.shape),)}
    if isinstance(r, Tensor) and r.dtype in _SMALL:
        is_count = r.shape == given.shape and along
        right = given.long().cumsum(along[0]) if is_count else given.long().sum(along).view_as(r)
        facts["wraps"] = ((right != r).any(),)
    return facts


def _selected(_: FactReader, args: tuple[Any, ...], __: Mapping[str, Any], r: Any) -> Facts:
    """Of a maximum or minimum of each row whether it is infinite in all of them."""
    found = r[0] if isinstance(r, tuple) else r
    is_read = isinstance(found, Tensor) and found.is_floating_point() and found.numel() > 1
    is_of_rows = is_read and found.numel() < args[0].numel()
    return {"is_infinite": (found.detach().isinf().all(),)} if is_of_rows else {}


def _indexed(reader: FactReader, args: tuple[Any, ...], _: Mapping[str, Any], r: Any) -> Facts:
    """Of what reads or adds to rows which indices these are, and whether they are more than rows.

    They are known by where they lie, as autograd holds them, and told in the order in which they
    came.
    """
    index = next((a for a in args[1:] if isinstance(a, Tensor) and a.dtype is torch.long), None)
    if index is None or not index.ndim or not isinstance(r, Tensor):
        return {}
    number = reader.indices.setdefault((index.data_ptr(), len(index)), len(reader.indices))
    return {"indices": number, "are_more": len(index) > len(args[0])}


def _pieces(_: FactReader, args: tuple[Any, ...], kwargs: Mapping[str, Any], r: Any) -> Facts:
    """Of what is cut in pieces how many there are, and along which dimension."""
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    if not (args and isinstance(dim, int)):
        return {}
    return {"pieces": len(r), "dims": (dim % args[0].ndim,), "ndim": args[0].ndim}


_READERS: dict[str, Reader] = {
    **dict.fromkeys({*having("whole") - having("copy"), "repeat", "repeat_interleave"}, _sizes),
    **dict.fromkeys(("chunk", "split"), _pieces),
    "unbind": lambda reader, args, *rest: _pieces(reader, (*args[:1], 1, *args[1:]), *rest),
    **dict.fromkeys(("getitem", "index_select", "index_add", "scatter_add"), _indexed),
    **dict.fromkeys(("amax", "amin", "max", "min"), _selected),
    **dict.fromkeys(having("product"), _times),
    **dict.fromkeys(having("quotient"), _number),
    **dict.fromkeys(having("sum"), _sum),
    **dict.fromkeys(having("sum") - having("difference", "matrix"), _added),
    **dict.fromkeys(("normalize", "cosine_similarity"), _among),
    **dict.fromkeys(having("total", "average"), _dimensions),
    "multi_head_attention_forward": lambda reader, _, kwargs, __: reader.attention.masks(
        [kwargs.get("attn_mask"), kwargs.get("key_padding_mask")]
    ),
    **dict.fromkeys(
        ("matmul", "bmm", "mm", "einsum", "mv"),
        lambda reader, args, _, result: reader.attention.product(args, result),
    ),
}


def settled(facts: Facts | None) -> Facts:
    """Return facts as plain data."""
    if not facts:
        return {}
    return {
        name: tuple(v.item() if isinstance(v, Tensor) else v for v in fact)
        if type(fact) is tuple
        else fact
        for name, fact in facts.items()
    }
