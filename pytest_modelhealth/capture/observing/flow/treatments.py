"""What a function of torch does to values, as far as the flow asks: by its name."""

from __future__ import annotations

from typing import Any

SKIP, MAKE, FORM, FIRST, WRITE, OVERWRITE, PRODUCT, READ, TAKE, DIFFERENTIATE = range(10)
"""A function gives no values on, makes new ones, takes a form or the first tensor alone, writes,
writes over all, multiplies, reads values out for Python, takes them from there, or
differentiates."""

_ASKS = frozenset(
    {"__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous", "size"}
    | {"is_floating_point", "ndimension", "nelement", "numel", "stride", "storage_offset"}
    | {"requires_grad_", "register_hook", "retain_grad", "backward", "__repr__", "__format__"}
)
"""Functions that give no values on."""
_FORMS = frozenset(
    {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"}
    | {"randint_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}
)
"""Functions that take of a tensor its form alone."""
_FORM_OF_OTHERS = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})
"""Functions that take the values of the first tensor alone."""
_OVERWRITES = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"}
    | {"trunc_normal_", "set_"}
)
"""Functions that write and leave nothing of the old value."""
_READS = frozenset(
    {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__index__", "__complex__"}
    | {"__bool__", "is_nonzero", "equal", "allclose", "__dlpack__"}
)
_NUMBERS = frozenset({"__float__", "__int__", "__index__", "__complex__", "__bool__", "is_nonzero"})
"""Functions that are `Tensor.item` by another name; `float` is a conversion, too."""
_TAKES = frozenset({"tensor", "as_tensor", "asarray", "from_numpy", "frombuffer", "scalar_tensor"})
_OPERATORS = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_WRITES = frozenset({"__setitem__", *(f"__i{name}__" for name in _OPERATORS)})
_PRODUCTS = frozenset({"mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply", "multiply_"})


def treatment(function: Any) -> int:
    """Return what a function does."""
    name = getattr(function, "__name__", "")
    if name in _ASKS or name == "__set__":
        return SKIP
    if name in _READS:
        return READ
    if name == "grad":
        return DIFFERENTIATE
    if name in _TAKES:
        return TAKE
    if name in _FORMS:
        return FORM
    if name in _FORM_OF_OTHERS:
        return FIRST
    if name in _OVERWRITES:
        return OVERWRITE
    if name in _PRODUCTS:
        return WRITE if name in ("mul_", "__imul__", "multiply_") else PRODUCT
    if (name.endswith("_") and not name.endswith("__")) or name in _WRITES:
        return WRITE
    return MAKE


def function_name(function: Any) -> str:
    """Return the name of a function, or of the attribute that it reads."""
    name = getattr(function, "__name__", "") or "function"
    if name == "__get__":  # an attribute, such as ``x.data``
        name = getattr(getattr(function, "__self__", None), "__name__", "attribute")
    if name in _NUMBERS:
        return "item"
    name = name.strip("_").lower()
    return "numpy" if name == "array" else name
