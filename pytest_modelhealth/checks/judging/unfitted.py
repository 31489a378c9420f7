"""Tells what a check finds where depth alone explains it: nothing is normalised yet.

A model in evaluation mode whose batch normalisations have seen no batch is as deep as it looks: its
activations grow, fade or line up layer by layer, and so do its gradients, with nothing wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from pytest_modelhealth.checks.check import Check
from pytest_modelhealth.checks.facts import called, flow_of
from pytest_modelhealth.checks.freshness import is_unfitted
from pytest_modelhealth.report import Inconclusive, Observation, Violation

_STATE_ROLES = ("parameters", "buffers")
_BACKWARD_ROLES = ("gradients", "parameter_gradients")


class Unfitted:
    """The batch normalisations of one observation that have seen no batch."""

    def __init__(self, observation: Observation, checks: Iterable[Check]) -> None:
        self._observation = observation
        self._checks = frozenset(check.name for check in checks if check.reads_scale)

    def explain(self, violation: Violation) -> bool:
        """Whether depth behind one of them may have brought a violation about.

        Activations are made behind it; gradients pass it on their way back, or begin behind it.
        """
        if violation.check not in self._checks or violation.independent or not self._norms:
            return False
        if violation.role in _STATE_ROLES:
            return False
        if any(seen.layer in self._behind for seen in violation.evidence):
            return True  # what began before them passes its limit behind them
        if violation.role == "inputs":
            givers = flow_of(self._observation).producers(violation.layer)
            return not self._behind.isdisjoint(givers)
        is_before = violation.role in _BACKWARD_ROLES and violation.layer in self._before
        return is_before or violation.layer in self._behind

    def doubt(self, finding: Inconclusive) -> bool:
        """Whether a finding was in doubt for other reasons where depth explains it, too."""
        return finding.check in self._checks and finding.layer in self._behind

    def line(self, explained: list[Violation]) -> Inconclusive:
        """Return the one line that stands for all that they explain."""
        first, *others = self._norms
        so_do = f", as in {len(others)} more" if others else ""
        every = [violation for root in explained for violation in (root, *root.folded)]
        checks = ", ".join(dict.fromkeys(violation.check for violation in every))
        reason = (
            f"its running mean is 0 and its variance 1, as they start{so_do}, so that evaluation "
            f"mode normalises nothing, and what depth explains is not judged ({checks}); train "
            "for a step first, or inspect in training mode"
        )
        return Inconclusive("normalization", first, reason)

    @cached_property
    def _norms(self) -> tuple[str, ...]:
        return tuple(r.name for r in called(self._observation) if is_unfitted(r))

    @cached_property
    def _behind(self) -> frozenset[str]:
        return flow_of(self._observation).reach(*self._norms).union(self._norms)

    @cached_property
    def _before(self) -> frozenset[str]:
        return flow_of(self._observation).feeding(*self._norms).union(self._norms)
