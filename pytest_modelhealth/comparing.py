"""`compare`: runs both models on one batch and says where and why they part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pytest_modelhealth.alignment.causes import called
from pytest_modelhealth.alignment.matching import align
from pytest_modelhealth.alignment.result import listed
from pytest_modelhealth.capture import Request
from pytest_modelhealth.capture.engine import Backward, Loss
from pytest_modelhealth.capture.observing.tensors import TensorStore
from pytest_modelhealth.comparison.comparison import AlignedLayer, Comparison, Divergence
from pytest_modelhealth.comparison.first_divergence import Search
from pytest_modelhealth.comparison.layer_differences import other_settings
from pytest_modelhealth.comparison.links import is_adapted, link
from pytest_modelhealth.comparison.refined import with_calls, with_folds
from pytest_modelhealth.comparison.results import (
    FACTOR,
    Judge,
    TensorResult,
    are_one_function,
    without_effect,
)
from pytest_modelhealth.comparison.rounding import (
    coarser_dtype,
    layer_epsilons,
    machine_epsilon,
    notes_on_dtypes,
    parameter_epsilon,
    quantisation,
)
from pytest_modelhealth.comparison.sides import (
    Side,
    candidate_side,
    placement,
    reference_side,
    run,
)
from pytest_modelhealth.comparison.trace import Trace, TwoRuns
from pytest_modelhealth.comparison.weights import Changed, changed_values, merged_layers
from pytest_modelhealth.errors import checked_call
from pytest_modelhealth.rendering import renderer
from pytest_modelhealth.report import Status
from pytest_modelhealth.settings import Setting
from pytest_modelhealth.settings.setting import ancestors
from pytest_modelhealth.tolerance import RUNS
from pytest_modelhealth.training import default_settings

MEMORY_BUDGET = 1 << 30
"""Bytes of tensors that a comparison keeps in memory."""

_ARGUMENTS = (
    Setting("strict_names", bool, False, "a layer by another name fails"),
    Setting("factor", float, FACTOR, "times the natural noise", minimum=0.0),
    Setting("memory_budget", int, MEMORY_BUDGET, "bytes", minimum=0),
    Setting("noise_runs", int, RUNS, "perturbed runs", minimum=1),
)


@checked_call(default_settings, switches=False)
def compare(
    reference: Any,
    candidate: Any,
    inputs: Any,
    target: Any = None,
    *,
    loss: Loss | None = None,
    backward: Backward = None,
    strict_names: bool = False,
    factor: float = FACTOR,
    memory_budget: int = MEMORY_BUDGET,
    noise_runs: int = RUNS,
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
        strict_names: whether a renamed, moved, retyped, inserted or removed layer fails too.
        factor: how many times its natural noise a difference may be.
        memory_budget: bytes of tensors to keep in memory; the rest lies in a temporary file, which
            is removed however this ends.
        noise_runs: perturbed runs of the reference, made where something seems to differ.

    Raises:
        SettingsError: `strict_names`, `factor`, `memory_budget` or `noise_runs` is of a wrong type
            or size.
        InspectionError: one of the two is nothing that can be run, or a `state_dict` does not fit.
        Exception: whatever a model or the loss raises, with a note on which of the two ran.
    """
    given = (strict_names, factor, memory_budget, noise_runs)
    for argument, value in zip(_ARGUMENTS, given, strict=True):
        argument.validate(value, "argument of compare")
    ours, theirs = reference_side(reference), candidate_side(candidate, reference)
    request = Request(reference, inputs, target, loss, backward)
    with TensorStore(memory_budget) as store:
        a = run(ours, request, store)
        b = run(theirs, request, store, placement(theirs, inputs))
        notes = list(_notes_on_runs(ours, theirs, a, b))
        is_blind = bool(b.observation.outputs_only) or not b.names_layers
        alignment = with_calls(align(a.layers, b.layers, is_blind=is_blind), a, b)
        alignment = with_folds(alignment, a, b, store)
        runs = TwoRuns(a, b, alignment, (ours.modules, theirs.modules), store)
        if is_adapted(runs):
            notes.append(
                "the candidate trains layers that were added, the others are frozen for it: "
                "gradients that only these lack are no difference"
            )
        epsilons = machine_epsilon(ours, a), machine_epsilon(theirs, b)
        changed = _changed(runs, epsilons[1] if epsilons[1] > epsilons[0] else 0.0)
        merged = merged_layers(alignment, changed)
        notes += [f"{name} has taken over {', '.join(merged[name])}" for name in merged]
        changed |= dict.fromkeys(merged, Changed())
        if merged and not any(
            set(layer.parameters) - set(layer.frozen)
            for layer in b.observation.layers.values()
            if layer.calls
        ):  # all that can be trained lies in layers that are not called
            b = replace(b, observation=replace(b.observation, backward=False))
            runs = replace(runs, b=b)
        other_buffers = {name for name, found in changed.items() if found.others}
        links = link(runs, other_buffers, merged)
        rounding = quantisation(runs, links) if theirs.quantised else None
        judge = Judge(
            runs,
            replace(request, model=ours.module),
            epsilons,
            coarser_dtype(ours, theirs),
            factor,
            {} if rounding else layer_epsilons(runs, max(epsilons)),
            noise_runs,
            notes,
            rounding,
        )
        results = sorted(judge.results(links), key=lambda result: a.entries[result.key].moment)
        aside = without_effect(results)
        notes += _notes_without_effect(aside, runs)
        ineffective = set(aside)
        results = [result for result in results if result not in ineffective]
        same_weights = not any(found.parameters for found in changed.values())
        if same_weights and are_one_function(results, a, b):
            inside = [one.key.layer for one in results if one.diverged]
            names = list(dict.fromkeys(name or a.observation.model_type for name in inside))
            why = (
                "built otherwise in the candidate; all outputs and gradients are equal bit for bit"
            )
            notes += [f"{listed(names)}: {why}"] if names else []
            results = [result for result in results if not result.diverged]
        if store.on_disk:
            notes.append(f"{store.on_disk / 2**20:,.0f} MiB of tensors lay in a temporary file")
        return _comparison(Search(runs, changed, results), notes, strict_names)


def _comparison(search: Search, notes: list[str], strict_names: bool) -> Comparison:
    a, b, results = search.a, search.b, search.results
    divergence = search.first_divergence()
    return Comparison(
        reference=a.observation.model_type,
        candidate=b.observation.model_type,
        alignment=search.runs.alignment,
        layers=_layers(search),
        outputs=tuple(result for result in results if result.key.role == "outputs"),
        first_divergence=divergence,
        losses=(a.observation.loss, b.observation.loss),
        strict_names=strict_names,
        basis=_basis(results),
        notes=tuple(dict.fromkeys(_remarks(search, divergence, notes))),
        renderer=renderer,
    )


def _changed(runs: TwoRuns, slack: float) -> dict[str, Changed]:
    """Return the parameters and buffers of each layer of the reference whose values differ."""
    found = {}
    for pair in runs.alignment.pairs:
        if pair.reference is not None:
            coarser = parameter_epsilon(pair, runs.a, runs.b) if pair.aligned else 0.0
            found[pair.reference] = changed_values(runs, pair, max(slack, coarser))
    return found


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


def _basis(results: Sequence[TensorResult]) -> str:
    sources = {result.source for result in results}
    for source, phrase in (
        ("quantised", "the reference rounded as the candidate is"),
        ("perturbed", "runs of the reference perturbed by rounding"),
        ("float64", "the reference's own distance from a float64 run"),
        ("lower precision", "the reference in the candidate's precision"),
        ("floor", "machine epsilon and depth"),
    ):
        if source in sources:
            return phrase
    return "bitwise equality"


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


def _remarks(search: Search, divergence: Divergence | None, notes: list[str]) -> Iterator[str]:
    """Yield what is worth saying of the models, `notes` on how they were compared among it."""
    a, b, results, alignment = search.a, search.b, search.results, search.runs.alignment
    model = a.observation.model_type
    yield from notes_on_dtypes(search.runs)
    unseen = "" if divergence is not None else "; no number of this batch shows it"
    if divergence is None:
        settings: dict[str, list[str]] = defaultdict(list)
        for pair in alignment.pairs:
            for phrase in other_settings(pair, search.runs):
                settings[phrase].append(pair.name or model)
        yield from (f"{listed(names)}: {phrase}{unseen}" for phrase, names in settings.items())
    yield from notes
    if b.layers and len(alignment.to_candidate) <= 1 < len(a.layers):
        yield (
            "no layer of the reference was found in the candidate: only the inputs and outputs of "
            "the models are compared"
        )
    outputs = [result for result in results if result.key.role == "outputs"]
    began = divergence.result if divergence is not None else None
    in_forward = began is not None and began.key.role in ("inputs", "activations")
    if in_forward and outputs and not any(result.diverged for result in outputs):
        yield "the outputs agree all the same: later layers make up for what differs"
    both_nan = [r for r in results if r.difference is not None and r.difference.nan_both]
    if both_nan:
        layers = list(dict.fromkeys(r.key.layer or model for r in both_nan))
        yield f"equal, but NaN on both sides: {listed(layers)}"
    folded = {pair.reference for pair in alignment.pairs if pair.output_of is not None}
    unused = [n for n, found in search.changed.items() if found.phrases and n not in folded]
    if unused and divergence is None:
        phrase = search.changed[unused[0]].phrases[0]
        yield f"parameters differ that this batch does not show: {unused[0]}: {phrase}"
    said = () if divergence is None else divergence.causes
    causes = (*search.causes.ties, *search.causes.calls)
    yield from (f"{cause}{unseen}" for cause in causes if cause not in said)
    yield from _other_calls(search)


def _other_calls(search: Search) -> Iterator[str]:
    """Yield the layers of which only the first calls are compared, as much comes to all of them."""
    alignment = search.runs.alignment
    told = {name for change in search.causes.calls for name in change.inside}
    told |= {one for name, _ in alignment.calls for one in (name, *ancestors(name))}
    for _, ours, theirs in alignment.aligned:
        least = min(ours.calls, theirs.calls)
        is_seen = Status.UNSUPPORTED not in (ours.status, theirs.status)
        if ours.calls != theirs.calls and least and is_seen and ours.name not in told:
            those = "the first call is" if least == 1 else f"the first {least} calls are"
            times = called(ours.calls, theirs.calls)
            yield f"{ours.name}: {times}, on as many numbers; {those} compared"


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
    first: dict[str, TensorResult] = {}
    for result in set_aside:
        if result.key.role != "inputs" or a.entries[result.key].slot not in absent:
            first.setdefault(result.key.layer, result)
    return [
        f"{layer or a.observation.model_type}: {_difference_of(result, a)}; what is computed from "
        f"{'it' if result.unseen else 'them'} agrees"
        for layer, result in first.items()
    ]


def _difference_of(result: TensorResult, a: Trace) -> str:
    role, difference = result.key.role, result.difference
    if result.unseen:
        return f"its gradient was not seen in the candidate ({result.unseen})"
    if result.shape:
        before = "x".join(map(str, a.entries[result.key].shape))
        return f"its {role} are {result.shape}, were {before}: not compared"
    if difference is None:
        return f"its {role} differ"
    return f"its {role} are others, {difference.found:.6g} for {difference.expected:.6g}"
