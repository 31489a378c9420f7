"""Under what an inspection was judged: its settings, waivers and what was watched, as data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from pytest_modelhealth.bundles.content import Data, KeptWaiver, SettingLimit, WatchRule
from pytest_modelhealth.bundles.nest import Reader, Writer, qualified_name
from pytest_modelhealth.errors import InspectionError, SettingsError
from pytest_modelhealth.layers import Rule, Selection, original_class
from pytest_modelhealth.settings import LayerLimit, Limit, Settings, SeverityRule
from pytest_modelhealth.settings.waiver import Waiver


def kept_limits(settings: Settings, writer: Writer) -> tuple[SettingLimit, ...]:
    """Return every setting that is not at its default."""
    return tuple(
        SettingLimit(name, _value(limit.value, writer, name), limit.origin)
        for name, limit in settings.items()
        if limit.origin != "default"
    )


def _value(value: Any, writer: Writer, name: str) -> Data:
    if not isinstance(value, tuple):
        return writer.write(value, f"settings.{name}")
    rows: list[Data] = []
    for item in value:
        if isinstance(item, LayerLimit):
            limit = writer.write(item.limit.value, f"settings.{name}")
            rows.append([item.layers, item.setting, limit, item.limit.origin, item.shared])
        else:
            rows.append(list(item) if isinstance(item, SeverityRule) else item)
    return rows


def kept_waivers(settings: Settings) -> tuple[KeptWaiver, ...]:
    """Return the violations that were accepted."""
    return tuple(
        KeptWaiver(w.layers, w.check, w.reason, w.origin, w.shared) for w in settings.waivers
    )


def settings_of(
    limits: tuple[SettingLimit, ...], waivers: tuple[KeptWaiver, ...], base: Settings
) -> Settings:
    """Return the settings that were kept, for the checks that `base` has.

    Raises:
        InspectionError: a value is none of its setting.
    """
    values: dict[str, Limit] = {}
    try:
        for kept in limits:
            if kept.name in base:  # else of a check of the project's own, or of another version
                values[kept.name] = Limit(_sound(kept, base), kept.origin)
        accepted = tuple(Waiver(w.layers, w.check, w.reason, w.origin, w.shared) for w in waivers)
    except (SettingsError, TypeError, ValueError) as error:
        raise InspectionError(f"the bundle is damaged: its settings: {error}") from None
    return Settings(base.declarations, values, accepted, base.checks)


def _sound(kept: SettingLimit, base: Settings) -> Any:
    """Return the value of a setting, once it is one."""
    setting = base.declared(kept.name, kept.origin)
    if kept.name == "severity":
        rules = [SeverityRule(*row) for row in kept.value]
        for rule in rules:
            setting.validate({rule.checks: rule.severity}, kept.origin)
        return tuple(rules)
    if kept.name == "thresholds":
        return tuple(_layer_limit(row, base) for row in kept.value)
    return setting.validate(
        Reader({}).read(kept.value, kept.name) if not isinstance(kept.value, list) else kept.value,
        kept.origin,
    )


def _layer_limit(row: list[Any], base: Settings) -> LayerLimit:
    layers, name, value, origin, shared = row
    read = Reader({}).read(value, name)
    valid = base.declared(name, origin).validate(read, origin)
    return LayerLimit(str(layers), name, Limit(valid, str(origin)), bool(shared))


def kept_rules(selection: Selection) -> tuple[WatchRule, ...]:
    """Return what was watched."""
    return tuple(_kept_rule(rule) for rule in selection.rules)


def _kept_rule(rule: Rule) -> WatchRule:
    types = None if rule.types is None else tuple(map(qualified_name, rule.types))
    roles = tuple(sorted(rule.roles))
    if isinstance(rule.pattern, re.Pattern):
        return WatchRule(rule.pattern.pattern, rule.pattern.flags, roles, types)
    return WatchRule(rule.pattern, None, roles, types)


def selection_of(rules: tuple[WatchRule, ...], model: nn.Module) -> Selection:
    """Return what was watched; classes are looked for among those of the model's modules.

    Raises:
        InspectionError: a class is none of them, or a pattern is none.
    """
    known = {qualified_name(kind): kind for kind in _classes(model)}
    return Selection(tuple(_rule(rule, known) for rule in rules))


def _classes(model: nn.Module) -> Iterator[type[nn.Module]]:
    for module in model.modules():
        for kind in {type(module), original_class(module)}:
            yield from (base for base in kind.__mro__ if issubclass(base, nn.Module))


_FLAGS = re.ASCII | re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE


def _rule(kept: WatchRule, known: dict[str, type[nn.Module]]) -> Rule:
    try:
        pattern = (
            kept.pattern if kept.flags is None else re.compile(kept.pattern, kept.flags & _FLAGS)
        )
    except (re.error, ValueError) as error:
        raise InspectionError(f"the bundle is damaged: watch({kept.pattern!r}): {error}") from None
    types = None
    if kept.types is not None:
        types = tuple(known[name] for name in kept.types if name in known)
        if not types:
            raise InspectionError(
                f"the bundle watched layers of types {', '.join(kept.types)}, of which this model "
                "has none"
            )
    return Rule(pattern, frozenset(kept.roles), types)
