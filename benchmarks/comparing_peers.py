"""The peers on the same pairs, each at what a competent user would ask of it.

What that is, is chosen in their favour: both models draw the same random numbers, the names of
renamed layers are given, what has no counterpart is passed over, and both a tight and a loose
tolerance are tried, since each has to be chosen by hand. Both peers compare forward passes only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.peers import arguments_of, modules_of
from corpus.pair import Sides, as_module
from corpus.scoring import Finding, Tool
from corpus.subject import Subject
from pytest_modelhealth import compare

Tolerance = tuple[float, float]
"""Relative and absolute."""

TIGHT: Tolerance = (1e-5, 1e-6)
LOOSE: Tolerance = (1e-4, 1e-4)

ROOT = "<root>"


def pytest_torch(tolerance: Tolerance) -> Tool:
    """Return a judge that asks `localize_divergence`."""

    def judge(sides: Sides) -> list[Finding]:
        from pytest_torch import localize_divergence

        subject, candidate = sides.reference, as_module(sides)
        names = _names(sides, subject)
        for model in (subject.model, candidate):
            model.register_forward_pre_hook(_seed)
        rtol, atol = tolerance
        report = localize_divergence(
            subject.model,
            candidate,
            subject.inputs,
            rtol=rtol,
            atol=atol,
            module_map=names,
            leaf_only=False,
        )
        for layer in report.diverged:
            if layer.note != "no matching layer in model_b":
                name = "" if layer.name == ROOT else layer.name
                text = str(report).partition("\n")[0]
                return [Finding(name, text=text, also=(names.get(name),))]
        return []

    return judge


def _seed(module: nn.Module, inputs: Any) -> None:
    torch.manual_seed(0)


def _names(sides: Sides, subject: Subject) -> Mapping[str, str]:
    """Return the candidate's name of each layer, as modelhealth aligns them."""
    aligned = compare(
        subject.model, sides.candidate, subject.inputs, subject.target, loss=subject.loss
    ).alignment.to_candidate
    names = {name: aligned.get(name, "(none)") for name, _ in subject.model.named_modules()}
    return {name or ROOT: other or ROOT for name, other in {**names, "": ""}.items()}


def torchlens(tolerance: Tolerance) -> Tool:
    """Return a judge that traces both and asks for the first row that diverges."""

    def judge(sides: Sides) -> list[Finding]:
        import torchlens as tl
        from torchlens.debug._graph import compare_rows

        traces = []
        for model in (sides.reference.model, as_module(sides)):
            model.register_forward_pre_hook(_seed)
            traces.append(tl.trace(model, *arguments_of(sides.reference.inputs)))
        rtol, atol = tolerance
        rows, _ = compare_rows(*traces, rtol=rtol, atol=atol)
        for row in rows:
            if row["shape_match"] is False or row["allclose"] is False:
                layer, *also = modules_of(traces[0], row["op"])
                text = f"{row['op']}: max_abs {row['max_abs']}"
                return [Finding(layer, text=text, also=tuple(also))]
        return []

    return judge
