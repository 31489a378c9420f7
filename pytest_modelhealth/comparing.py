"""`compare`: runs both models on one batch and says where and why they part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pytest_modelhealth.alignment.matching import align
from pytest_modelhealth.alignment.result import Alignment
from pytest_modelhealth.capture import Request
from pytest_modelhealth.capture.engine import Backward, Loss
from pytest_modelhealth.capture.observing.tensors import TensorStore
from pytest_modelhealth.comparison.comparison import AlignedLayer, Comparison
from pytest_modelhealth.comparison.first_divergence import Search
from pytest_modelhealth.comparison.links import (
    link,
    trains_nothing,
)
from pytest_modelhealth.comparison.precision import (
    coarser_dtype,
    layer_epsilons,
    machine_epsilons,
    notes_on_dtypes,
    parameter_epsilon,
)
from pytest_modelhealth.comparison.quantisation import quantisation
from pytest_modelhealth.comparison.refined import with_calls, with_folds
from pytest_modelhealth.comparison.remarks import (
    notes_on_runs,
    notes_on_settings,
    notes_on_structure,
    notes_on_training,
    notes_without_effect,
    remarks,
)
from pytest_modelhealth.comparison.results import (
    FACTOR,
    Further,
    Judge,
    TensorResult,
    are_one_function,
    without_effect,
)
from pytest_modelhealth.comparison.sides import (
    Side,
    candidate_side,
    placement,
    reference_side,
    run,
)
from pytest_modelhealth.comparison.trace import Trace
from pytest_modelhealth.comparison.weights import Changed, changed_values, merged_layers
from pytest_modelhealth.errors import checked_call
from pytest_modelhealth.rendering import renderer
from pytest_modelhealth.settings import Setting
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


@checked_call(default_settings)
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
        notes = notes_on_runs(ours, theirs, a, b)
        is_blind = bool(b.observation.outputs_only)
        alignment = with_calls(align(a.layers, b.layers, is_blind=is_blind), a, b)
        alignment = with_folds(alignment, a, b, store)
        notes += notes_on_training(alignment, b)
        epsilons = machine_epsilons(ours, theirs, a, b)
        changed = _changed(ours, theirs, a, b, alignment, epsilons)
        merged = merged_layers(alignment, changed)
        notes += [f"{name} has taken over {', '.join(merged[name])}" for name in merged]
        changed |= dict.fromkeys(merged, Changed())
        if merged and trains_nothing(b):
            b = replace(b, observation=replace(b.observation, backward=False))
        other_buffers = {name for name, found in changed.items() if found.others}
        links = link(alignment, a, b, other_buffers, merged)
        modules = ours.modules, theirs.modules
        rounding = (
            quantisation(alignment, links, a, b, store, modules) if theirs.quantised else None
        )
        lower = coarser_dtype(ours, theirs)
        further = Further(replace(request, model=ours.module), noise_runs, notes)
        coarser = {} if rounding else layer_epsilons(alignment, a, b, max(epsilons))
        judge = Judge(a, b, store, further, epsilons, lower, factor, coarser, modules[0], rounding)
        results = judge.results(links) + judge.missing(alignment)
        results.sort(key=lambda result: a.entries[result.key].moment)
        set_aside = without_effect(results)
        notes += notes_without_effect(set_aside, a, alignment)
        aside = set(map(id, set_aside))
        results = [result for result in results if id(result) not in aside]
        same_weights = not any(found.parameters for found in changed.values())
        if same_weights and are_one_function(results, a, b):
            notes += notes_on_structure([result for result in results if result.diverged], a)
            results = [result for result in results if not result.diverged]
        search = Search(alignment, a, b, modules, changed, tuple(results))
        return _comparison(search, notes, strict_names, store.on_disk)


def _comparison(search: Search, notes: list[str], strict_names: bool, spilled: int) -> Comparison:
    a, b, results = search.a, search.b, search.results
    divergence = search.first_divergence()
    if divergence is None:
        notes = [*notes_on_settings(search), *notes]
    notes = [*notes_on_dtypes(search.alignment, a, b), *notes, *remarks(search, divergence)]
    if spilled:
        notes.append(f"{spilled / 2**20:,.0f} MiB of tensors lay in a temporary file")
    return Comparison(
        reference=a.observation.model_type,
        candidate=b.observation.model_type,
        alignment=search.alignment,
        layers=_layers(search),
        outputs=tuple(result for result in results if result.key.role == "outputs"),
        first_divergence=divergence,
        losses=(a.observation.loss, b.observation.loss),
        strict_names=strict_names,
        basis=_basis(results),
        notes=tuple(dict.fromkeys(notes)),
        renderer=renderer,
    )


def _changed(
    ours: Side,
    theirs: Side,
    a: Trace,
    b: Trace,
    alignment: Alignment,
    epsilons: tuple[float, float],
) -> dict[str, Changed]:
    """Return the parameters and buffers of each layer of the reference whose values differ."""
    modules = ours.modules, theirs.modules
    slack = epsilons[1] if epsilons[1] > epsilons[0] else 0.0
    return {
        pair.reference: changed_values(
            pair, a, b, modules, max(slack, parameter_epsilon(pair, a, b) if pair.aligned else 0.0)
        )
        for pair in alignment.pairs
        if pair.reference is not None
    }


def _layers(search: Search) -> dict[tuple[str | None, str | None], AlignedLayer]:
    of_layer: dict[str | None, list[TensorResult]] = defaultdict(list)
    for result in search.results:
        if result.key.role != "outputs":
            of_layer[result.key.layer].append(result)
    layers = {}
    for pair in search.alignment.pairs:
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
