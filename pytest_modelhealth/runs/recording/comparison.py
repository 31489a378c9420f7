"""A comparison as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pytest_modelhealth.comparison.comparison import AlignedLayer, Comparison, differs
from pytest_modelhealth.comparison.results import TensorResult


def of_comparison(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison by the keys of the file of a run; it asks for no verdict."""
    found = comparison.first_divergence
    is_different = differs(comparison)
    show = comparison._renderer
    return {
        "kind": "comparison",
        "verdict": "different" if is_different else "equivalent",
        "headline": show("comparison", "line")(comparison),
        "text": show("comparison", "failure")(comparison) if is_different else "",
        "model": comparison.reference,
        "candidate": comparison.candidate,
        "divergence": None
        if found is None
        else {
            "layer": found.layer,
            "candidate": found.candidate,
            "label": found.label,
            "kind": found.kind,
            "story": found.story,
            "cause": found.cause,
            "affected": found.affected,
        },
        "losses": comparison.losses,
        "basis": comparison.basis,
        "notes": comparison.notes,
        "layers": [*map(_layer, comparison.layers.values()), *_outputs(comparison.outputs)],
    }


def _layer(layer: AlignedLayer) -> dict[str, Any]:
    return {
        "reference": layer.pair.reference,
        "candidate": layer.pair.candidate,
        "label": layer.label,
        "type": layer.type_name,
        "change": layer.pair.change.value,
        "diverged": layer.diverged,
        "changed_parameters": layer.changed_parameters,
        "tensors": [_tensor(result) for result in layer.tensors],
    }


def _tensor(result: TensorResult) -> dict[str, Any]:
    found = result.difference
    measured = None
    if found is not None:
        measured = {
            "error": found.relative_l2,
            "max_abs": found.max_abs,
            "max_ulp": found.max_ulp,
            "cosine": found.cosine,
            "reference": found.expected,
            "found": found.found,
            "at": found.at,
        }
    return {
        "role": result.key.role,
        "name": result.key.tensor,
        **(measured or dict.fromkeys(_MEASURES)),
        "noise": result.noise,
        "ratio": result.ratio,
        "limit": result.limit,
        "source": result.source,
        "diverged": result.diverged,
        "problem": result.problem,
    }


_MEASURES = ("error", "max_abs", "max_ulp", "cosine", "reference", "found", "at")


def _outputs(outputs: Iterable[TensorResult]) -> list[dict[str, Any]]:
    """Return what the models return as a last layer, if it was compared."""
    tensors = [_tensor(result) for result in outputs]
    last = {
        "reference": "",
        "candidate": "",
        "label": "output",
        "type": "",
        "change": "matched",
        "diverged": any(tensor["diverged"] for tensor in tensors),
        "changed_parameters": [],
        "tensors": tensors,
    }
    return [last] if tensors else []
