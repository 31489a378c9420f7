"""What is said to a probe of a batch, and what a probe ends with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report import Parting
from pytest_modelhealth.settings import APPLICABLE, Settings


class Conventions(NamedTuple):
    """How a batch is laid out, and what a model promises of it.

    Args:
        batch_dim: the dimension of samples, where it is not the first; ``None`` infers it.
        time_dim: the dimension of the steps of a sequence, as of a batch ``(N, C, T)``, where its
            sizes do not tell; counted from behind if negative.
        causal: whether no output may depend on later inputs; ``None`` reads that off the target.
        padding: a boolean tensor ``(N, T)``, true where there is padding, as for the
            ``key_padding_mask`` of torch; ``None`` reads it off masks and lengths in the batch.
    """

    batch_dim: int | None = None
    time_dim: int | None = None
    causal: bool | None = None
    padding: Tensor | None = None

    @classmethod
    def of(cls, batch_dim: Any, time_dim: Any, causal: bool | None, padding: Any) -> Conventions:
        """Return what was said, once it is sound.

        Raises:
            InspectionError: one of them is of a wrong type; the message says what is expected.
        """
        is_first = batch_dim is None or (_is_number(batch_dim) and batch_dim >= 0)
        if not is_first:
            raise InspectionError(
                "batch_dim must be the number of a dimension, counted from 0, such as 1, not "
                f"{batch_dim!r}"
            )
        if not (time_dim is None or _is_number(time_dim)):
            raise InspectionError(
                f"time_dim must be the number of a dimension, such as 2 or -1, not {time_dim!r}"
            )
        shape, dtype = getattr(padding, "shape", None), getattr(padding, "dtype", None)
        if padding is not None and (str(dtype) != "torch.bool" or len(shape or ()) != 2):
            given = repr(padding) if shape is None else f"{dtype} of shape {tuple(shape)}"
            raise InspectionError(
                "padding must be a boolean tensor of shape (samples, length), true where there is "
                f"padding, such as ids == 0, not {given}"
            )
        return cls(batch_dim, time_dim, causal, padding)

    def asked(self, settings: Settings) -> Settings:
        """Return settings under which what is promised of a model is asked for by name.

        Raises:
            InspectionError: no probe is asked for.
        """
        said = [name for name in self._fields if getattr(self, name) is not None]
        asked = (settings.probes(check.name) for check in settings.checks if check.is_probe)
        if said and not (any(asked) or APPLICABLE in settings["probes"].value):
            raise InspectionError(
                f"{said[0]}= is for probes, and none is asked for: say probes=True, or name one"
            )
        promised = {"causality": self.causal, "padding": self.padding is not None}
        probes = settings["probes"]
        more = [
            name
            for name, is_promised in promised.items()
            if is_promised and settings.probes(name) is not False and name not in probes.value
        ]
        return settings.override({"probes": [*probes.value, *more]}, probes.origin)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def on_several_ranks() -> bool:
    """Whether others run beside this process, and would wait for each forward of it."""
    ranks = torch.distributed
    return ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1


class Effects(NamedTuple):
    """What the change of a probe brought about: where runs part that should not."""

    changed: str  # for people
    partings: Sequence[Parting] = ()  # in execution order
    notes: tuple[str, ...] = ()


class UntellableError(Exception):
    """Nothing can be told: why, and what is needed; what was changed where a run followed.

    An experiment of `intervening` ends with `Effects`, or raises this one.
    """

    def __init__(self, reason: str, changed: str = "", notes: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.changed, self.notes = changed, notes


class NotApplicableError(UntellableError):
    """There is nothing to judge in this model or batch."""
