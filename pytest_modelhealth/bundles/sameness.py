"""What is not the same in two reports, number by number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pytest_modelhealth.rendering.notation import printable
from pytest_modelhealth.report import ROLES

Report = Mapping[str, Any]
"""A report as `HealthReport.to_dict` has it."""

_TOLD_FIRST = ("mean", "std", "min", "max", "norm", "nan_count", "shape", "dtype", "device")


def differences(then: Report, now: Report) -> tuple[str, ...]:
    """Return what differs between two reports, a phrase each: the verdict, the loss, then layers.

    Numbers are compared bit for bit.
    """
    return tuple(
        printable(phrase)
        for phrase in (
            *_changed("verdict", then.get("verdict"), now.get("verdict")),
            *_violations(then, now),
            *_changed("loss", then.get("loss"), now.get("loss")),
            *_layers(_by_name(then), _by_name(now)),
        )
    )


def _changed(what: str, then: Any, now: Any) -> Iterator[str]:
    if then != now:
        yield f"{what} was {then}, is {now}"


def _violations(then: Report, now: Report) -> Iterator[str]:
    before, after = (
        {_key(violation): violation for violation in report.get("violations", ())}
        for report in (then, now)
    )
    for key, violation in before.items():
        what = f"{violation.get('layer') or 'the model'} ({violation.get('check')})"
        if key not in after:
            yield f"{what} no longer fails"
        elif after[key].get("value") != violation.get("value"):
            yield from _changed(what, violation.get("value"), after[key].get("value"))
    for key, violation in after.items():
        if key not in before:
            yield f"{violation.get('layer') or 'the model'} ({violation.get('check')}) fails now"


def _key(violation: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(violation.get(name) for name in ("check", "layer", "role", "tensor"))


def _by_name(report: Report) -> dict[str, Mapping[str, Any]]:
    return {str(layer.get("name")): layer for layer in report.get("layers", ())}


def _layers(
    then: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    for name, before in then.items():
        label = name or "the model"
        if name not in now:
            yield f"{label} is gone"
            continue
        after = now[name]
        yield from _changed(f"{label}: status", before.get("status"), after.get("status"))
        yield from _changed(f"{label}: calls", before.get("calls"), after.get("calls"))
        for role in ROLES:
            yield from _tensors(f"{label} ({role})", before.get(role), after.get(role))
    yield from (f"{name or 'the model'} is new" for name in now if name not in then)


def _tensors(what: str, then: Any, now: Any) -> Iterator[str]:
    if then == now:
        return
    if not (isinstance(then, dict) and isinstance(now, dict)):
        yield f"{what} was {'seen' if then else 'not seen'}, is {'seen' if now else 'not seen'}"
        return
    if "shape" not in {**then, **now}:  # by the tensors' own names
        for name in {**then, **now}:
            yield from _tensors(f"{what} {name}", then.get(name), now.get(name))
        return
    moved = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    first = next((name for name in _TOLD_FIRST if name in moved), moved[0])
    yield from _changed(f"{what}: {first}", then.get(first), now.get(first))
