"""The one merge of records: of calls, batches and ranks, as each field says of itself.

A field's metadata names the rule under ``"merge"``, and under ``"ranks"`` where what several ranks
saw at once goes together in another way. Without either it is that of the first record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from functools import cache, reduce
from itertools import chain
from typing import Any, Literal, TypeVar, cast

T = TypeVar("T")
Over = Literal["merge", "ranks"]


@dataclass(frozen=True, slots=True)
class Merge:
    """What a rule may look at beside the values of its field.

    Args:
        records: all that are merged, in order.
        over: the key of the rules that are followed.
        starts: how many batches come before each of the records.
    """

    records: Sequence[Any]
    over: Over
    starts: Sequence[int]


Rule = Callable[[list[Any], Merge], Any]
"""Gives the value of a field from those of all records, in order."""


def merged(records: Sequence[T], over: Over = "merge", starts: Sequence[int] | None = None) -> T:
    """Return what several records of one class are together.

    Args:
        records: at least one, in order.
        over: ``"ranks"`` where they are of ranks, else of calls or batches in a row.
        starts: how many batches come before each; ``None`` is no batch before any.
    """
    of = Merge(records, over, starts or (0,) * len(records))
    first: Any = records[0]
    changes = {
        name: rule([getattr(record, name) for record in records], of)
        for name, rule in _rules(first.__class__, over)
    }
    return cast(T, replace(first, **changes))


@cache
def _rules(kind: type, over: Over) -> tuple[tuple[str, Rule], ...]:
    named = ((one, one.metadata.get(over, one.metadata.get("merge"))) for one in fields(kind))
    return tuple((one.name, _rule(one, rule)) for one, rule in named if rule is not None)


def _rule(field: Field[Any], rule: Rule | str) -> Rule:
    if rule == "apart":
        made = field.default_factory
        return lambda _, of: field.default if made is MISSING else made()
    return _RULES[rule] if isinstance(rule, str) else rule


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean of those that are known; ``None`` where none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _statistics(values: list[Any], of: Merge) -> Any:
    """Merge statistics, or those of several tensors by their names."""
    known = [value for value in values if value is not None]
    if not known or not isinstance(known[0], Mapping):
        return reduce(lambda a, b: a.merge(b), known) if known else None
    names = dict.fromkeys(chain.from_iterable(known))
    return {name: _statistics([value.get(name) for value in known], of) for name in names}


def _each(values: list[Mapping[str, Any]], of: Merge) -> dict[str, Any]:
    """Merge records by their names."""
    found = {}
    for name in dict.fromkeys(chain.from_iterable(values)):
        having = [(v[name], start) for v, start in zip(values, of.starts, strict=True) if name in v]
        records, starts = zip(*having, strict=True)
        found[name] = merged(records, of.over, starts)
    return found


def _record(values: list[Any], of: Merge) -> Any:
    known = [value for value in values if value is not None]
    return merged(known, of.over) if known else None


_RULES: dict[str, Rule] = {
    "known": lambda values, _: next((value for value in values if value is not None), None),
    "sum": lambda values, _: sum(values),
    "max": lambda values, _: max((v for v in values if v is not None), default=None),
    "mean": lambda values, _: mean_of(values),
    "any": lambda values, _: any(values),
    # also of texts: the first, where each has one
    "all": lambda values, _: values[0] if all(values) else type(values[0])(),
    "all known": lambda values, _: (
        all(known) if (known := [value for value in values if value is not None]) else None
    ),
    "in a row": lambda values, _: tuple(chain.from_iterable(values)),
    "union": lambda values, _: tuple(dict.fromkeys(chain.from_iterable(values))),
    "common": lambda values, _: frozenset.intersection(*values),
    "latest of each": lambda values, _: {k: v for value in values for k, v in value.items()},
    "first of each": lambda values, _: {k: v for one in values[::-1] for k, v in one.items()},
    "first with any": lambda values, _: next(filter(None, values), values[0]),
    "statistics": _statistics,
    "each": _each,
    "record": _record,
}
"""Rules of more than one field, by their names; ``"apart"`` is the default of the field."""
