"""What is observed of each architecture, and how it compares with a run without the engine.

Usage: ``python -m benchmarks.observed [NAME ...]``

Prints the table of docs/reference/architectures.md. A comparison that fails raises: what is printed
as compared is equal. The truths come from `tests.capture.oracle`, which shares nothing with the
engine: clones taken by hooks of its own, gradients by adding zeros to outputs, a bare backward.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
from collections import Counter
from dataclasses import dataclass
from datetime import date

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy
import torch
import transformers

from corpus.models.hooked import Case, make, seeded
from pytest_modelhealth import __version__
from pytest_modelhealth.report import Status
from tests.capture.architectures import ARCHITECTURES
from tests.capture.oracle import (
    RUN_SEED,
    Recorded,
    bare_run,
    changes,
    compare_activations,
    compare_gradients,
    compare_parameter_gradients,
    fingerprint,
    inspect,
)

OTHER = [status for status in Status if status is not Status.OBSERVED]
COMPARED = {
    "activations": "activations with clones",
    "gradients": "gradients with brute force",
    "parameters": "parameter gradients with a bare backward",
}


@dataclass(frozen=True)
class Row:
    """What was found of one architecture.

    Args:
        model: class name.
        statuses: number of layers by status.
        run_is_bare: output, loss, gradients and buffers are those of a bare run, bit for bit.
        untouched: state, hooks, random generators and pickle are as before, bit for bit.
        activations: layers whose activations were compared with clones.
        gradients: layers whose gradients were compared with brute force.
        parameters: parameters whose gradients were compared with a bare backward's.
    """

    model: str
    statuses: Counter[Status]
    run_is_bare: bool
    untouched: bool
    activations: int
    gradients: int
    parameters: int


def examine(case: Case) -> Row:
    """Inspect an architecture and hold what was seen against independent truths.

    Raises:
        AssertionError: a statistic is not that of the truth.
    """
    bare = bare_run(case, *make(case))
    model, batch = make(case)
    seeded(RUN_SEED)
    before = fingerprint(model, batch)
    recorded = Recorded(model)
    observation = inspect(case, model, batch, loss=recorded.loss, backward=recorded.backward)
    return Row(
        model=type(model).__name__,
        statuses=Counter(record.status for record in observation.layers.values()),
        run_is_bare=recorded.run == bare,
        untouched=not changes(before, fingerprint(model, batch)),
        activations=compare_activations(case, observation),
        gradients=compare_gradients(case, observation),
        parameters=compare_parameter_gradients(case, observation),
    )


def _cells(row: Row) -> list[str]:
    return [
        row.model,
        str(row.statuses.total()),
        *(str(row.statuses[status] or "") for status in (Status.OBSERVED, *OTHER)),
        "equal" if row.run_is_bare else "DIFFERS",
        "equal" if row.untouched else "DIFFERS",
        *(str(getattr(row, what)) for what in COMPARED),
    ]


def main() -> None:
    """Print the table and its totals."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", choices=[*ARCHITECTURES, []], help="architectures; default: all"
    )
    names = parser.parse_args().names or list(ARCHITECTURES)
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    print(
        f"pytest-modelhealth {__version__}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, NumPy {numpy.__version__}, "
        f"Python {platform.python_version()}, {date.today()}\n"
    )
    columns = ["model", "layers", "observed", *OTHER, "inspected run", "state", *COMPARED]
    print("| " + " | ".join(columns) + " |")
    print("| --- |" + " ---: |" * (len(columns) - 1))
    rows = []
    for name in names:
        rows.append(examine(ARCHITECTURES[name]))
        print("| " + " | ".join(_cells(rows[-1])) + " |", flush=True)
    layers = sum(row.statuses.total() for row in rows)
    observed = sum(row.statuses[Status.OBSERVED] for row in rows)
    compared = {what: sum(getattr(row, kind) for row in rows) for kind, what in COMPARED.items()}
    print(
        f"\n{len(rows)} architectures, {layers} layers, {observed} observed; compared and equal: "
        + ", ".join(f"{count} {what}" for what, count in compared.items())
    )


if __name__ == "__main__":
    main()
