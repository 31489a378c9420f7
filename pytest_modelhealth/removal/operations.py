"""The operations that torch carries out: seen with their arguments, and what they do to units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

SAME_PLACES = frozenset({"clone", "_to_copy", "_unsafe_view", "lift_fresh_copy", "flip"})
"""Operations beside views that lay values out anew, and none of whose arguments is a tensor."""

BY_MEMORY = frozenset({"as_strided", "_reshape_alias", "view_as_complex", "view_as_real"})
"""Views that depend on how a tensor lies in memory."""

UNIT_BY_UNIT = frozenset(
    {"bernoulli", "bernoulli_", "copy_", "fill_", "hardswish", "hardswish_", "log_sigmoid_forward"}
    | {"native_dropout", "normal_", "_prelu_kernel", "rrelu_with_noise", "rrelu_with_noise_"}
    | {"uniform_", "zero_"}
)
"""Operations on each value by itself that torch does not tag as such."""

LIKE = frozenset(
    {"empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"}
    | {"new_empty", "new_full", "new_ones", "new_zeros"}
)
"""Operations that take the form of a tensor and none of its values."""

ALONG = frozenset(
    {"all", "amax", "amin", "any", "argmax", "argmin", "cumsum", "linalg_vector_norm", "logsumexp"}
    | {"_log_softmax", "max", "mean", "min", "norm", "prod", "_softmax", "std", "sum", "var"}
    | {"var_mean"}
)
"""Operations along some dimensions, which leave others alone."""

POOLS = {
    name: dimensions
    for dimensions in (1, 2, 3)
    for name in (
        f"avg_pool{dimensions}d",
        f"_adaptive_avg_pool{dimensions}d",
        f"adaptive_avg_pool{dimensions}d",
        f"adaptive_max_pool{dimensions}d",
        f"max_pool{dimensions}d",
        f"max_pool{dimensions}d_with_indices",
        f"reflection_pad{dimensions}d",
        f"replication_pad{dimensions}d",
        f"upsample_nearest{dimensions}d",
        f"_upsample_nearest_exact{dimensions}d",
        f"upsample_{(None, 'linear', 'bilinear', 'trilinear')[dimensions]}{dimensions}d",
        f"upsample_bicubic{dimensions}d",
    )
}
"""Operations on the last dimensions, so many of them."""

BATCH_NORMS = frozenset(
    {"batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm"}
    | {"_batch_norm_no_update", "_batch_norm_with_update", "_native_batch_norm_legit"}
    | {"_native_batch_norm_legit_no_training"}
)

_NUMPY = frozenset(
    {Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.__dlpack__, Tensor.data_ptr}
)
"""Ways out of torch that no operation shows."""

SAID = {
    "bmm": "it goes into a product{} of activations with each other",
    "cat": "it is concatenated with other values (`cat`{})",
    "native_group_norm": "the norm{} runs over its units",
    "native_layer_norm": "the norm{} runs over its units",
    "stack": "it is stacked with other values (`stack`{})",
    "_local_scalar_dense": "its values leave for NumPy or Python (`item`{})",
}
"""What some operations do, in words; the others are named."""


class Operations(TorchDispatchMode):
    """Shows every operation that torch carries out."""

    def __init__(self, see: Callable[..., None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Carry it out and show it."""
        out = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            self._see(func, args, kwargs or {}, out)
        return out


class Functions(TorchFunctionMode):
    """Shows tensors whose values leave torch."""

    def __init__(self, leaves: Callable[[Tensor, str], None]) -> None:
        super().__init__()
        self._leaves = leaves

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call it, and show the tensor if it leaves."""
        if func in _NUMPY:
            self._leaves(args[0], func.__name__.strip("_"))
        return func(*args, **(kwargs or {}))


def arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by name, those with their default left out."""
    names = [argument.name for argument in function._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def layout(
    function: Any, argument: str, others: dict[str, Any], number: int
) -> Callable[[Tensor], Tensor]:
    """Return what lays another tensor out in the way of an operation."""

    def lay(indices: Tensor) -> Tensor:
        out = function(**{argument: indices}, **others)
        return pytree.tree_leaves(out)[number]  # type: ignore[no-any-return]

    return lay
