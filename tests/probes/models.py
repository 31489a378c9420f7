"""Probes of small models of the corpus that leak, each beside its healthy twin."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import nn

from corpus.models.leaking import Block, Net, Reader, Rows, Writer, language, rows, seeded, texts
from pytest_modelhealth import HealthReport, Inspector

__all__ = ["Block", "Net", "Reader", "Rows", "Writer", "language", "rows", "seeded", "texts"]


def probed(model: nn.Module, inputs: Any, target: Any = None, **options: Any) -> HealthReport:
    """Inspect a model with all probes, or those in `options`."""
    options = {"probes": True, "loss": None if target is None else F.cross_entropy} | options
    return Inspector(model).run_inspection(inputs, target, **options)
