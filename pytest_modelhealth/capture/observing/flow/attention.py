"""Follows scores and weights of attentions while they run: which axis, which mask, which sums.

They are known by identity while they live, and none is held. What is read of their values is a
tensor of one number, which nothing waits for until the graph is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.layer import Given, Layer
from pytest_modelhealth.capture.observing.tensors import KnownTensors, version
from pytest_modelhealth.operations import having

Facts = dict[str, Any]

_T = TypeVar("_T")
NUMBERS = (int, float)
_OPTIONS = ("dim", "scale", "p", "training", "padding_idx")
_MOST_VALUES = 1 << 24
"""Larger tensors are not read: it is one more pass over them."""
HIDES = -1e3
"""A fill below that hides a place, however large the scores."""


class Weights(NamedTuple):
    """What is known of weights of a softmax, in the layout that they have now."""

    softmax: int  # which call of one made them
    stride: int | None  # of the axis along which they sum to one; ``None`` where a copy lost it
    is_dropped: bool = False  # by a dropout: their sums are no longer one


class Scores(NamedTuple):
    """What was done to the product that a softmax may take."""

    mask: str = ""  # how one came in: ``"fill"``, ``"times"`` or ``"plus"``
    fill: float = 0.0  # what hidden places hold
    is_binary: Any = True  # whether what was multiplied or added holds zeros and ones
    hides_all: Any = False  # whether every place was filled
    keeps_padding: Any = False  # whether the places left are all one token, and the hidden are not


class AttentionReader:
    """Knows which tensors are scores or weights, and reads what a softmax and a product make."""

    def __init__(self) -> None:
        self._weights = KnownTensors[Weights]()
        self._scores = KnownTensors[Scores]()
        self._count = 0  # of calls of a softmax
        self._ids: dict[tuple[int, ...], ref[Tensor]] = {}  # by size, what a table was first asked
        self._has_marks = False

    def _mark(self, known: KnownTensors[Any], tensor: Tensor, what: Any) -> None:
        self._has_marks = True
        known.put(tensor, version(tensor), what)

    def pass_on(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Take what a function makes of scores and weights."""
        given = args[0] if self._has_marks and args else None
        if name == "where" and len(args) > 1:  # the condition comes first
            given = next((a for a in args[1:] if isinstance(a, Tensor)), None)
        is_written = name == "setitem" or result is given
        result = given if is_written else result
        if not (isinstance(given, Tensor) and isinstance(result, Tensor)):
            return
        weights, scores = self._weights.latest(given), self._scores.latest(given)
        if not is_written:
            weights, scores = self._known(self._weights, given), self._known(self._scores, given)
        others = [a for a in (*args, *kwargs.values()) if a is not given]  # a dropout's p, training
        if weights is not None:
            self._pass_weights_on(weights, name, given, others, result)
        if scores is not None:
            self._pass_scores_on(scores, name, others, result)

    def _known(self, known: KnownTensors[_T], tensor: Any) -> _T | None:
        return known.get(tensor, version(tensor)) if isinstance(tensor, Tensor) else None

    def _pass_weights_on(
        self, weights: Weights, name: str, given: Tensor, others: list[Any], result: Tensor
    ) -> None:
        is_view = name in having("whole") or name in ("expand", "expand_as")
        if is_view or name in having("dropout"):
            is_shared = result is given or (is_view and result._base is not None)
            keeps_axis = is_shared or result.stride() == given.stride()
            is_dropped = weights.is_dropped or (name in having("dropout") and all(others[:2]))
            axis = weights.stride if keeps_axis else None
            self._mark(self._weights, result, weights._replace(stride=axis, is_dropped=is_dropped))

    def _pass_scores_on(self, scores: Scores, name: str, others: list[Any], result: Tensor) -> None:
        number = next((float(a) for a in reversed(others) if type(a) in NUMBERS), None)
        tensor = next((a for a in others if isinstance(a, Tensor)), None)
        if name in having("fill") or name == "setitem":
            if number is not None and tensor is not None and tensor.dtype is torch.bool:
                is_kept = name == "where" and type(others[-1]) in NUMBERS
                hides_all = ~tensor.any() if is_kept else tensor.all()
                keeps = self._keeps_padding(tensor, is_kept)
                self._mark(self._scores, result, Scores("fill", number, True, hides_all, keeps))
        elif name in having("whole"):
            self._mark(self._scores, result, scores)
        elif tensor is not None:
            if name in having("product", "sum") and not tensor.requires_grad:
                how = "times" if name in having("product") else "plus"
                keeps = how == "plus" and self._keeps_padding(tensor)
                self._mark(self._scores, result, Scores(how, 0.0, _is_binary(tensor), False, keeps))
        elif number and name in having("product", "quotient"):
            scale = 1.0 / number if name in having("quotient") else number
            self._mark(self._scores, result, scores._replace(fill=scores.fill * scale))

    def _keeps_padding(self, mask: Tensor, is_kept: bool = False) -> Tensor | bool:
        """Whether a mask of keys leaves places of one id at an end, and hides those that differ.

        Of booleans it says what is hidden, or kept; as the last query has it.
        """
        mask = (mask[..., -1, :] if mask.ndim > 2 else mask).squeeze()
        known = self._ids.get(tuple(mask.shape))
        ids = None if known is None else known()
        if ids is None or ids.dtype is not torch.long or ids.ndim != 2:
            return False
        hidden = mask < HIDES if mask.is_floating_point() else mask.bool() ^ is_kept
        least, most = torch.iinfo(ids.dtype).min, torch.iinfo(ids.dtype).max
        ends = [
            (ids.masked_fill(out, most).amin(), ids.masked_fill(out, least).amax())
            for out in (hidden, ~hidden)
        ]
        (kept, last), (first, other) = ends
        changes = hidden.long().diff(dim=1)
        is_at_an_end = (changes <= 0).all() | (changes >= 0).all()
        return (kept == last) & (first < other) & is_at_an_end & ((~hidden).sum(1) > 1).any()

    # Products of values by weights.

    def product(self, args: tuple[Any, ...], result: Any) -> Facts:
        """Return the sizes that a product takes, and what weights in it sum to where it adds up."""
        taken = [a for arg in args for a in (arg if isinstance(arg, list | tuple) else (arg,))]
        operands = [a for a in taken if isinstance(a, Tensor)]
        if len(operands) != 2 or int in map(type, taken) or not isinstance(result, Tensor):
            return {}  # an einsum of lists names its axes otherwise
        self._mark(self._scores, result, Scores())
        facts: Facts = {"operands": tuple(tuple(operand.shape) for operand in operands)}
        for at, operand in enumerate(operands):
            weights = self._known(self._weights, operand)
            # a product with a parameter mixes heads: it adds up no values
            is_value = not isinstance(operands[1 - at], nn.Parameter)
            axis = None if weights is None or not is_value else _contracted(taken[0], at, operand)
            if weights is not None and axis is not None and operand.shape[axis] > 1:
                return facts | _sums(weights, operand, axis)
        return facts

    # Calls of layers, which say what they read when they return.

    def entered(self, layer: Layer, given: Sequence[Given]) -> Callable[[Tensor], Facts] | None:
        """Return what reads the facts of a call of one of `READ_LAYERS`, if it was given any."""
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # under vmap: none is read
        if not given or any(is_wrapped(tensor) for tensor, _, _ in given):
            return None
        own, module = layer.options, layer.module
        said = {name: own.get(name, getattr(module, name, None)) for name in _OPTIONS}
        said["weight"] = layer.parameters.get("weight")
        tensors = [ref(tensor) for tensor, _, _ in given]
        return partial(READ_LAYERS[layer.type_name], self, said, tensors)

    def _softmax(self, said: Facts, given: list[Any], result: Tensor) -> Facts:
        """Of a softmax how many values it normalises, and what a mask leaves to hidden places."""
        if result.is_nested or result.layout is not torch.strided:
            return {}
        taken, sizes, ndim = given[0](), tuple(result.shape), result.ndim
        along = said["dim"] if said["dim"] is not None else 0 if ndim in (0, 1, 3) else 1
        self._count += 1
        self._mark(self._weights, result, Weights(self._count, result.stride(along)))
        facts: Facts = {"made": self._count, "dims": (along % ndim,), "sizes": (sizes,)}
        scores = self._known(self._scores, taken)
        if scores is None or not scores.mask or result.numel() > _MOST_VALUES:
            return facts
        taken = taken.detach()
        facts |= {"mask": scores.mask, "fill": scores.fill, "is_binary": (scores.is_binary,)}
        facts["keeps_padding"] = (scores.keeps_padding,)
        if scores.mask == "plus" or scores.fill <= HIDES:  # the size of one shows that it hides
            return facts | {"is_all_hidden": (scores.hides_all,)}
        hidden = torch.isclose(taken, taken.new_tensor(scores.fill), rtol=1e-5, atol=0.0)
        hidden &= ~hidden.all(along, keepdim=True)
        return facts | {"kept": (result.detach().where(hidden, result.new_zeros(())).amax(),)}

    def _attention(self, said: Facts, given: list[Any], _: Tensor) -> Facts:
        """Of a fused attention the sizes of the queries, and what its mask hides.

        It is given one tensor once, queries first and a mask last.
        """
        queries, mask = given[0](), given[-1]() if len(given) > 1 else None
        if queries is None or queries.is_nested:
            return {}
        facts = {"scale": said["scale"], "operands": (tuple(queries.shape),)}
        return facts | self.masks([mask])

    def masks(self, tensors: Sequence[Any]) -> Facts:
        """Return what masks that an attention takes hide, and whether one is of zeros and ones.

        One of booleans says what is kept: torch's layer has made its own one of numbers.
        """
        masks = [t.detach() for t in tensors if isinstance(t, Tensor) and not t.requires_grad]
        if not masks:
            return {}
        first, is_sum = masks[0], masks[0].is_floating_point()
        hides_all = (first < HIDES).all() if is_sum else ~first.any()
        keeps = [read for m in masks if (read := self._keeps_padding(m, True)) is not False]
        facts: Facts = {"is_binary": (is_sum and _is_binary(first),)}
        return facts | {"is_all_hidden": (hides_all,), "keeps_padding": (*keeps, False)[:1]}

    def _lookup(self, said: Facts, given: list[Any], _: Tensor) -> Facts:
        """Of a table the largest number in its row of the padding, where that is asked for."""
        ids, table, row = given[0](), said["weight"], said["padding_idx"]
        if ids is None:
            return {}
        self._ids.setdefault(tuple(ids.shape), given[0])
        if row is None or type(table) is not nn.Parameter or ids.is_nested:
            return {}
        return {"padding": (row, (ids == row).any() * table.detach()[row].abs().amax())}

    def _states(self, _: Facts, given: list[Any], __: Tensor) -> Facts:
        """Of an LSTM whether the states that it is given are one: one tensor is given once."""
        tensors = [one() for one in given[1:]]
        states = [t.detach() for t in tensors if t is not None and t.is_floating_point()]
        is_known = not any(t is None for t in tensors) and len({t.shape for t in states}) == 1
        return {"is_one_state": (is_known and (states[0] == states[-1]).all(),)}


READ_LAYERS: dict[str, Callable[..., Facts]] = {
    **dict.fromkeys(("softmax", "Softmax"), AttentionReader._softmax),
    "Dropout": lambda reader, said, given, result: (
        reader.pass_on("dropout", (given[0](), said["p"], said["training"]), {}, result) or {}
    ),
    **dict.fromkeys(("embedding", "Embedding"), AttentionReader._lookup),
    **dict.fromkeys(("LSTM", "LSTMCell"), AttentionReader._states),
    "scaled_dot_product_attention": AttentionReader._attention,
}
"""Who reads calls of layers and functions of a class."""


def _is_binary(tensor: Tensor) -> Tensor | bool:
    """Return whether a tensor holds zeros and ones, both, and nothing else."""
    if tensor.numel() > _MOST_VALUES:
        return False
    zeros, ones = tensor.detach() == 0, tensor.detach() == 1
    return (zeros | ones).all() & zeros.any() & ones.any()


def _sums(weights: Weights, operand: Tensor, axis: int) -> Facts:
    """Return whether a product adds weights up along the softmax's axis, and the ends of its sums.

    Sums of zero are of rows that a mask hides. Those behind a dropout tell nothing.
    """
    facts: Facts = {"softmax": weights.softmax, "is_along": None}
    if weights.stride is not None and operand.numel():
        strides = [s for s, size in zip(operand.stride(), operand.shape, strict=True) if size > 1]
        if weights.stride in strides:
            facts["is_along"] = operand.stride(axis) == weights.stride
    if not (facts["is_along"] or weights.is_dropped) and 0 < operand.numel() <= _MOST_VALUES:
        sums = operand.detach().float().sum(axis)
        sums = sums.where(sums != 0, sums.new_ones(()))
        facts["sums"] = tuple(sums.aminmax())
        facts["eps"] = torch.finfo(operand.dtype).eps
    return facts


def _contracted(equation: Any, at: int, operand: Tensor) -> int | None:
    """Return the one dimension of an operand that a product sums over; ``None``: there is none."""
    if isinstance(equation, str):
        taken, _, given = equation.replace(" ", "").partition("->")
        letters = taken.split(",")[at].removeprefix("...")
        if "..." in letters:
            return None
        summed = [n for n, letter in enumerate(letters) if given and letter not in given]
        return summed[0] - len(letters) if len(summed) == 1 else None
    return -1 if operand.ndim == 1 or at == 0 else -2
