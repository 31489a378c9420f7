"""Where two models first compute something else: inputs, parameters or computation, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pytest_modelhealth.alignment.result import MOST_CALLS, Cause, Causes, Change, Pair, kind
from pytest_modelhealth.comparison.comparison import FORWARD, Divergence
from pytest_modelhealth.comparison.layer_differences import (
    Changed,
    are_known,
    other_dtypes,
    other_operations,
    other_settings,
)
from pytest_modelhealth.comparison.results import TensorResult
from pytest_modelhealth.comparison.runs import Trace, TwoRuns, container
from pytest_modelhealth.report import UNCALLED, Status
from pytest_modelhealth.settings.setting import dotted, is_inside, parent


class Search:
    """The search for where two models first differ, and for the words to say it.

    Tensors stand in the order in which they appear in the reference. Of snapshots, which keep
    statistics merged over calls of models that are not here, layers go by their later names.
    """

    def __init__(
        self,
        runs: TwoRuns,
        changed: Mapping[str, Changed],
        results: Sequence[TensorResult],
        *,
        of_snapshots: bool = False,
    ) -> None:
        self.runs, self.a, self.b, self.changed = runs, runs.a, runs.b, changed
        self.results, self.of_snapshots = results, of_snapshots
        self.causes = Causes(runs.alignment)
        self.diverged = [result for result in results if result.diverged]

    def first_divergence(self) -> Divergence | None:
        """Return where the two first differ: forward, in what a step leaves behind, or backward."""
        forward = next((one for one in self.diverged if one.key.role in FORWARD), None)
        for one in self.results:
            # what a batch does not show, another will: weights are not rounded, they are given
            pair = self._pair(one.key.layer) if one.key.role == "activations" else None
            if pair is not None and self.changed[pair.reference or ""].parameters:
                if forward is None or self._moment(forward) >= self._moment(one):
                    return self._weights(one)
                break
        if forward is not None:
            return self.begun_by(forward)
        a, b = self.a, self.b
        counts = len(a.of_role["", "outputs"]), len(b.of_role["", "outputs"])
        same = b.engine.flat_outputs or container(a.output) == container(b.output)
        if counts[0] != counts[1] or not same:
            story = f"the reference returns {a.output}, the candidate {b.output}"
            first = next((one for one in self.results if one.key.role == "outputs"), None)
            cause = "another output structure"
            return Divergence("", "", a.model_type, "structure", first, story, cause)
        kept = next((one for one in self.diverged if one.key.role == "buffers"), None)
        first = kept or next(iter(self.diverged), None)
        return None if first is None else self.begun_by(first)

    def begun_by(self, first: TensorResult) -> Divergence:
        """Return the divergence that began with a tensor, where all before it is right."""
        name, role = first.key.layer, first.key.role
        calls = self._calls_of(name)
        if role == "parameters" or (
            self.of_snapshots and role == "activations" and not calls and self._values(name)
        ):
            return self._weights(first)
        if self.of_snapshots and role == "activations" and calls:
            return self._called(calls, first, "another output")
        if role in FORWARD:
            return self._forward(first)
        if role == "buffers":
            return self._buffers(first)
        if role == "parameter_gradients":
            return self._parameter_gradient(first)
        return self._gradient(first)

    def _forward(self, first: TensorResult) -> Divergence:
        name, role = first.key.layer, first.key.role
        is_one = len(self.runs.alignment.to_candidate) == 1 < len(self.b.layers)
        if self.b.observation.outputs_only or is_one:
            story = "another output, and no layer inside the candidate can be told"
            values = (f"{self._label(n)}: {p}" for n, c in self.changed.items() for p in c.phrases)
            cause = next(values, "compare what it was made of to learn which layer parts first")
            return self._made(self._pair_or_stand_in(""), "computation", first, story, cause)
        if role == "outputs":
            return self._between(first, "", "what the model returns")
        if role == "inputs":
            calls, pair = self._calls_of(name), self.runs.alignment.by_reference.get(name)
            what = f"the input of {self._label(name)}"
            if calls:
                return self._called(calls, first, f"{what} is not what it was")
            is_moved = pair is not None and pair.change is Change.MOVED
            if pair is not None and is_moved and not self._unmatched_before(first)[2]:
                story = "it runs at another place among the layers, on another input"
                return self._made(pair, "moved", first, story)
            return self._between(first, parent(name), what)
        pair = self._pair(name, first.key.number)
        if pair is None or pair.reference is None:
            story = f"same input, and {first.link.candidate.layer} gives another output"
            return self._made(Pair(name, None, Change.REMOVED), "computation", first, story)
        if not self._shows_inputs(pair) and any(self._unmatched_before(first)):
            return self._between(first, parent(name), f"the output of {self._label(name)}")
        ours, theirs = self.a.layers[pair.reference], self.b.layers[pair.candidate or ""]
        is_merged = theirs.parameters and not ours.parameters  # a container is one layer now
        if self._runs_others(pair.reference) and not is_merged:
            return self._between(first, pair.reference, "")
        return self._own(pair, first)

    def _weights(self, output: TensorResult) -> Divergence:
        """Return the divergence of a layer that has other weights, on inputs that are right."""
        pair = self._pair_or_stand_in(output.key.layer)
        values = self.changed[pair.reference or ""].parameters
        cause = "; ".join(values.values())
        for tie in self.causes.ties:
            if tie.pair is pair and tie.parameter in values:
                return self._tied(tie, output, "it has other values", cause)
        if self.of_snapshots and not self._is_off(output.key.layer, "activations"):
            return self._made(pair, "parameters", output, self._given(pair, "other weights"), cause)
        if output.diverged:
            return self._own(pair, output)
        story = "other weights, although on this batch the output is the same up to rounding"
        return self._made(pair, "parameters", output, story, cause)

    def _own(self, pair: Pair, first: TensorResult) -> Divergence:
        """Return the divergence of a layer whose inputs are right and whose outputs are not."""
        name = pair.reference or ""
        changed = self._values(name)
        if pair.output_of is not None:
            story = f"same input, and its output is not that of {pair.output_of}, which was folded"
            what = "parameters" if changed else "computation"
            return self._made(pair, what, first, f"{story} into it", changed)
        if changed:
            cause = _joined(changed, *other_settings(pair, self.runs))
            story = self._given(pair, "other weights, other output")
            return self._made(pair, "parameters", first, story, cause)
        owns = self.a.layers[name].parameters and self.b.layers[pair.candidate or ""].parameters
        is_same = owns and self.changed[name].are_all_read
        story = self._given(pair, f"{'same weights, ' if is_same else ''}other output")
        cause = _joined(self._settings(pair), self._operations(pair)) or self._code(pair)
        return self._made(pair, "computation", first, story, cause)

    def _shows_inputs(self, pair: Pair) -> bool:
        """Whether what a layer is given is known of the candidate: in compiled code it is not."""
        known = self.a.of_role[pair.reference or "", "inputs"]
        return not (self.b.engine.runs_in_torch and known) or bool(
            self.b.of_role[pair.candidate or "", "inputs"]
        )

    def _given(self, pair: Pair, story: str) -> str:
        """Return a story of a layer that begins with what it was given, as far as that is known."""
        name = pair.reference or ""
        if self._is_off(name, "inputs") or not self._shows_inputs(pair):
            return story
        if self.a.of_role[name, "inputs"]:
            is_linked = any(one.key[:2] == (name, "inputs") for one in self.results)
            return f"same input, {story}" if is_linked or self.b.engine.runs_in_torch else story
        return story if self.of_snapshots else f"no input, {story}"

    def _between(self, first: TensorResult, around: str, seen: str) -> Divergence:
        """Return the divergence where all aligned layers before are right."""
        added, lost, called = self._unmatched_before(first)
        named, seen = seen or f"the output of {self._label(around)}", seen or "its output"
        around = self._with_code(around)
        pair = self._pair_or_stand_in(around)
        if added or lost:
            parts = [
                f"{what} {', '.join(map(self._name_of, pairs))}"
                for what, pairs in (("inserted", added), ("removed", lost))
                if pairs
            ]
            between = " and ".join([*parts, *map(str, called)])
            story = f"all before is right, {named} is not; between them: {between}"
            what = "inserted" if added else "removed"
            return self._made((added or lost)[-1], what, first, story, causes=called)
        right = "every layer before is right"
        if called:
            return self._called(called, first, f"{right}, {named} is not", self._settings(pair))
        if first.problem:
            story = f"{seen} has another form"
            return self._made(pair, "structure", first, story, first.problem)
        good = self._right_before(first)
        before = good[-1].key.layer if good else ""
        after = f" after {self._label(before)}" if before else ""
        what = self._operations(pair) or f"its own code{after} changed"
        story = f"{right if before else 'all before is right'}, {seen} is not: {what}"
        changed = self._values(around)
        cause = _joined(changed, self._settings(pair))
        return self._made(pair, "parameters" if changed else "computation", first, story, cause)

    def _buffers(self, first: TensorResult) -> Divergence:
        """Return the divergence of a layer that keeps something else for the next step."""
        name = first.key.layer
        names = [r.key.tensor for r in self.diverged if r.key[:2] == (name, "buffers")]
        verb = "is" if len(names) == 1 else "are"
        story = f"after the step {' and '.join(names)} {verb} not the same"
        if not self._is_off(name, "activations"):
            story = f"same output, but {story}"
        if calls := self._calls_of(name):
            return self._called(calls, first, story)
        pair = self._pair_or_stand_in(name)
        cause = self._settings(pair) or self._code(pair)
        return self._made(pair, "buffers", first, story, cause)

    def _gradient(self, first: TensorResult) -> Divergence:
        name = first.key.layer
        around = self._pair_or_stand_in(self._with_code(parent(name)))
        entries = self.a.entries
        given = {entries[key].slot for key in self.a.of_role[name, "activations"]}
        takers = [
            key.layer
            for key, entry in entries.items()
            if key.role == "inputs" and entry.slot in given and not self._runs_others(key.layer)
        ]
        story = (
            f"forward is right; the gradient that reaches the output of {self._label(name)} is not"
        )
        if len(takers) == 1 and not self._is_off(takers[0], "gradients"):
            story += f", while the one that reaches {self._label(takers[0])}, which follows it, is"
            pair = self._pair_or_stand_in(takers[0])
        else:
            story += ": the code behind it changed"
            pair = around if around.aligned else self._pair_or_stand_in(name)
        cuts = self._operations(around, backward=True) or self._operations(pair, backward=True)
        other = "its backward changed: a detach(), a custom autograd.Function"
        if self.of_snapshots and not name:
            other = "the loss function, its reduction, or a scale?"
        return self._made(pair, "backward", first, story, cuts or first.problem or other)

    def _parameter_gradient(self, first: TensorResult) -> Divergence:
        name = first.key.layer
        pair = self._pair_or_stand_in(name)
        tensor = dotted(self._label(name), first.key.tensor)
        story = f"forward is right, and so are all gradients before that of {tensor}"
        for tie in self.causes.ties:
            if pair is tie.owner or (pair is tie.pair and first.key.tensor == tie.parameter):
                return self._tied(tie, first, story)
        if calls := self._calls_of(name):
            return self._called(calls, first, story)
        return self._made(pair, "backward", first, story, first.problem)

    def _called(
        self, changes: list[Cause], first: TensorResult, story: str, cause: str = ""
    ) -> Divergence:
        """Return the divergence of a layer that is called more or less often."""
        change, *others = named = changes[:MOST_CALLS]
        said = "; ".join([change.phrase, *map(str, others), story])
        return self._made(change.pair, "calls", first, said, cause, causes=named)

    def _tied(self, tie: Cause, first: TensorResult, story: str, cause: str = "") -> Divergence:
        """Return the divergence of a parameter that is no longer tied, or now is."""
        pair, said = self._pair(first.key.layer) or tie.pair, f"{tie.phrase}; {story}"
        found = self._made(pair, "tying", first, said, cause, causes=(tie,))
        return replace(found, label=tie.label)

    def _made(
        self,
        pair: Pair,
        kind: str,
        result: TensorResult,
        story: str,
        cause: str = "",
        causes: Sequence[Cause] = (),
    ) -> Divergence:
        affected = dict.fromkeys(r.key.layer for r in self.diverged if r.key.role != "outputs")
        places = ((self.a, pair.reference), (self.b, pair.candidate))
        ours, theirs = (
            "" if name is None else side.observation.called_at(name) for side, name in places
        )
        return Divergence(
            layer=pair.name,
            candidate=pair.candidate,
            label=self._name_of(pair),
            kind=kind,
            result=result,
            story=story,
            cause=cause,
            affected=tuple(n for n in affected if n not in (pair.name, result.key.layer)),
            causes=tuple(causes),
            called_at=(ours, theirs),
        )

    def _operations(self, pair: Pair, *, backward: bool = False) -> str:
        """Return which operation of the code of a layer is new or gone, where that is known."""
        return other_operations(self.runs, pair, self._label(pair.name), backward=backward)

    def _settings(self, pair: Pair) -> str:
        """Return in what the two layers of a pair differ: their type, mode and settings."""
        if pair.reference is None or pair.candidate is None:
            return ""
        x, y = self.a.layers[pair.reference], self.b.layers[pair.candidate]
        is_other = kind(x) != kind(y) or (
            x.type_name != y.type_name and x.functional == y.functional
        )
        what = f"it is a {y.type_name}, was a {x.type_name}" if is_other and y.type_name else ""
        dtypes = other_dtypes(pair, self.a, self.b)
        return _joined(what, dtypes, *other_settings(pair, self.runs))

    def _code(self, pair: Pair) -> str:
        """Return what is left to blame where no setting of a layer is known to differ."""
        if self.of_snapshots:
            return "its settings or its forward?"
        same = (
            "its settings are the same: the code of its forward changed, or it draws random numbers"
        )
        return same if are_known(pair, self.runs) else ""

    def _calls_of(self, name: str) -> list[Cause]:
        """Return what became of the calls of a layer, or of one around it."""
        return [change for change in self.causes.calls if name in change.inside][:1]

    def _values(self, name: str) -> str:
        """Return which values of a layer of the reference differ."""
        return "; ".join(self.changed[name].phrases) if name in self.changed else ""

    def _is_off(self, layer: str, role: str) -> bool:
        """Whether any tensor of a layer in a role diverged."""
        return any(one.key[:2] == (layer, role) for one in self.diverged)

    def _with_code(self, name: str) -> str:
        """Return the nearest aligned module around with a forward, which a ModuleList has not."""
        while name and (self._pair(name) is None or self.a.layers[name].status in UNCALLED):
            name = parent(name)
        return name

    def _pair(self, name: str, call: int = 0) -> Pair | None:
        """Return the pair of a layer of the reference; of a folded one, that of its host.

        Where its calls are those of several layers, that of one call.
        """
        alignment = self.runs.alignment
        for pair in alignment.pairs:
            if pair.output_of is not None and pair.output_of == name:
                return pair
        found = alignment.by_reference.get(name)
        if found is not None and (name, call) in alignment.calls:
            found = replace(found, candidate=alignment.calls[name, call][0])
        return found if found is not None and found.aligned else None

    def _pair_or_stand_in(self, name: str) -> Pair:
        return self._pair(name) or Pair(name, None, Change.REMOVED)

    def _label(self, name: str) -> str:
        """Return what to call a layer of the reference."""
        pair = self.runs.alignment.by_reference.get(name)
        return name or self.a.model_type if pair is None else self._name_of(pair)

    def _name_of(self, pair: Pair) -> str:
        side = self.b if self.of_snapshots and pair.candidate is not None else self.a
        return (pair.candidate if side is self.b else pair.name) or side.model_type

    def _runs_others(self, name: str) -> bool:
        """Whether other layers ran inside this one."""
        return any(one.calls and is_inside(one.name, name) for one in self.a.layers.values())

    def _right_before(self, first: TensorResult) -> list[TensorResult]:
        """Return the outputs of layers that were right before `first`."""
        before = self.results[: self.results.index(first)]
        return [one for one in before if one.key.role == "activations" and not one.diverged]

    def _unmatched_before(self, first: TensorResult) -> tuple[list[Pair], list[Pair], list[Cause]]:
        """Return what was inserted, removed, and called more or less often before `first`.

        That is, between the last good tensor and it; what is called more often comes first.
        """
        a, b, good = self.a, self.b, self._right_before(first)
        ours = self._moment(good[-1]) if good else -1, self._moment(first)
        theirs = self._moment_there(*good), self._moment_there(first)
        called = [
            change
            for change in self.causes.calls
            if _outputs(a, change.pair.reference, ours)
            != _outputs(b, change.pair.candidate, theirs)
        ]
        free = [
            pair
            for pair in self.runs.alignment.pairs
            if pair.reason is None
            and not any(is_inside(pair.name, change.pair.name) for change in called)
        ]
        added = [p for p in free if p.reference is None and _ran(b, p.name, theirs)]
        lost = [p for p in free if p.candidate is None and _ran(a, p.name, ours)]
        return added, lost, sorted(called, key=lambda change: not change.more)

    def _moment(self, result: TensorResult) -> int:
        """Return when a tensor appeared in the reference."""
        return self.a.entries[result.key].moment

    def _moment_there(self, *results: TensorResult) -> int:
        """Return when the last counterpart of these tensors appeared in the candidate."""
        keys = (result.link.candidate for result in results)
        return max(
            (self.b.entries[key].moment for key in keys if key in self.b.entries), default=-1
        )


def _joined(*phrases: str) -> str:
    return "; ".join(filter(None, phrases))


def _ran(trace: Trace, layer: str, span: tuple[int, int]) -> bool:
    """Whether a layer that computes something itself gave an output in this span of moments."""
    is_idle = trace.layers[layer].status is Status.ALIAS_OF_INPUT
    is_idle = is_idle or any(is_inside(name, layer) for name in trace.layers)
    return not is_idle and _outputs(trace, layer, span) > 0


def _outputs(trace: Trace, layer: str | None, span: tuple[int, int]) -> int:
    """Return how many outputs a layer gave in this span of moments."""
    outputs = trace.of_role[layer or "", "activations"]
    return sum(span[0] < trace.entries[key].moment <= span[1] for key in outputs)
