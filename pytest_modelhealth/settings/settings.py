"""`Settings`: all of them with the values in force; immutable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any

from pytest_modelhealth.errors import SettingsError, suggest
from pytest_modelhealth.settings.choices import (
    APPLICABLE,
    AUTOMATIC,
    CheckNames,
    LayerLimit,
    LayerLimits,
    Patterns,
    Probes,
    Severities,
    require_known,
)
from pytest_modelhealth.settings.setting import Limit, Setting, SettingValue, Waiver

LAYERS = Patterns(
    "layers",
    list,
    default=("*",),
    help="names or shell wildcards of layers: only these are judged; all are still observed",
    per_layer=False,
)

_SKIP_CHECKS = "checks to leave out, by name or shell wildcard; wins over checks"
_SEVERITY = "warn or fail, for all checks or by name or shell wildcard; what warns is shown"
_PROBES = (
    "probes to run, by name or shell wildcard; all, none, auto (those that a run calls for) or, "
    "as in tests, applicable (those of one further forward that apply, too)"
)
_AUTO_CHECK = "whether a report is checked when the test ends that did not ask for its verdict"
_INCONCLUSIVE = "pass, warn or fail: what an inconclusive report does where it is checked"
_STRICT = "whether what only warns fails; what severity says of a check wins over it"
_RANK_TIMEOUT = "seconds that a rank waits for the others that inspect a model with it"
_THRESHOLDS = (
    "thresholds for the layers that a name or shell wildcard matches; they win over the value for "
    "all layers, the last that matches first"
)


def general_settings(checks: Iterable[Any]) -> tuple[Setting, ...]:
    """Return the settings that belong to no check; those that choose know `checks`."""
    checks = tuple(checks)
    names = tuple(check.name for check in checks)
    probes = tuple(check.name for check in checks if check.is_probe)
    whole = partial(Setting, per_layer=False)
    named = partial(CheckNames, type=list, per_layer=False, one_of=names)
    choosing = (
        LAYERS,
        named("checks", default=("*",), help="checks to run, by name or shell wildcard"),
        named("skip_checks", default=(), help=_SKIP_CHECKS),
        Severities("severity", dict, (), _SEVERITY, one_of=names, per_layer=False),
        Probes("probes", list, (AUTOMATIC,), _PROBES, one_of=probes, per_layer=False),
    )
    others = (
        whole("auto_check", bool, True, _AUTO_CHECK),
        whole("inconclusive", str, "warn", _INCONCLUSIVE, one_of=("pass", "warn", "fail")),
        whole("strict", bool, False, _STRICT),
        whole("rank_timeout", float, 60.0, _RANK_TIMEOUT, minimum=0.1),
    )
    thresholds = LayerLimits(
        (*choosing, *others, *(setting for check in checks for setting in check.settings)),
        name="thresholds",
        type=dict,
        default=(),
        help=_THRESHOLDS,
        per_layer=False,
    )
    return (*choosing, thresholds, *others)


class Settings(Mapping[str, Limit]):
    """Every declared setting with its value in force; immutable.

    ``settings["max_grad_norm"]`` is a `Limit`. `override` lays values over these and returns a new
    object. Settings pickle, compare and print.

    Args:
        declared: the settings there are.
        limits: values that are not the defaults.
        waivers: violations that are accepted.
        checks: the checks that judge under these settings, the gravest first.
    """

    def __init__(
        self,
        declared: Iterable[Setting],
        limits: Mapping[str, Limit] | None = None,
        waivers: tuple[Waiver, ...] = (),
        checks: tuple[Any, ...] = (),
    ) -> None:
        declared = _listed(declared, Setting)
        self._declared: dict[str, Setting] = {setting.name: setting for setting in declared}
        self._limits = {name: Limit(s.default, "default") for name, s in self._declared.items()}
        self._limits.update(limits or {})
        self.waivers = waivers
        self.checks = checks

    def __getitem__(self, name: str) -> Limit:
        return self._limits[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._limits)

    def __len__(self) -> int:
        return len(self._limits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self._state() == other._state()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        changed = {n: limit for n, limit in self._limits.items() if limit.origin != "default"}
        return f"Settings({changed}, waivers={self.waivers})"

    def _state(self) -> tuple[object, ...]:
        kinds = tuple(type(check) for check in self.checks)
        return (self._declared, self._limits, self.waivers, kinds)

    @property
    def declarations(self) -> tuple[Setting, ...]:
        """Every setting there is: the general ones, then in the order of the checks."""
        return tuple(self._declared.values())

    @cached_property
    def layer_limits(self) -> tuple[LayerLimit, ...]:
        """The thresholds by layer pattern; of those that match a layer, the last one wins."""
        return self._limits["thresholds"].value if "thresholds" in self._limits else ()

    def limit(self, name: str, layer: str) -> Limit:
        """Return the value of setting `name` in force for `layer`."""
        for special in self.layer_limits[::-1]:
            if special.setting == name and fnmatchcase(layer, special.layers):
                return special.limit
        return self[name]

    def exceeded(self, name: str, layer: str, value: float) -> Limit | None:
        """Return the limit of a layer that `value` is beyond, below it where it is a least one."""
        limit = self.limit(name, layer)
        if limit.value is None:
            return None
        is_least = name.startswith(("min_", "vanishing_"))
        return limit if (value < limit.value if is_least else value > limit.value) else None

    def severity(self, check: str) -> Limit:
        """Return ``"warn"`` or ``"fail"``, as is in force for the check of this name."""
        for rule in reversed(self["severity"].value):
            if fnmatchcase(check, rule.checks):
                return Limit(rule.severity, rule.origin)
        own = (known.severity for known in self.checks if known.name == check)
        return Limit(next(own, "fail"), "default")

    def chooses(self, check: str) -> bool:
        """Whether the check of this name is to run."""

        def named(setting: str) -> bool:
            return any(fnmatchcase(check, pattern) for pattern in self[setting].value)

        return named("checks") and not named("skip_checks")

    def probes(self, check: str) -> bool | None:
        """Return whether a probe is to run; ``None`` where that is for the run itself to say."""
        value = self["probes"].value
        is_named = any(fnmatchcase(check, pattern) for pattern in value)
        is_open = not is_named and value[:1] in ((AUTOMATIC,), (APPLICABLE,))
        return (None if is_open else is_named) if self.chooses(check) else False

    def declared(self, name: str, origin: str) -> Setting:
        """Return the declaration of `name`.

        Raises:
            SettingsError: no such setting; the message suggests the nearest and lists all.
        """
        if name not in self._declared:
            raise SettingsError(
                f"{origin}: unknown setting {name!r}{suggest(name, self._declared)} "
                f"Known settings: {', '.join(sorted(self._declared))}."
            )
        return self._declared[name]

    def override(self, values: Mapping[str, object], origin: str) -> Settings:
        """Return these settings with `values` laid over them, each marked as coming from `origin`.

        Raises:
            SettingsError: a name is unknown, or a value has the wrong type or range.
        """
        if not isinstance(values, Mapping):
            raise SettingsError(
                f"{origin}: values must be a mapping from names of settings, such as "
                f"{{'max_grad_norm': 10.0}}, not {values!r}"
            )
        settings = self
        for name, value in values.items():
            setting = self.declared(name, origin)
            settings = settings._with(setting, setting.validate(value, origin), origin)
        return settings

    def read(self, name: str, text: str, origin: str) -> Settings:
        """Return these settings with what `text` spells laid over them.

        Raises:
            SettingsError: the name is unknown, or `text` spells no value of it.
        """
        setting = self.declared(name, origin)
        return self._with(setting, setting.parse(text, origin), origin)

    def _with(self, setting: Setting, value: SettingValue, origin: str) -> Settings:
        limit = setting.over(self[setting.name], value, origin)
        limits = {**self._limits, setting.name: limit}
        return Settings(self.declarations, limits, self.waivers, self.checks)

    def waive(self, *waivers: Waiver) -> Settings:
        """Return these settings with `waivers` added.

        Raises:
            SettingsError: a waiver names a check that does not exist, or is no `Waiver`.
        """
        _listed(waivers, Waiver)
        for waiver in waivers if self.checks else ():
            if waiver.check is not None:
                require_known(waiver.check, [c.name for c in self.checks], waiver.origin)
        waivers = (*self.waivers, *waivers)
        return Settings(self.declarations, self._limits, waivers, self.checks)

    def with_checks(self, checks: tuple[Any, ...]) -> Settings:
        """Return these settings for other `checks`, whose declarations are sound."""
        declared = (*general_settings(checks), *(s for check in checks for s in check.settings))
        return Settings(declared, self._limits, self.waivers, checks)


def _listed(values: object, kind: type[Any]) -> tuple[Any, ...]:
    """Return `values` as a tuple, which holds things of one kind alone."""
    listed = tuple(values) if isinstance(values, Iterable) else (values,)
    for value in listed:
        if not isinstance(value, kind):
            what = f"{value!r} ({type(value).__name__})"
            raise SettingsError(
                f"give {kind.__name__.lower()}s, each of type {kind.__name__}, not {what}"
            )
    return listed
