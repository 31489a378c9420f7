"""What a reader should know of a comparison beyond its verdict, a sentence each."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_modelhealth.alignment.causes import called
from pytest_modelhealth.alignment.result import Alignment, listed
from pytest_modelhealth.comparison.comparison import Divergence
from pytest_modelhealth.comparison.first_divergence import Search
from pytest_modelhealth.comparison.links import is_adapted
from pytest_modelhealth.comparison.results import TensorResult
from pytest_modelhealth.comparison.sides import Side
from pytest_modelhealth.comparison.trace import Trace
from pytest_modelhealth.report import Status
from pytest_modelhealth.settings.setting import ancestors


def notes_on_runs(ours: Side, theirs: Side, a: Trace, b: Trace) -> list[str]:
    """Return what was remarkable about the two runs."""
    notes = [theirs.note] if theirs.note else []
    if theirs.quantised:
        notes.append("a quantised model has no gradients: the forward pass is compared")
    elif (
        theirs.is_frozen
        and theirs.engine.runs_in_torch
        and a.observation.backward
        and not b.observation.backward
    ):
        notes.append(
            "the candidate trains nothing (requires_grad=False): the forward pass is compared"
        )
    for side, trace in ((ours, a), (theirs, b)):
        notes += [f"{side.name}: {note}" for note in trace.observation.notes]
    return notes


def notes_on_training(alignment: Alignment, b: Trace) -> list[str]:
    """Return what to say of a candidate that trains other parameters on purpose."""
    if not is_adapted(alignment, b):
        return []
    note = (
        "the candidate trains layers that were added, the others are frozen for it: gradients "
        "that only these lack are no difference"
    )
    return [note]


def remarks(search: Search, divergence: Divergence | None) -> Iterator[str]:
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
        yield f"equal, but NaN on both sides: {listed(layers)}"
    folded = {pair.reference for pair in search.alignment.pairs if pair.output_of is not None}
    changed = [name for name, found in search.changed.items() if found.phrases]
    unused = [name for name in changed if name not in folded]
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
    changed |= {one for name, _ in search.alignment.calls for one in (name, *ancestors(name))}
    for _, ours, theirs in search.alignment.aligned:
        least = min(ours.calls, theirs.calls)
        is_seen = Status.UNSUPPORTED not in (ours.status, theirs.status)
        if ours.calls != theirs.calls and least and is_seen and ours.name not in changed:
            those = "the first call is" if least == 1 else f"the first {least} calls are"
            times = called(ours.calls, theirs.calls)
            yield f"{ours.name}: {times}, on as many numbers; {those} compared"


def notes_on_structure(inside: list[TensorResult], a: Trace) -> list[str]:
    """Return what to say of tensors that differ between models that are one function."""
    layers = dict.fromkeys(one.key.layer or a.observation.model_type for one in inside)
    why = "built otherwise in the candidate; all outputs and gradients are equal bit for bit"
    return [f"{listed(list(layers))}: {why}"] if layers else []


def notes_without_effect(
    set_aside: list[TensorResult], a: Trace, alignment: Alignment
) -> list[str]:
    """Return what to say of tensors that differ to no effect.

    What a layer gave that the candidate computes in the next one, such as a convolution with the
    batch norm behind it, is not there to be the same.
    """
    gone = [pair.reference for pair in alignment.pairs if pair.candidate is None]
    absent = {
        a.entries[key].slot
        for name in gone
        if name is not None
        for key in a.of_role[name, "activations"]
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


def notes_on_settings(search: Search) -> Iterator[str]:
    """Yield how layers that give the same are set up differently: another batch may show it."""
    for phrase, layers in search.other_settings().items():
        yield f"{listed(layers)}: {phrase}; no number of this batch shows it"
