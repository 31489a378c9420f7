"""The one merge of records: of calls, batches and ranks, as each field says of itself.

A field's metadata names the rule under ``"merge"``, and under ``"ranks"`` where what several ranks
saw at once goes together in another way. Without either it is that of the first record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from functools import cache, reduce
from itertools import chain
from statistics import fmean
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


def of_each(rule: Rule) -> Rule:
    """Return the rule that follows another one for each name of mappings."""

    def rule_of_each(values: list[Any], of: Merge) -> dict[str, Any]:
        together = {}
        for name in dict.fromkeys(chain.from_iterable(values)):
            having = [at for at, value in enumerate(values) if name in value]
            records, starts = ([every[at] for at in having] for every in (of.records, of.starts))
            together[name] = rule(
                [values[at][name] for at in having], Merge(records, of.over, starts)
            )
        return together

    return rule_of_each


def known(rule: Callable[[list[Any]], Any]) -> Rule:
    """Return the rule that gives what one makes of values that are known; ``None`` of none."""

    def rule_of_known(values: list[Any], _: Merge) -> Any:
        values = [value for value in values if value is not None]
        return rule(values) if values else None

    return rule_of_known


def _record(values: list[Any], of: Merge) -> Any:
    return known(lambda values: merged(values, of.over))(values, of)


_statistics = known(lambda values: reduce(lambda a, b: a.merge(b), values))

_RULES: dict[str, Rule] = {
    "known": known(lambda values: values[0]),
    "sum": lambda values, _: sum(values),
    "max": known(max),
    "mean": known(fmean),
    "any": lambda values, _: any(values),
    # also of texts: the first, where each has one
    "all": lambda values, _: values[0] if all(values) else type(values[0])(),
    "all known": known(all),
    "in a row": lambda values, _: tuple(chain.from_iterable(values)),
    "union": lambda values, _: tuple(dict.fromkeys(chain.from_iterable(values))),
    "common": lambda values, _: frozenset.intersection(*values),
    "latest of each": of_each(lambda values, _: values[-1]),
    "first with any": lambda values, _: next(filter(None, values), values[0]),
    "statistics": _statistics,
    "statistics of each": of_each(_statistics),
    "record": _record,
    "record of each": of_each(lambda values, of: merged(values, of.over, of.starts)),
}
"""Rules of more than one field, by their names; ``"apart"`` is the default of the field."""
