"""What began a drift: the inputs of a layer, its parameters, its computation, or its backward."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

from pytest_modelhealth.alignment.causes import MOST_CALLS, CallChange, TieChange, retyped
from pytest_modelhealth.settings.setting import is_inside
from pytest_modelhealth.snapshot.changes import SnapshotPair
from pytest_modelhealth.snapshot.snapshot import is_given

_HINTS = (
    ("norm", "its eps, or its mode?"),
    ("dropout", "its mode, its p, or a seed?"),
    ("softmax", "its dim, or a scale?"),
    ("attention", "its mask, its scale, or dropout?"),
    ("conv", "its stride, padding, dilation or groups?"),
    ("pool", "its kernel, stride or padding?"),
    ("embedding", "its padding_idx or max_norm, or other indices?"),
    ("lstm", "its initial state, or its direction?"),
    ("gru", "its initial state, or its direction?"),
    ("upsample", "its mode or align_corners?"),
    ("gelu", "its approximation?"),
    ("relu", "another activation, or its slope?"),
)

_NO_HINT = "its settings or its forward?"


class RootCause(NamedTuple):
    """What began a drift.

    Args:
        story: one sentence.
        explained: names of the layers in the report of which it tells everything, where it is a
            change of calls or of a tied weight.
    """

    story: str
    explained: frozenset[str] = frozenset()


class FirstDrift:
    """The first drift, from cause to effect, and what it comes from.

    Args:
        role: which tensor of the layer drifted; ``"loss"`` for the loss.
        layer: name of the layer in the report.
        drifted: role and layer of each tensor that drifted.
        pair: both snapshots.
    """

    def __init__(
        self, role: str, layer: str, drifted: Set[tuple[str, str]], pair: SnapshotPair
    ) -> None:
        self.role, self.layer, self.drifted = role, layer, drifted
        self.pair, self.old, self.new = pair, pair.old, pair.new
        self.label = pair.new.label(layer)

    def root_cause(self) -> RootCause:
        """Return the change of calls or of a tied weight it comes from, else what numbers tell."""
        tie = self._tie()
        if tie is not None:
            return RootCause(str(tie), frozenset({tie.pair.candidate or ""}))
        calls: Sequence[CallChange] = ()
        if self.role != "loss" and not is_given(self.role, self.layer):
            calls = self._calls()
        if not calls:
            return RootCause(self._story())
        to = self.pair.alignment.to_candidate
        text = "; ".join(map(str, calls[:MOST_CALLS]))
        return RootCause(text, frozenset(to[name] for change in calls for name in change.inside))

    def _tie(self) -> TieChange | None:
        for tie in self.pair.causes.ties:
            later, owner = tie.pair.candidate, tie.owner.candidate
            of_later = self.role in ("activations", "parameters", "parameter_gradients")
            if (self.layer == later and of_later) or (
                self.layer == owner and self.role == "parameter_gradients"
            ):
                return tie
        return None

    def _calls(self) -> Sequence[CallChange]:
        """Return what is called more or less often and explains the drift.

        - The layer itself, or one around it.
        - Of a container whose layers agree and that gives something else: what is in it.
        - Of a layer that takes something else: what was called right before it and no longer is, or
          is now; else what is called several times, as a snapshot has only the place of the last
          call.
        """
        changes, name = self.pair.causes.calls, self.pair.origin(self.layer)
        if name is None:
            return ()
        own = [change for change in changes if name in change.inside]
        if own:
            rest = [one for one in changes if one not in own]
            near = [one for one in rest if one.both or self._is_right_before(one)]
            return sorted([*own, *near], key=lambda one: not one.more)
        if self.role == "activations" and self.layer in self.new.holders:
            return [one for one in changes if is_inside(one.pair.name, name)]
        if self.role != "inputs" or self._unmatched():
            return ()
        before = [one for one in changes if self._is_right_before(one)]
        return before or [one for one in changes if one.both]

    def _is_right_before(self, change: CallChange) -> bool:
        """Whether a layer called on one side only returned there after the last common one."""
        if change.both:
            return False
        side = self.new if change.more else self.old
        here = self.layer if change.more else self.pair.origin(self.layer) or ""
        once = [
            (one.pair.candidate if change.more else one.pair.reference) or ""
            for one in (change, *self.pair.causes.calls)
            if not one.both
        ]
        if side.place[once[0]] > side.place[here]:
            return False
        between = list(side.layers)[side.place[once[0]] + 1 : side.place[here]]
        return all(
            other in side.holders or any(other == one or is_inside(other, one) for one in once)
            for other in between
        )

    def _story(self) -> str:
        if self.role == "loss":
            return "every layer agrees and the loss does not: its function or the target changed"
        if self.role == "inputs":
            return self._other_input()
        if self.role in ("parameters", "buffers"):
            what = "weights" if self.role == "parameters" else "buffers"
            return f"{self.label}: {', '.join([*self._given(), f'other {what}'])}"
        if self.role == "activations":
            return self._other_output()
        parameters = self.role == "parameter_gradients"
        what = "the gradient of its parameters" if parameters else "its gradient"
        cause = "a detach(), a custom backward, or the loss function?"
        if not self.layer:
            cause = "the loss function, its reduction, or a scale?"
        return f"{self.label}: the forward pass agrees, {what} is the first that does not: {cause}"

    def _given(self) -> list[str]:
        """Return whether the input of the layer is known to be the same."""
        seen = ("inputs", "") in self.new.layers[self.layer].tensors
        return ["same input"] if seen and ("inputs", self.layer) not in self.drifted else []

    def _other_input(self) -> str:
        if not self.layer:
            return f"{self.label}: the batch is another one"
        between = self._unmatched()
        if between:
            beginning = f"{self.label}: other input; between it and the layers before: "
            return beginning + ", ".join(between)
        layers = list(self.new.layers)[: self.new.place[self.layer]]
        before = [name for name in layers if name not in self.new.holders]
        after = f" after {self.new.label(before[-1])}" if before else ""
        parent = self.new.label(self.layer.rpartition(".")[0])
        return (
            f"{self.label}: other input, while every layer before it agrees: what happens{after} "
            f"in {parent} changed (a residual, a mask, a reshape, a function?)"
        )

    def _other_output(self) -> str:
        if self.layer in self.new.holders and len(self.new.layers) > 1:
            return (
                f"{self.label}: every layer in it agrees, its own output does not: its forward "
                "changed"
            )
        line, origin = self.new.layers[self.layer], self.pair.origin(self.layer)
        known = self._given() + ["same weights"] * line.owns_parameters
        before = line if origin is None else self.old.layers[origin]
        hint = next((hint for word, hint in _HINTS if word in line.type.lower()), _NO_HINT)
        cause = hint if before.type == line.type else retyped(before.type, line.type)
        return f"{self.label}: {', '.join([*known, 'other output'])}: {cause}"

    def _unmatched(self) -> list[str]:
        """Return what was added or removed right before the layer, and may change numbers."""
        found: list[str] = []
        for pair in self.pair.alignment.pairs:
            if pair.candidate == self.layer:
                break
            if pair.aligned and pair.candidate not in self.new.holders:
                found = []
            elif pair.candidate is None and self.old.computes(pair.name):
                found.append(f"{self.old.label(pair.name)} was removed")
            elif pair.reference is None and self.new.computes(pair.name):
                found.append(f"{self.new.label(pair.name)} was added")
        return found
