"""False alarms, crashes and interference on the models of other libraries.

Usage: ``python -m benchmarks.sweep [--source NAME ...] [--only PATTERN] [--results FILE]``

Each model is small where its library allows it, and is inspected with default settings in training
and in evaluation mode, in float32 and bfloat16, with and without a backward pass. The same step
runs without the inspector: loss, gradients and buffers must be equal bit for bit, and the model
must be as it was. Libraries that are not installed are left out.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import logging
import multiprocessing
import os
import random
import resource
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy
import torch
from torch import Tensor, nn

from benchmarks.cases.subject import Subject, run
from benchmarks.timing import header, machine, row
from benchmarks.zoo import SOURCES
from benchmarks.zoo.architecture import Architecture
from pytest_modelhealth import HealthReport, Inspector
from pytest_modelhealth.capture.step.loss import compute_loss
from pytest_modelhealth.report import Status, Verdict

SECONDS = 120
"""After which a model is given up."""
MEMORY = 6 << 30
"""Bytes of address space that a process may take."""


@dataclass(frozen=True)
class Setting:
    """How a model is inspected; ``inference`` is evaluation mode without a backward pass."""

    mode: str
    dtype: str = "float32"
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.mode}, {self.dtype}, seed {self.seed}"


SETTINGS = [
    Setting("train"),
    Setting("eval"),
    Setting("train", "bfloat16"),
    Setting("inference", seed=1),
]


@dataclass
class Result:
    """What came of one inspection.

    Args:
        verdict: the verdict; empty where there is none.
        findings: each violation, with its check and layer.
        notes: what could not be judged.
        not_run: what the model itself raised without the inspector.
        crash: what the inspector raised, or a check.
        interference: what differs from the step without the inspector.
        warnings: what the inspector warned of.
        bare_ms, ms: processor time of one step without and with the inspector, the verdict
            included.
        parameters: the size of the model.
    """

    family: str
    name: str
    setting: str
    verdict: str = ""
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    not_run: str = ""
    crash: str = ""
    interference: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    bare_ms: float = 0.0
    ms: float = 0.0
    parameters: int = 0


# ---- one model ----------------------------------------------------------------------------------


class Step:
    """Runs the backward pass, and keeps what the step computed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seen: dict[str, bytes] = {}

    def backward(self, loss: Tensor) -> None:
        self.seen["loss"] = _raw(loss)
        loss.backward()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self.seen[f"gradient of {name}"] = _raw(parameter.grad)
        for name, buffer in self.model.named_buffers():
            self.seen[f"buffer {name}"] = _raw(buffer)


def _raw(tensor: Tensor) -> bytes:
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def examine(architecture: Architecture, settings: Iterable[Setting] = SETTINGS) -> Iterator[Result]:
    """Yield what comes of each setting; one that the model does not run in is told as such."""
    built: dict[int, Subject] = {}
    for setting in settings:
        result = Result(architecture.family, architecture.name, str(setting))
        if setting.seed not in built:
            torch.manual_seed(setting.seed)
            try:
                built[setting.seed] = architecture.build()
            except Exception as error:  # noqa: BLE001 - somebody else's library
                result.not_run = f"not built: {_told(error)}"
                yield result
                return
        try:
            subject = _cast(copy.deepcopy(built[setting.seed]), setting)
        except Exception as error:  # noqa: BLE001 - a model that keeps what it computed
            result.not_run = f"not copied: {_told(error)}"
            yield result
            continue
        result.parameters = sum(p.numel() for p in subject.model.parameters())
        _inspect(subject, setting, result)
        yield result


def _cast(subject: Subject, setting: Setting) -> Subject:
    subject.model.train(setting.mode == "train")
    if setting.dtype == "bfloat16":
        subject.model.bfloat16()
        subject.inputs, subject.target = _bfloat16(subject.inputs), _bfloat16(subject.target)
    return subject


def _bfloat16(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.bfloat16() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _bfloat16(part) for name, part in value.items()}
    return type(value)(map(_bfloat16, value)) if isinstance(value, list | tuple) else value


def _inspect(subject: Subject, setting: Setting, result: Result) -> None:
    """Note what comes of one inspection, and how it differs from a step without it."""
    try:
        bare, before = _bare(subject, setting, result), _state(subject.model)
    except Exception as error:  # noqa: BLE001 - not every model runs in every setting
        result.not_run = _told(error)
        return
    step = Step(subject.model)
    _seed(setting.seed)
    random_state = torch.get_rng_state()
    try:
        report = _report(subject, step.backward if bare else False, result)
    except Exception as error:  # noqa: BLE001 - crashes are what is counted
        result.crash = f"{_told(error)}\n{traceback.format_exc()[-1500:]}"
        return
    result.verdict = str(report.verdict)
    result.findings = [
        f"{v.check} at {v.layer or 'the model'}: {v.message}. {v.cause}" for v in report.violations
    ]
    result.notes = [f"{n.check} at {n.layer}: {n.reason}" for n in report.judgement.inconclusive]
    result.notes += [f"unsupported: {r.name}" for r in report if r.status is Status.UNSUPPORTED]
    broken = [f"{b.check}: {b.message}, {b.place}" for b in report.judgement.broken]
    result.crash = "; ".join([*broken, *map(str, report.observation.errors)])
    differs = [name for name in {*bare, *step.seen} if bare.get(name) != step.seen.get(name)]
    after = _state(subject.model)
    differs += [name for name in {*before, *after} if before.get(name) != after.get(name)]
    if not torch.equal(random_state, torch.get_rng_state()):
        differs.append("the state of random numbers")
    result.interference = sorted(differs)


def _report(subject: Subject, backward: Any, result: Result) -> HealthReport:
    """Return the report, judged; note how long it took, and what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.process_time()
        report = Inspector(subject.model).run_inspection(
            subject.inputs, subject.target, loss=subject.loss, backward=backward
        )
        report.judgement  # noqa: B018 - judging is part of the time
        result.ms = 1e3 * (time.process_time() - start)
    ours = [str(warning.message) for warning in caught if "modelhealth" in warning.filename]
    result.warnings = sorted(set(ours))
    return report


def _bare(subject: Subject, setting: Setting, result: Result) -> dict[str, bytes]:
    """Return what a step of a copy computes, ``{}`` without a backward pass; note its time."""
    seen: dict[str, bytes] = {}
    for _ in range(2):  # the first warms up
        model, inputs = copy.deepcopy((subject.model, subject.inputs))
        step = Step(model)
        _seed(setting.seed)
        start = time.process_time()
        loss = compute_loss(run(model, inputs), subject.target, subject.loss)
        if loss is not None and loss.requires_grad and setting.mode != "inference":
            step.backward(loss)
        result.bare_ms = 1e3 * (time.process_time() - start)
        seen = step.seen
    return seen


def _seed(seed: int) -> None:
    """Seed every generator that a model may draw from: speech models mask with NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def _state(model: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        state[f"{name}.hooks"] = [
            len(value) for key, value in sorted(vars(module).items())
            if "hooks" in key and isinstance(value, dict)
        ]  # fmt: skip
        state[f"{name}.training"] = module.training
        state[f"{name}.attributes"] = sorted(vars(module))
    for name, parameter in model.named_parameters():
        state[name] = (id(parameter), _raw(parameter), parameter.grad is None)
    for name, buffer in model.named_buffers():
        state[name] = (id(buffer), _raw(buffer))
    return state


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}"


# ---- all models, each in a process --------------------------------------------------------------


def sweep(architectures: Iterable[Architecture], settings: list[Setting]) -> Iterator[list[Result]]:
    """Yield the results of each model, made in a process with bounded time and memory.

    A process goes on to the next model; one that died or took too long is replaced.
    """
    context = multiprocessing.get_context("fork")
    waiting = list(architectures)
    while waiting:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(waiting, settings, sender))
        child.start()
        sender.close()
        while waiting:
            try:
                results = receiver.recv() if receiver.poll(SECONDS) else None
                why = f"over {SECONDS} s"
            except EOFError:
                results, why = None, "the process died"
            architecture = waiting.pop(0)
            if results is None:
                yield [Result(architecture.family, architecture.name, "", not_run=why)]
                break
            yield results
        child.kill()
        child.join()


def _child(waiting: list[Architecture], settings: list[Setting], sender: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with Path(os.devnull).open("w") as quiet:
        os.dup2(quiet.fileno(), 1)
        os.dup2(quiet.fileno(), 2)
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    for architecture in waiting:
        sender.send(list(examine(architecture, settings)))


def main(arguments: list[str] | None = None) -> None:
    """Print a row for each family, then each model that was objected to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", nargs="*", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--only", default="*", metavar="PATTERN", help="names of models")
    parser.add_argument("--results", type=Path, metavar="FILE", help="each result, a line of JSON")
    parser.add_argument("--quick", action="store_true", help="training mode in float32 only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{machine()}\n", flush=True)
    wanted = [
        architecture
        for name in options.source
        for architecture in SOURCES[name]()
        if fnmatchcase(architecture.name, options.only)
    ]
    list(examine(_WARM_UP, SETTINGS[:1]))  # processes then share what it imported
    every: list[Result] = []
    for results in sweep(wanted, SETTINGS[:1] if options.quick else SETTINGS):
        every += results
        if options.results:
            with options.results.open("a") as file:
                file.writelines(json.dumps(dataclasses.asdict(one)) + "\n" for one in results)
    print("\n".join(table(every)))
    ran = {one.name for one in every if not one.not_run}
    print(f"\n{len({one.name for one in every} - ran)} models were not built, or do not run")


def table(results: list[Result]) -> Iterator[str]:
    """Yield a row for each family, then one for each objection."""
    columns = ["models", "inspections", "healthy", "noted", "unhealthy", "crashed", "differs"]
    yield header(["family", *columns])
    families: dict[str, list[Result]] = {}
    for result in results:
        if result.verdict or result.crash:
            families.setdefault(result.family, []).append(result)
    for family, group in families.items():
        yield row([family, *_counts(group)])
    yield row(["all", *_counts([r for group in families.values() for r in group])])
    yield "\n" + header(["model", "setting", "said"])
    for result in results:
        said = result.findings or ([result.crash] if result.crash else []) or result.interference
        for text in said[:3]:
            yield row([result.name, result.setting, text.replace("|", "\\|").replace("\n", " ")])


def _counts(group: list[Result]) -> list[int]:
    return [
        len({result.name for result in group}),
        len(group),
        *(
            sum(result.verdict == verdict for result in group)
            for verdict in (Verdict.HEALTHY, Verdict.INCONCLUSIVE, Verdict.UNHEALTHY)
        ),
        sum(bool(result.crash) for result in group),
        sum(bool(result.interference) for result in group),
    ]


_WARM_UP = Architecture("", "", lambda: Subject(nn.Linear(4, 2), torch.randn(8, 4)))

if __name__ == "__main__":
    main()
