"""What a reader should know of a comparison beyond its verdict, a sentence each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from pytest_modelhealth.alignment.causes import called
from pytest_modelhealth.alignment.result import listed
from pytest_modelhealth.comparison.comparison import Divergence
from pytest_modelhealth.comparison.first_divergence import Search
from pytest_modelhealth.comparison.layer_differences import other_settings
from pytest_modelhealth.comparison.results import TensorResult
from pytest_modelhealth.comparison.rounding import notes_on_dtypes
from pytest_modelhealth.comparison.sides import Side
from pytest_modelhealth.comparison.trace import Trace, TwoRuns
from pytest_modelhealth.report import Status
from pytest_modelhealth.settings.setting import ancestors


def notes_on_runs(ours: Side, theirs: Side, a: Trace, b: Trace) -> Iterator[str]:
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


def remarks(search: Search, divergence: Divergence | None, notes: list[str]) -> Iterator[str]:
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


def notes_without_effect(set_aside: list[TensorResult], runs: TwoRuns) -> list[str]:
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
