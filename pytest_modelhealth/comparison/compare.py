"""`compare`: runs both models on one batch and says where and why they part."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from pytest_modelhealth.alignment.causes import called
from pytest_modelhealth.alignment.matching import align
from pytest_modelhealth.alignment.result import Alignment
from pytest_modelhealth.capture import Request
from pytest_modelhealth.capture.engine import Backward, Loss
from pytest_modelhealth.comparison.comparison import AlignedLayer, Comparison, Divergence
from pytest_modelhealth.comparison.first_divergence import Search
from pytest_modelhealth.comparison.links import link, missing_gradients
from pytest_modelhealth.comparison.measures import coarser
from pytest_modelhealth.comparison.model_changes import Changed, changed_values
from pytest_modelhealth.comparison.results import (
    FACTOR,
    Further,
    TensorResult,
    compare_tensors,
    without_effect,
)
from pytest_modelhealth.comparison.sides import (
    Side,
    candidate_side,
    placement,
    reference_side,
    run,
)
from pytest_modelhealth.comparison.store import TensorStore
from pytest_modelhealth.comparison.trace import Trace, container
from pytest_modelhealth.settings import Setting
from pytest_modelhealth.tolerance import QUANTISED, RUNS, TF32, coarsest_epsilon, epsilon_of

MEMORY_BUDGET = 1 << 30
"""Bytes of tensors that a comparison keeps in memory."""

_ARGUMENTS = (
    Setting("strict_names", bool, False, "a layer by another name fails"),
    Setting("factor", float, FACTOR, "times the natural noise", minimum=0.0),
    Setting("memory_budget", int, MEMORY_BUDGET, "bytes", minimum=0),
    Setting("noise_runs", int, RUNS, "perturbed runs", minimum=1),
)


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
            copy of the reference; or an ONNX model or file, of which the outputs are compared.
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
        notes = _notes(ours, theirs, a, b)
        alignment = align(a.layers, b.layers)
        lower = _lower(ours, theirs)
        epsilons = (
            _epsilon(ours, coarsest_epsilon(a.observation)),
            _epsilon(theirs, _overall_epsilon(b)),
        )
        further = Further(replace(request, model=ours.module), noise_runs, notes)
        changed = _changed(ours, theirs, a, b, alignment, epsilons)
        links = link(alignment, a, b, {name for name, found in changed.items() if found.others})
        results = compare_tensors(links, a, b, store, further, epsilons, lower, factor)
        results += _missing(alignment, a, b, factor)
        results.sort(key=lambda result: a.entries[result.key].moment)
        set_aside = without_effect(results)
        notes += _without_effect(set_aside, a)
        aside = set(map(id, set_aside))
        results = [result for result in results if id(result) not in aside]
        modules = ours.modules, theirs.modules
        search = Search(alignment, a, b, modules, changed, tuple(results))
        divergence = search.first_divergence()
        if divergence is None or divergence.kind in ("backward", "buffers"):  # after outputs
            divergence = _other_structure(a, b, results) or divergence
        if divergence is None:
            notes = [*_settings(search), *notes]
        notes += _remarks(search, divergence)
        return Comparison(
            reference=a.observation.model_type,
            candidate=b.observation.model_type,
            alignment=alignment,
            layers=_layers(search),
            outputs=tuple(result for result in results if result.key.role == "outputs"),
            divergence=divergence,
            losses=(a.observation.loss, b.observation.loss),
            strict_names=strict_names,
            basis=_basis(results),
            notes=tuple(dict.fromkeys(notes)),
            spilled=store.on_disk,
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
        pair.reference: changed_values(pair, a, b, modules, slack)
        for pair in alignment.pairs
        if pair.reference is not None
    }


def _without_effect(set_aside: list[TensorResult], a: Trace) -> list[str]:
    """Return what to say of tensors that differ to no effect."""
    first: dict[str, TensorResult] = {}
    for result in set_aside:
        first.setdefault(result.key.layer, result)
    return [
        f"{layer or a.observation.model_type}: {_difference_of(result, a)}; what is computed from "
        f"{'it' if result.unseen else 'them'} agrees"
        for layer, result in first.items()
    ]


def _difference_of(result: TensorResult, a: Trace) -> str:
    if result.unseen:
        return f"its gradient was not seen in the candidate ({result.unseen})"
    role = result.key.role
    if result.shape:
        before = "x".join(map(str, a.entries[result.key].shape))
        return f"its {role} are {result.shape}, were {before}: not compared"
    difference = result.difference
    if difference is None:
        return f"its {role} differ"
    return f"its {role} are others, {difference.found:.6g} for {difference.expected:.6g}"


def _settings(search: Search) -> Iterator[str]:
    """Yield how layers that give the same are set up differently: another batch may show it."""
    for phrase, layers in search.other_settings().items():
        yield f"{_listed(layers)}: {phrase}; no number of this batch shows it"


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


def _missing(alignment: Alignment, a: Trace, b: Trace, factor: float) -> list[TensorResult]:
    """Return the gradients that the candidate does not have."""
    return [
        TensorResult(
            key=key,
            candidate=(alignment.to_candidate.get(key.layer, ""),),
            difference=None,
            ratio=math.inf,
            source="none",
            noise=0.0,
            limit=factor,
            problem=f"there is no gradient in the candidate: {why}",
            unseen=why if key.role == "gradients" and not a.layers[key.layer].parameters else "",
        )
        for key, why in missing_gradients(alignment, a, b)
    ]


def _other_structure(a: Trace, b: Trace, results: list[TensorResult]) -> Divergence | None:
    """Return the divergence of outputs that are built in another way."""
    counts = len(a.of_role["", "outputs"]), len(b.of_role["", "outputs"])
    if counts[0] == counts[1] and (
        container(a.output) == container(b.output) or not b.observation.layers
    ):
        return None
    story = f"the reference returns {a.output}, the candidate {b.output}"
    first = next((result for result in results if result.key.role == "outputs"), None)
    return Divergence(
        "", "", a.observation.model_type, "structure", first, story, "another output structure"
    )


def _overall_epsilon(trace: Trace) -> float:
    """Return the machine epsilon of the precision that a candidate as a whole is in.

    It is that of the coarsest parameter or output, or that in which every layer multiplies by a
    matrix, as under autocast. A few coarse layers in the middle are no licence for the rest.
    """
    layers = trace.observation.layers.items()
    kept = [p.dtype for _, layer in layers for p in layer.parameters.values()]
    returned = [trace.entries[key].dtype for key in trace.of_role["", "outputs"]]
    products = [
        trace.entries[key].dtype
        for name, layer in layers
        if any(len(p.shape) > 1 for p in layer.parameters.values()) and _takes_floats(trace, name)
        for key in trace.of_role[name, "activations"]
    ]
    return max(
        max(map(epsilon_of, kept), default=0.0),
        max(map(epsilon_of, returned), default=0.0),
        min(map(epsilon_of, products), default=0.0),
    )


def _takes_floats(trace: Trace, layer: str) -> bool:
    keys = trace.of_role[layer, "inputs"]
    return any(trace.entries[key].dtype.is_floating_point for key in keys)


def _epsilon(side: Side, seen: float) -> float:
    """Return the machine epsilon of a model's numbers, `seen` in its run, and of its products."""
    found = seen or epsilon_of(torch.float32)
    if side.quantised:
        found = max(found, QUANTISED)
    if any(
        p.is_cuda
        for module in side.modules.values()
        for p in module._parameters.values()
        if p is not None
    ):
        cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        if cuda.allow_tf32 or cudnn.allow_tf32:
            found = max(found, TF32)
    return found


def _lower(ours: Side, theirs: Side) -> torch.dtype | None:
    """Return the dtype of the candidate's parameters, if it is coarser than the reference's."""
    dtypes = [
        {p.dtype for p in side.module.parameters() if p.is_floating_point()}
        if side.engine is not None
        else set()
        for side in (ours, theirs)
    ]
    if len(dtypes[0]) != 1 or len(dtypes[1]) != 1 or dtypes[0] == dtypes[1]:
        return None
    (ours_dtype,), (theirs_dtype,) = dtypes
    return theirs_dtype if coarser(ours_dtype, theirs_dtype) == theirs_dtype else None


def _basis(results: list[TensorResult]) -> str:
    sources = {result.source for result in results}
    for source, phrase in (
        ("perturbed", "runs of the reference perturbed by rounding"),
        ("float64", "the reference's own distance from a float64 run"),
        ("lower precision", "the reference in the candidate's precision"),
        ("floor", "machine epsilon and depth"),
    ):
        if source in sources:
            return phrase
    return "bitwise equality"


def _notes(ours: Side, theirs: Side, a: Trace, b: Trace) -> list[str]:
    notes = [theirs.note] if theirs.note else []
    if theirs.quantised:
        notes.append("a quantised model has no gradients: the forward pass is compared")
    for side, trace in ((ours, a), (theirs, b)):
        notes += [f"{side.name}: {note}" for note in trace.observation.notes]
    return notes


def _remarks(search: Search, divergence: Divergence | None) -> Iterator[str]:
    """Yield what is worth saying of the models beyond the verdict."""
    a, b, results = search.a, search.b, search.results
    if b.layers and len(search.alignment.to_candidate) <= 1 < len(a.layers):
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
        layers = list(dict.fromkeys(r.key.layer or a.observation.model_type for r in both_nan))
        yield f"equal, but NaN on both sides: {_listed(layers)}"
    unused = [name for name, found in search.changed.items() if found.phrases]
    if unused and divergence is None:
        phrase = search.changed[unused[0]].phrases[0]
        yield f"parameters differ that this batch does not show: {unused[0]}: {phrase}"
    yield from _without_numbers(search, divergence)


def _without_numbers(search: Search, divergence: Divergence | None) -> Iterator[str]:
    """Yield what the story does not say of calls and ties."""
    said = () if divergence is None else divergence.causes
    unseen = "; no number of this batch shows it" if divergence is None else ""
    for cause in (*search.causes.ties, *search.causes.calls):
        if cause not in said:
            yield f"{cause}{unseen}"
    changed = {name for change in search.causes.calls for name in change.inside}
    for _, ours, theirs in search.alignment.aligned:
        least = min(ours.calls, theirs.calls)
        if ours.calls != theirs.calls and least and ours.name not in changed:
            those = "the first call is" if least == 1 else f"the first {least} calls are"
            times = called(ours.calls, theirs.calls)
            yield f"{ours.name}: {times}, on as many numbers; {those} compared"


def _listed(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
