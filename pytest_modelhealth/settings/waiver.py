"""`Waiver`: a violation that a project accepts, with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from pytest_modelhealth.errors import SettingsError
from pytest_modelhealth.settings.setting import Setting

WAIVE = Setting(
    "waive",
    list,
    default=None,
    help="violations to accept in every test, as 'LAYERS [CHECK]: REASON'; LAYERS and CHECK are "
    "names or shell wildcards; for the ini file and the command line",
)


@dataclass(frozen=True)
class Waiver:
    """A violation that a project accepts, and why.

    Args:
        layers: a layer name or a shell wildcard.
        check: the name of the check waived, or a shell wildcard; ``None`` waives all checks on
            these layers.
        reason: why it is accepted; never empty.
        origin: where the waiver stands.
        shared: whether it holds for every model of a test run, and so need not match in each.

    Raises:
        SettingsError: the layers are no string, the check is none, or the reason is missing.
    """

    layers: str
    check: str | None
    reason: str
    origin: str
    shared: bool = False

    def __post_init__(self) -> None:
        layers: object = self.layers
        check: object = self.check
        reason: object = self.reason
        if not isinstance(layers, str):
            raise SettingsError(
                f"{self.origin}: name the layers as strings first, such as 'encoder.*', not "
                f"{layers!r}; '*' is all of them"
            )
        if not isinstance(reason, str) or not reason.strip():
            raise SettingsError(
                f"{self.origin}: reason='...' is missing; say why the violation is accepted, as in "
                f"({self}, reason='sparse vocabulary')"
            )
        if not isinstance(check, str | None):
            raise SettingsError(
                f"{self.origin}: check must be the name of one check, not {check!r}"
            )

    def covers(self, check: str, layer: str) -> bool:
        """Whether it accepts what `check` finds in `layer`."""
        return self.concerns(check) and fnmatchcase(layer, self.layers)

    def concerns(self, check: str) -> bool:
        """Whether it is meant for `check`."""
        return self.check is None or fnmatchcase(check, self.check)

    def __str__(self) -> str:
        return repr(self.layers) + (f", check={self.check!r}" if self.check else "")


def parse_waivers(text: str, origin: str) -> tuple[Waiver, ...]:
    """Return the waivers that `text` spells, one a line: ``LAYERS [CHECK]: REASON``.

    Raises:
        SettingsError: a line has no layers, more than one check, or no reason.
    """
    return tuple(_parse_line(line, origin) for line in text.splitlines() if line.strip())


def _parse_line(line: str, origin: str) -> Waiver:
    what, _, reason = line.partition(":")
    layers, *check = what.split() or [""]
    if not layers or len(check) > 1 or not reason.strip():
        raise SettingsError(
            f"{origin}: a waiver is 'LAYERS [CHECK]: REASON', such as 'encoder.embed dead_units: "
            f"sparse vocabulary', not {line.strip()!r}"
            + ("; its reason is missing" if layers and not reason.strip() else "")
        )
    return Waiver(layers, check[0] if check else None, reason.strip(), origin, shared=True)
