"""Saves an inspection as a bundle: a folder with data, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pytest_modelhealth.bundles import functions
from pytest_modelhealth.bundles.conditions import kept_limits, kept_rules, kept_waivers
from pytest_modelhealth.bundles.content import (
    CONTENT,
    FAILURE,
    FORMAT,
    FORMAT_VERSION,
    REPORT,
    TENSORS,
    Batch,
    Content,
    Test,
)
from pytest_modelhealth.bundles.nest import Writer, packed, qualified_name
from pytest_modelhealth.bundles.recording import Ran, size
from pytest_modelhealth.bundles.state import held_tensors, take
from pytest_modelhealth.bundles.surroundings import versions
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.checks import all_checks
from pytest_modelhealth.report import HealthReport
from pytest_modelhealth.training import every_check

MEGABYTE = 1_000_000
PARTS = ("weights", "inputs")
"""What can be left out of a bundle."""


class Saved(NamedTuple):
    """What a bundle on disk has.

    Args:
        content: all but its tensors and its report.
        bytes: how large it is.
        left_out: parts that were left out, each with the reason.
    """

    content: Content
    bytes: int
    left_out: dict[str, str]


def save(
    folder: Path,
    ran: Ran,
    report: HealthReport,
    test: Test | None,
    without: Iterable[str] = (),
) -> Saved:
    """Write a bundle into a folder that is made for it.

    Args:
        folder: the new folder.
        ran: what the report was made of; ``ran.limit`` is the most bytes of tensors to write.
        report: the report, under the settings that failed it.
        test: the test that made it.
        without: parts to leave out.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    from safetensors import SafetensorError  # not everybody has it
    from safetensors.torch import save_file

    writer = Writer()
    left_out = _left_out(ran, without)
    content = _content(ran, report, test, writer, left_out)
    plain = {"format": FORMAT, "format_version": FORMAT_VERSION} | asdict(content)
    try:
        folder.mkdir(parents=True)
        try:
            save_file(packed(writer.tensors), folder / TENSORS)
        except SafetensorError as error:  # what the disk says comes as text
            raise OSError(str(error)) from None
        report.to_json(folder / REPORT)
        (folder / FAILURE).write_text(report.render("failure") + "\n", encoding="utf-8")
        text = json.dumps(plain, indent=1, allow_nan=False) + "\n"
        (folder / CONTENT).write_text(text, encoding="utf-8")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    written = sum(path.stat().st_size for path in folder.iterdir())
    return Saved(content, written, left_out)


def _left_out(ran: Ran, without: Iterable[str]) -> dict[str, str]:
    """Return the parts to leave out: those asked for, then weights, then inputs over the limit."""
    left_out = dict.fromkeys(without, "left out as --modelhealth-replay-without asks")
    batches = [(request.inputs, request.target) for request in ran.requests]
    held = {"weights": held_tensors(ran.model), "inputs": find_tensors(batches)}
    sizes = {part: sum(map(size, held[part])) for part in PARTS if part not in left_out}
    for part in PARTS:
        total = sum(sizes.values())
        if part in sizes and total > ran.limit:
            left_out[part] = (
                f"{sizes.pop(part) / MEGABYTE:,.1f} MB, with which the bundle is over its limit of "
                f"{ran.limit / MEGABYTE:,.0f} MB (--modelhealth-replay-limit)"
            )
    return left_out


def _content(
    ran: Ran, report: HealthReport, test: Test | None, writer: Writer, left_out: dict[str, str]
) -> Content:
    request, written = ran.requests[0], ran.written()
    batches = tuple(_batch(ran, i, writer, left_out) for i in range(len(ran.requests)))
    model = take(ran.model, writer, left_out.get("weights", ""))
    for tensor in written:
        writer.lack(tensor, "values", "the run wrote to it: what is kept is what it left")
    known = {type(check) for check in (*all_checks(), *every_check())}
    scaler = request.scaler
    return Content(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        test=test,
        model=model,
        of=ran.of,
        batches=batches,
        loss=functions.write(request.loss, writer),
        backward=functions.described(request.backward)
        if callable(request.backward)
        else request.backward,
        scaler=None if scaler is None else writer.write(_scaler(scaler), "scaler"),
        batch_dim=ran.options.get("batch_dim"),
        causal=ran.options.get("causal"),
        padding=writer.write(ran.options.get("padding"), "padding"),
        compiled=ran.compiled,
        watch=kept_rules(request.selection),
        settings=kept_limits(report.settings, writer),
        waivers=kept_waivers(report.settings),
        own_checks=tuple(
            qualified_name(type(check))
            for check in report.settings.checks
            if type(check) not in known
        ),
        surroundings=ran.surroundings,
        missing=tuple(writer.missing),
        training=ran.options.get("training"),
    )


def _batch(ran: Ran, index: int, writer: Writer, left_out: dict[str, str]) -> Batch:
    request, before = ran.requests[index], "" if ran.of == "batch" else f"batches[{index}]."
    if "inputs" in left_out:
        inputs, target = (
            None if value is None else writer.lack(value, before + name, left_out["inputs"])
            for name, value in (("inputs", request.inputs), ("target", request.target))
        )
    else:
        inputs = writer.write(request.inputs, f"{before}inputs")
        target = writer.write(request.target, f"{before}target")
    return Batch(inputs, target, writer.write(ran.states[index], f"{before}random"))


def _scaler(scaler: Any) -> dict[str, Any]:
    return {"device": getattr(scaler, "_device", "cuda"), "state": scaler.state_dict()}
