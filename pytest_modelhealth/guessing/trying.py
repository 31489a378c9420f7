"""Runs guessed batches through a model, and leaves no trace of it."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from pytest_modelhealth.capture.step.bare import Beside
from pytest_modelhealth.capture.step.untouched import random_state, restore_random_state
from pytest_modelhealth.guessing.drawing import Candidate
from pytest_modelhealth.rendering.notation import shorten

MOST_TRIES, MOST_SECONDS = 400, 60.0
"""Where a search ends: each try is a forward."""


class Outcome(NamedTuple):
    """What became of a batch.

    Args:
        output: what the model returned.
        error: what it raised instead.
        args: the positional arguments that it was called with.
        kwargs: the keyword arguments.
    """

    output: Any
    error: Exception | None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012 - never written to


class Trial:
    """The batches that were tried on one model.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.failed: list[tuple[Candidate, Exception]] = []
        self._beside: Beside | None = None
        self._until = time.monotonic() + MOST_SECONDS

    @property
    def is_over(self) -> bool:
        """Whether enough was tried."""
        return len(self.failed) >= MOST_TRIES or time.monotonic() > self._until

    @property
    def is_lazy(self) -> bool:
        """Whether the model's first forward makes its parameters, so that a copy is run."""
        return self._beside is not None and self._beside.is_lazy

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw inside as torch would draw next, and consume nothing."""
        state = random_state()
        try:
            yield
        finally:
            restore_random_state(state)

    def run(self, candidate: Candidate) -> Outcome:
        """Run a batch forward, without gradients; the model is afterwards as it was.

        Raises:
            InspectionError: the model cannot be run and put back.
        """
        if self._beside is None:
            self._beside = Beside(self.model)
        if self.is_lazy:
            return self._run_copy(candidate)
        with ExitStack() as stack:
            stack.enter_context(self.drawing())
            try:
                args, kwargs = candidate.made()
            except Exception as error:  # noqa: BLE001 - of a loader of the user's, say
                self.failed.append((candidate, error))
                return Outcome(None, error)
            stack.enter_context(self._beside.put_back((args, kwargs), evaluation=False))
            stack.enter_context(torch.no_grad())
            try:
                output = self.model(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - which is what a wrong batch causes
                self.failed.append((candidate, error))
                return Outcome(None, error, args, kwargs)
            return Outcome(output, None, args, kwargs)

    def _run_copy(self, candidate: Candidate) -> Outcome:
        """Run a copy of a lazy model, which has its own parameters afterwards."""
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        with self.drawing(), torch.no_grad():
            try:
                args, kwargs = candidate.made()
                return Outcome(copy.deepcopy(self.model)(*args, **kwargs), None, args, kwargs)
            except Exception as error:  # noqa: BLE001 - which is what a wrong batch causes
                self.failed.append((candidate, error))
                return Outcome(None, error, args, kwargs)

    def why_nothing_ran(self) -> str:
        """Return what was tried and what to write instead."""
        name = type(self.model).__name__
        lines = [f"cannot guess what {name}.forward takes"]
        shown: dict[str, str] = {}
        for candidate, error in self.failed:
            text = shorten(str(error).partition("\n")[0], 100)
            shown.setdefault(f"{type(error).__name__}: {text}", shorten(str(candidate), 90))
        if shown:
            lines[0] += f"; {len(self.failed)} batches were tried, and none ran:"
            lines += [f"  {batch}\n    {said}" for said, batch in [*shown.items()][:4]]
        else:
            lines[0] += ": its signature says nothing of a batch, and no layer was found to ask."
        lines.append(
            "write the batch yourself: make() returns (model, inputs), or (model, inputs, target, "
            "loss); inputs is a tensor, a tuple of positionals or a mapping of keywords. For init: "
            "--batch package.module:make_batch"
        )
        return "\n".join(lines)
