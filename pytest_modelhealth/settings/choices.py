"""Settings that choose by pattern: checks to run, their severity, limits by layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from pytest_modelhealth.errors import SettingsError, suggest
from pytest_modelhealth.settings.setting import Limit, Setting, SettingValue

Severity = Literal["warn", "fail"]
SEVERITIES: tuple[Severity, ...] = ("warn", "fail")


class SeverityRule(NamedTuple):
    """How grave the violations of the checks that `checks`, a shell wildcard, matches are."""

    checks: str
    severity: Severity
    origin: str


class LayerLimit(NamedTuple):
    """A limit for the layers that `layers`, a shell wildcard, matches.

    Args:
        layers: a layer name or a shell wildcard.
        setting: name of the setting.
        limit: its value there.
        shared: whether it holds for every model of a test run, and so need not match in each.
    """

    layers: str
    setting: str
    limit: Limit
    shared: bool = False


def require_known(pattern: str, known: Iterable[str], origin: str, noun: str = "check") -> None:
    """Do nothing if `pattern` matches a known check, or another thing of a `noun`.

    Raises:
        SettingsError: it matches none; the message suggests the nearest.
    """
    known = tuple(known)
    if not any(fnmatchcase(name, pattern) for name in known):
        raise SettingsError(
            f"{origin}: unknown {noun} {pattern!r}{suggest(pattern, known)} "
            f"Known {noun}s: {', '.join(known)}."
        )


class Patterns(Setting):
    """Names or shell wildcards of layers: a list of strings, or one string; the value is a tuple.

    There is one at least; whether each matches a layer is seen where a model is judged.
    """

    separators = r"[,\n]"
    kind = "names or shell wildcards of layers, such as 'encoder.*' or ['encoder.*', 'head']"

    def validate(self, value: object, origin: str) -> tuple[str, ...]:
        """Return `value` as a tuple of patterns."""
        listed: Any = re.split(self.separators, value) if isinstance(value, str) else value
        is_list = isinstance(listed, list | tuple | set | frozenset)
        if not is_list or not all(isinstance(pattern, str) for pattern in listed):
            raise SettingsError(
                f"{origin}: {self.name} must be {self.kind}, not {value!r} ({type(value).__name__})"
            )
        patterns = tuple(pattern.strip() for pattern in listed if pattern.strip())
        if not patterns and not isinstance(self, CheckNames):
            raise SettingsError(f"{origin}: {self.name}={value!r} names no layer; '*' is all")
        return patterns

    def parse(self, text: str, origin: str) -> SettingValue:
        """Return the patterns in `text`."""
        return self.validate(text, origin)

    def show(self, value: Any) -> str:
        """Return the patterns between commas."""
        return ", ".join(value) or "none"


class CheckNames(Patterns):
    """Patterns of checks, between commas or white space, each of which matches one in `one_of`."""

    separators = r"[\s,]+"
    kind = "names of checks, such as 'finite, dead_*' or ['finite', 'dead_*']"
    noun = "check"

    def validate(self, value: object, origin: str) -> tuple[str, ...]:
        """Return `value` as a tuple of patterns; ``none`` is none."""
        is_none = isinstance(value, str) and value.strip().lower() == "none"
        patterns = super().validate([] if is_none else value, origin)
        for pattern in patterns:
            require_known(pattern, self.one_of, f"{origin}: {self.name}", self.noun)
        return patterns


class Probes(CheckNames):
    """``True`` for all probes, ``False`` for none, or patterns of their names in `one_of`.

    The value is a tuple of patterns; `AUTOMATIC` alone is those that a run itself calls for, and
    `APPLICABLE`, maybe beside names, those of one further forward that the batch shows to apply.
    """

    kind = "True, False or names of probes, such as 'causality' or ['causality', 'padding']"
    noun = "probe"

    def validate(self, value: object, origin: str) -> tuple[str, ...]:
        """Return `value` as a tuple of patterns; ``all`` and ``none`` are what they say."""
        only: Any = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
        word = only.strip().lower() if isinstance(only, str) else only
        if isinstance(word, bool | str) and word in _WORDS:
            return _WORDS[word]
        if isinstance(value, list | tuple) and APPLICABLE in value:
            named = [name for name in value if name != APPLICABLE]
            return (APPLICABLE, *super().validate(named, origin))
        return super().validate(value, origin)


AUTOMATIC = "auto"
"""The value of `Probes` for those that a run itself calls for."""
APPLICABLE = "applicable"
"""The value of `Probes` in a test, where it is not set: those that the batch calls for, too."""
_WORDS: dict[str | bool, tuple[str, ...]] = {word: (word,) for word in (AUTOMATIC, APPLICABLE)}
_WORDS |= dict.fromkeys(("all", "true", "yes", "on", "1", True), ("*",))
_WORDS |= dict.fromkeys(("none", "false", "no", "off", "0", False), ())


class DtypeName(Setting):
    """A `torch.dtype` or its name; the value is the name without ``torch.``."""

    def validate(self, value: object, origin: str) -> SettingValue:
        """Return the name of `value`."""
        # Known by its class's name, as settings are read where torch is not loaded.
        is_dtype = (type(value).__module__, type(value).__name__) == ("torch", "dtype")
        name = str(value) if is_dtype else value
        return super().validate(
            name.removeprefix("torch.") if isinstance(name, str) else name, origin
        )


class Severities(Setting):
    """``"warn"`` or ``"fail"`` for all checks, or a mapping from names or wildcards to them.

    Each matches a check in `one_of`. The value is a tuple of `SeverityRule`.
    """

    def validate(self, value: object, origin: str) -> tuple[SeverityRule, ...]:
        """Return `value` as a tuple of rules."""
        by_check: Mapping[Any, Any] = value if isinstance(value, Mapping) else {"*": value}
        for checks, severity in by_check.items():
            if not isinstance(checks, str) or severity not in SEVERITIES:
                where = "" if checks == "*" else f" of {checks!r}"
                raise SettingsError(
                    f"{origin}: {self.name}{where} must be 'warn' or 'fail'"
                    f"{'' if where else ' or a mapping from checks to them'}, not {severity!r}"
                )
            require_known(checks, self.one_of, f"{origin}: {self.name}")
        return tuple(SeverityRule(checks, one, origin) for checks, one in by_check.items())

    def parse(self, text: str, origin: str) -> SettingValue:
        """Return the rules in `text`: ``warn``, or ``CHECK: warn`` between commas or lines."""
        items = [item.rpartition(":") for item in re.split(r"[,\n]", text) if item.strip()]
        rules = {checks.strip() or "*": severity.strip() for checks, _, severity in items}
        return self.validate({} if rules == {"*": "none"} else rules, origin)

    def show(self, value: Any) -> str:
        """Return the rules between commas."""
        return ", ".join(f"{rule.checks}: {rule.severity}" for rule in value) or "none"


class LayerLimits(Setting):
    """Thresholds by layer pattern, ``{"head.*": {"max_grad_norm": 100}}``: a tuple of `LayerLimit`.

    Args:
        known: the settings there are.
        **declaration: the arguments of `Setting`.
    """

    known: tuple[Setting, ...]

    def __init__(self, known: tuple[Setting, ...], **declaration: Any) -> None:
        super().__init__(**declaration)
        object.__setattr__(self, "known", known)  # as a data class it takes 1 ms to import

    def validate(self, value: object, origin: str) -> SettingValue:
        """Return `value` as a tuple of limits."""
        limits = []
        for layers, thresholds in self._mapping(value, value, origin).items():
            for name, threshold in self._mapping(thresholds, value, origin).items():
                where = f"{origin} for {layers!r}"
                valid = self._declared(name, where).validate(threshold, where)
                limits.append(LayerLimit(str(layers), name, Limit(valid, where)))
        return tuple(limits)

    def _mapping(self, part: object, whole: object, origin: str) -> Mapping[str, Any]:
        if isinstance(part, Mapping) and all(isinstance(key, str) for key in part):
            return part
        raise SettingsError(
            f"{origin}: {self.name} must be a mapping from layers to thresholds, such as "
            f"{{'head.*': {{'max_grad_norm': 100}}}}, not {whole!r}"
        )

    def _declared(self, name: str, origin: str) -> Setting:
        by_layer = {setting.name: setting for setting in self.known if setting.per_layer}
        if name in by_layer:
            return by_layer[name]
        if any(setting.name == name for setting in self.known) or name == self.name:
            raise SettingsError(
                f"{origin}: {name} is one value for the whole model; set it outside of {self.name}"
            )
        raise SettingsError(
            f"{origin}: unknown setting {name!r}{suggest(name, by_layer)} "
            f"Thresholds by layer: {', '.join(sorted(by_layer))}."
        )

    def parse(self, text: str, origin: str) -> SettingValue:
        """Return the limits in `text`, a line a pattern: ``head.*: max_grad_norm=100, ...``.

        They hold for every model of a run.
        """
        lines = [line for line in text.splitlines() if line.strip() not in ("", "none")]
        limits = [limit for line in lines for limit in self._line(line, origin)]
        return tuple(limit._replace(shared=True) for limit in limits)

    def _line(self, line: str, origin: str) -> Iterable[LayerLimit]:
        layers, _, thresholds = (part.strip() for part in line.rpartition(":"))
        pairs = [pair.partition("=") for pair in thresholds.split(",") if pair.strip()]
        if not layers or not pairs or not all(equals for _, equals, _ in pairs):
            raise SettingsError(
                f"{origin}: thresholds of layers are 'PATTERN: NAME=VALUE, ...', such as "
                f"'head.*: max_grad_norm=100', not {line.strip()!r}"
            )
        where = f"{origin} for {layers!r}"
        for name, _, spelled in pairs:
            setting = self._declared(name.strip(), where)
            yield LayerLimit(layers, setting.name, Limit(setting.parse(spelled, where), where))

    def show(self, value: Any) -> str:
        """Return a line a limit."""
        return "\n".join(f"{v.layers}: {v.setting}={v.limit.value}" for v in value) or "none"
