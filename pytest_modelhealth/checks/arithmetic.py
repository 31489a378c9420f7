"""Operations between layers that make of numbers, or of gradients, what is no number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.facts import at

if TYPE_CHECKING:
    from pytest_modelhealth.report import Vertex

EDGED = frozenset(
    {"acos", "asin", "atan2", "atanh", "cdist", "dist", "erfinv", "hypot", "linalg_vector_norm"}
    | {"log", "log10", "log1p", "log2", "logit", "logsumexp", "norm", "rsqrt", "sqrt", "std"}
    | {"std_mean"}
)
"""Roots, logarithms and their kind: no value, or no derivative, at the edge of their domain."""

_DIVIDED = frozenset({"div", "divide", "itruediv", "true_divide", "truediv"})
QUOTIENTS = _DIVIDED | {"reciprocal", "rtruediv"}
POWERS = frozenset({"cosh", "cumprod", "exp", "exp2", "expm1", "float_power", "pow", "prod"})
OVERFLOWING = frozenset({"addmm", "baddbmm", "bmm", "matmul", "mm", "mul", "sum"})

BREAKING = (EDGED | QUOTIENTS, POWERS, OVERFLOWING)
"""What makes of numbers what is no number, the likeliest first."""
UNDERIVABLE = (EDGED, QUOTIENTS, POWERS)
"""What makes of a gradient what is no number, the likeliest first."""
SCALING = (
    frozenset({"cumsum", "exp", "imul", "mul", "multiply", "pow", "prod", "rmul", "square"})
    | _DIVIDED
    | OVERFLOWING
)
"""Those that may change how large values are."""


def first_of(operations: Sequence[Vertex], *kinds: frozenset[str]) -> list[Vertex]:
    """Return the operations of the first of `kinds` of which there are any."""
    found = ([o for o in operations if _kind(o) in kind] for kind in kinds)
    return next(filter(None, found), [])


def _kind(operation: Vertex) -> str:
    """Return the function; of a quotient by a number, which is no operand, that of a product."""
    is_scaled = operation.function in _DIVIDED and len(operation.operands) == 1
    return "mul" if is_scaled else operation.function


def named(operations: Sequence[Vertex], joint: str = " or ", most: int = 2) -> str:
    """Return what operations are called, the first few, each with its line."""
    lines = (f"`{o.function}`{at(o.line)}" for o in operations)
    return joint.join(list(dict.fromkeys(lines))[:most])
