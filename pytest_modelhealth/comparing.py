"""`compare`: runs both models on one batch and says where and why they part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from pytest_modelhealth.alignment.matching import align
from pytest_modelhealth.alignment.result import called, listed
from pytest_modelhealth.capture import Request
from pytest_modelhealth.capture.engine import Backward, Loss
from pytest_modelhealth.capture.observing.tensors import TensorStore
from pytest_modelhealth.checks import default_settings
from pytest_modelhealth.comparison.comparison import AlignedLayer, Comparison, Divergence
from pytest_modelhealth.comparison.counterparts import (
    BACKWARD,
    is_adapted,
    link,
    out_of_sight,
    with_calls,
)
from pytest_modelhealth.comparison.first_divergence import Search
from pytest_modelhealth.comparison.layer_differences import (
    Changed,
    changed_values,
    merged_layers,
    notes_on_dtypes,
    other_settings,
)
from pytest_modelhealth.comparison.results import FACTOR, Judge, TensorResult, machine_epsilon
from pytest_modelhealth.comparison.runs import Side, Trace, TwoRuns, placement, run, sides
from pytest_modelhealth.errors import checked_call
from pytest_modelhealth.rendering import renderer
from pytest_modelhealth.report import Status
from pytest_modelhealth.settings import Setting
from pytest_modelhealth.settings.setting import ancestors, is_inside

MEMORY_BUDGET = 1 << 30  # bytes of tensors that a comparison keeps in memory

_FACTOR = Setting("factor", float, FACTOR, "times the natural noise", minimum=0.0)
_MEMORY = Setting("memory_budget", int, MEMORY_BUDGET, "bytes", minimum=0)


@checked_call(default_settings, switches=False)
def compare(
    reference: Any,
    candidate: Any,
    inputs: Any,
    target: Any = None,
    *,
    loss: Loss | None = None,
    backward: Backward = None,
    factor: float = FACTOR,
    memory_budget: int = MEMORY_BUDGET,
) -> Comparison:
    """Compare two models on one batch: every layer, forward and backward, element by element.

    Both start from the same random state and run in the mode they are in. Both are left as they
    were, bit for bit.

    Args:
        reference: the model that is right.
        candidate: a model that should compute the same: refactored, compiled, exported, scripted,
            of another dtype, quantised, on another device; a `state_dict`, which is loaded into a
            copy of the reference; or an ONNX model, session or file.
        inputs: the batch, as for `Inspector.run_inspection`. It is brought to the dtype and device
            of the candidate's parameters.
        target: what `loss` compares the output with.
        loss: ``loss(output, target)``, else ``loss(output)``; ``None`` takes ``output.loss``, a
            scalar output, or a fixed random projection of the outputs.
        backward: ``False`` leaves gradients out.
        factor: how many times its natural noise a difference may be.
        memory_budget: bytes of tensors to keep in memory; the rest lies in a temporary file, which
            is removed however this ends.

    Raises:
        SettingsError: `factor` or `memory_budget` is of a wrong type or size.
        InspectionError: one of the two is nothing that can be run, or a `state_dict` does not fit.
        Exception: whatever a model or the loss raises, with a note on which of the two ran.
    """
    _FACTOR.validate(factor, "argument of compare")
    _MEMORY.validate(memory_budget, "argument of compare")
    ours, theirs = sides(reference, candidate)
    request = Request(reference, inputs, target, loss, backward)
    with TensorStore(memory_budget) as store:
        a = run(ours, request, store)
        b = run(theirs, request, store, placement(theirs, inputs))
        notes = list(_notes_on_runs(ours, theirs, a, b))
        is_blind = bool(b.observation.outputs_only) or not b.names_layers
        alignment = with_calls(align(a.layers, b.layers, is_blind=is_blind), a, b)
        alignment = out_of_sight(alignment, a, b)
        runs = TwoRuns(a, b, alignment, store)
        if is_adapted(runs):
            notes.append(
                "the candidate trains layers that were added, the others are frozen for it: "
                "gradients that only these lack are no difference"
            )
        epsilons = machine_epsilon(a), machine_epsilon(b)
        slack = epsilons[1] if epsilons[1] > epsilons[0] else 0.0
        changed = {
            pair.reference: changed_values(runs, pair, slack)
            for pair in alignment.pairs
            if pair.reference is not None
        }
        merged = merged_layers(alignment, changed)
        notes += [f"{name} has taken over {', '.join(merged[name])}" for name in merged]
        changed |= dict.fromkeys(merged, Changed())
        if merged and not any(
            set(layer.parameters) - set(layer.frozen) for layer in b.layers.values() if layer.calls
        ):  # all that can be trained lies in layers that are not called
            b = replace(b, observation=replace(b.observation, backward=False))
            runs = replace(runs, b=b)
        links = link(runs, {name for name, found in changed.items() if found.others}, merged)
        judge = Judge(runs, replace(request, model=ours.module), factor, epsilons)
        results = sorted(judge.results(links), key=lambda result: a.entries[result.key].moment)
        notes += judge.notes
        aside = without_effect(results)
        notes += _notes_without_effect(aside, runs)
        results = [result for result in results if result not in aside]
        same_weights = not any(found.parameters for found in changed.values())
        if same_weights and are_one_function(results, a, b):
            inside = [one.key.layer or a.model_type for one in results if one.diverged]
            names = listed(list(dict.fromkeys(inside)))
            why = (
                "built otherwise in the candidate; all outputs and gradients are equal bit for bit"
            )
            notes += [f"{names}: {why}"] if names else []
            results = [result for result in results if not result.diverged]
        if store.on_disk:
            notes.append(f"{store.on_disk / 2**20:,.0f} MiB of tensors lay in a temporary file")
        search = Search(runs, changed, results)
        divergence = search.first_divergence()
        sources = {result.source for result in results}
        return Comparison(
            reference=a.model_type,
            candidate=b.model_type,
            alignment=alignment,
            layers=_layers(search),
            outputs=tuple(result for result in results if result.key.role == "outputs"),
            first_divergence=divergence,
            losses=(a.observation.loss, b.observation.loss),
            basis=next(
                (basis for source, basis in _BASES if source in sources), "bitwise equality"
            ),
            notes=tuple(dict.fromkeys([*_remarks(search, divergence), *notes])),
            renderer=renderer,
        )


_BASES = (
    ("quantised", "runs of the reference perturbed as by eight bits"),
    ("perturbed", "runs of the reference perturbed by rounding"),
    ("floor", "machine epsilon and depth"),
)
"""What a verdict rests on, by what the noise of any tensor was measured by."""


def _layers(search: Search) -> dict[tuple[str | None, str | None], AlignedLayer]:
    of_layer: dict[str | None, list[TensorResult]] = defaultdict(list)
    for result in search.results:
        if result.key.role != "outputs":
            of_layer[result.key.layer].append(result)
    layers = {}
    for pair in search.runs.alignment.pairs:
        name = pair.reference
        side = search.b if name is None else search.a
        layers[name, pair.candidate] = AlignedLayer(
            pair=pair,
            type_name=side.layers[pair.name].type_name,
            tensors=tuple(of_layer[name]),
            changed_parameters=search.changed[name].phrases if name is not None else (),
        )
    return layers


def _notes_on_runs(ours: Side, theirs: Side, a: Trace, b: Trace) -> Iterator[str]:
    """Yield what was remarkable about the two runs."""
    if theirs.note:
        yield theirs.note
    has_no_gradients = a.observation.backward and not b.observation.backward
    if theirs.quantised:
        yield "a quantised model has no gradients: the forward pass is compared"
    elif theirs.is_frozen and theirs.engine.runs_in_torch and has_no_gradients:
        yield "the candidate trains nothing (requires_grad=False): the forward pass is compared"
    for side, trace in ((ours, a), (theirs, b)):
        yield from (f"{side.name}: {note}" for note in trace.observation.notes)


def _remarks(search: Search, divergence: Divergence | None) -> Iterator[str]:
    """Yield what differs in the models and is no divergence by itself."""
    alignment, model = search.runs.alignment, search.a.model_type
    yield from notes_on_dtypes(search.runs)
    unseen = "" if divergence is not None else "; no number of this batch shows it"
    if divergence is None:
        settings: dict[str, list[str]] = defaultdict(list)
        for pair in alignment.pairs:
            for phrase in other_settings(pair, search.runs):
                settings[phrase].append(pair.name or model)
        yield from (f"{listed(names)}: {phrase}{unseen}" for phrase, names in settings.items())
        folded = {pair.reference for pair in alignment.pairs if pair.output_of is not None}
        for name, found in search.changed.items():
            if found.phrases and name not in folded:
                phrase = f"{name}: {found.phrases[0]}"
                yield f"parameters differ that this batch does not show: {phrase}"
                break
    both_nan = [r for r in search.results if r.difference is not None and r.difference.nan_both]
    if both_nan:
        layers = list(dict.fromkeys(r.key.layer or model for r in both_nan))
        yield f"equal, but NaN on both sides: {listed(layers)}"
    said = () if divergence is None else divergence.causes
    causes = (*search.causes.ties, *search.causes.calls)
    yield from (f"{cause}{unseen}" for cause in causes if cause not in said)
    told = {name for change in search.causes.calls for name in change.inside}
    told |= {one for name, _ in alignment.calls for one in (name, *ancestors(name))}
    for _, x, y in alignment.aligned:
        is_seen = Status.UNSUPPORTED not in (x.status, y.status) and x.name not in told
        if x.calls != y.calls and min(x.calls, y.calls) and is_seen:
            times, most = called(x.calls, y.calls), min(x.calls, y.calls)
            yield f"{x.name}: {times}, on as many numbers; the first {most} compared"


def _notes_without_effect(set_aside: list[TensorResult], runs: TwoRuns) -> list[str]:
    """Return what to say of tensors that differ to no effect.

    What a layer gave that the candidate computes in the next one, such as a convolution with the
    batch norm behind it, is not there to be the same.
    """
    a = runs.a
    absent = {
        a.entries[key].slot
        for pair in runs.alignment.pairs
        if pair.candidate is None
        for key in a.of_role[pair.name, "activations"]
    }
    first: dict[str, str] = {}
    for result in set_aside:
        role, off = result.key.role, result.difference
        if role == "inputs" and a.entries[result.key].slot in absent:
            continue
        if result.unseen:
            what = f"its gradient was not seen in the candidate ({result.unseen})"
        elif result.shape or off is None:
            before = "x".join(map(str, a.entries[result.key].shape))
            what = f"its {role} are {result.shape}, were {before}: not compared"
        else:
            what = f"its {role} are others, {off.found:.6g} for {off.expected:.6g}"
        what += f"; what is computed from {'it' if result.unseen else 'them'} agrees"
        first.setdefault(result.key.layer, f"{result.key.layer or a.model_type}: {what}")
    return list(first.values())


def without_effect(results: Iterable[TensorResult]) -> list[TensorResult]:
    """Return the tensors that differ and make no difference to what is computed from them.

    - A tensor in another shape: another order of axes, or one step of a sequence at a time. Element
      by element such tensors tell nothing; the next tensor of the same shape tells.
    - What a layer takes, where all it gives agrees: a mask of -1e9 for one of -inf, or scores that
      are shifted before a softmax.
    - A gradient that was not seen at a layer without parameters, where the next one agrees.
    - The gradient of what a layer with others in it returns, where all other gradients agree. A
      tensor that is returned and read inside has both ways in its gradient, a copy of it one.
    """
    results = list(results)
    found = _inputs_without_effect(results)
    for backward in (False, True):
        waiting: list[TensorResult] = []
        for one in results:
            if (one.key.role in BACKWARD) is not backward or one.key.role == "buffers":
                continue
            if one in found or (one.diverged and (one.shape or one.unseen)):
                waiting.append(one)
                continue
            found.update(() if one.diverged else waiting)
            waiting = []
    rest = [one for one in results if one.key.role in BACKWARD and one not in found]
    right = [one.key.layer for one in rest if not one.diverged]
    wrong = [one for one in rest if one.diverged]
    if all(
        one.key.role == "gradients"
        and not one.problem
        and any(is_inside(name, one.key.layer) for name in right)
        for one in wrong
    ):
        found.update(wrong)
    return [one for one in results if one in found]


def _inputs_without_effect(results: list[TensorResult]) -> set[TensorResult]:
    """Return the inputs that differ, of layers of which all else agrees."""
    others = [one for one in results if one.key.role != "inputs"]
    gives = {one.key.layer for one in others if one.key.role == "activations"}
    gives -= {one.key.layer for one in others if one.diverged}
    inputs = (one for one in results if one.key.role == "inputs" and one.diverged)
    return {one for one in inputs if one.key.layer in gives}


def are_one_function(results: list[TensorResult], a: Trace, b: Trace) -> bool:
    """Whether what the models return, keep and learn by is equal bit for bit, whatever is inside.

    Outputs alone tell nothing where they are whole numbers or NaN, nor of a layer whose numbers no
    gradient comes to, as behind a factor of zero.
    """
    equal = {
        one.key
        for one in results
        if one.difference is not None and not (one.difference.unequal or one.difference.nan_both)
    }
    runs = a.observation, b.observation
    told = ("outputs", "parameter_gradients") if all(run.backward for run in runs) else ("outputs",)
    due = {key for key in a.entries if key.role in told}
    due |= {one.key for one in results if one.key.role in ("buffers", "parameter_gradients")}
    if not due <= equal or (None not in (x.loss for x in runs) and runs[0].loss != runs[1].loss):
        return False
    seen = [runs[0].layers[one.key.layer].gradients for one in results if one.diverged]
    is_floating = any(
        key.role == "outputs" and a.entries[key].dtype.is_floating_point for key in due
    )
    return is_floating and all(one is None or one.abs_max > 0 for one in seen)
