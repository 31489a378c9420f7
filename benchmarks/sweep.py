"""False alarms, crashes and interference on the models of other libraries.

Usage: ``python -m benchmarks.sweep [--source NAME ...] [--only PATTERN ...]
[--settings PATTERN ...] [--results FILE]``, then ``python -m benchmarks.sweep --table FILE ...``

Each model is small where its library allows it, and is inspected with default settings in training
and in evaluation mode, in float32 and bfloat16. The same step runs without the inspector: loss,
gradients and buffers must be equal bit for bit, and the model must be as it was. Libraries that are
not installed are left out. `benchmarks.zoo.decided` has what was found out about each alarm.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import hashlib
import json
import logging
import multiprocessing
import os
import random
import resource
import signal
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

from benchmarks.timing import header, machine, row
from benchmarks.zoo import SOURCES
from benchmarks.zoo.architecture import Architecture
from benchmarks.zoo.decided import Decision, decision
from corpus.subject import Subject, run
from pytest_modelhealth import HealthReport, Inspector
from pytest_modelhealth.capture.step.loss import compute_loss
from pytest_modelhealth.report import Finding, Status, Verdict

SECONDS = 40
"""Of processor time, after which a model is given up."""
STUCK = 1200
"""Seconds on the clock after which a process is taken to hang."""
MEMORY = 6 << 30
"""Bytes of data that a process may take."""


@dataclass(frozen=True)
class Setting:
    """How a model is inspected."""

    mode: str
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.mode}, {self.dtype}"


SETTINGS = [Setting(m, d) for d in ("float32", "bfloat16") for m in ("train", "eval")]


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
        warned: what only warns, and what Python's warnings of ours say.
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
    warned: list[str] = field(default_factory=list)
    parameters: int = 0


# ---- one model ----------------------------------------------------------------------------------


class Step:
    """Runs the backward pass, and keeps what the step computed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seen: dict[str, str] = {}

    def backward(self, loss: Tensor) -> None:
        self.seen["loss"] = _raw(loss)
        loss.backward()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self.seen[f"gradient of {name}"] = _raw(parameter.grad)
        for name, buffer in self.model.named_buffers():
            self.seen[f"buffer {name}"] = _raw(buffer)


def _raw(tensor: Tensor) -> str:
    """Return a digest of the tensor's bits: large models are not held twice."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    bits = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(bits, digest_size=16).hexdigest()


def examine(architecture: Architecture, settings: Iterable[Setting] = SETTINGS) -> Iterator[Result]:
    """Yield what comes of each setting; one that the model does not run in is told as such."""
    _seed()
    built: Subject | str
    try:
        built = architecture.build()
    except Exception as error:  # noqa: BLE001 - somebody else's library
        built = f"not built: {_told(error)}"
    for setting in settings:
        result = Result(architecture.family, architecture.name, str(setting))
        if isinstance(built, str):
            result.not_run = built
        else:
            _examine(built, architecture, setting, result)
        yield result


def _examine(built: Subject, architecture: Architecture, setting: Setting, result: Result) -> None:
    try:
        subject = _cast(copy.deepcopy(built), setting)
    except Exception as error:  # noqa: BLE001 - a model that keeps what it computed
        result.not_run = f"not copied: {_told(error)}"
        return
    if setting.mode not in architecture.loss_modes:
        subject.loss = None
    result.parameters = sum(p.numel() for p in subject.model.parameters())
    _inspect(subject, result)


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


def _inspect(subject: Subject, result: Result) -> None:
    """Note what comes of one inspection, and how it differs from a step without it."""
    try:
        bare, before = _bare(subject), _state(subject.model)
    except Exception as error:  # noqa: BLE001 - not every model runs in every setting
        result.not_run = _told(error)
        return
    step = Step(subject.model)
    _seed()
    random_state = torch.get_rng_state()
    try:
        report = _report(subject, step.backward if bare else False, result)
    except Exception as error:  # noqa: BLE001 - crashes are what is counted
        result.crash = f"{_told(error)}\n{traceback.format_exc()[-1500:]}"
        return
    result.verdict = str(report.verdict)
    result.findings = [_found(violation) for violation in report.violations]
    result.warned += [_found(violation) for violation in report.warnings]
    result.notes = [f"{n.check} at {n.layer}: {n.reason}" for n in report._judgement.inconclusive]
    result.notes += [f"unsupported: {r.name}" for r in report if r.status is Status.UNSUPPORTED]
    broken = [f"{b.check}: {b.message}, {b.place}" for b in report._judgement.broken]
    result.crash = "; ".join([*broken, *map(str, report.observation.errors)])
    differs = _differing(bare, step.seen)
    if differs:  # what two bare steps do not agree on is none of ours
        differs = sorted({*differs} - {*_differing(bare, _bare(subject))})
    differs += _differing(before, _state(subject.model))
    if not torch.equal(random_state, torch.get_rng_state()):
        differs.append("the state of random numbers")
    result.interference = differs


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def _report(subject: Subject, backward: Any, result: Result) -> HealthReport:
    """Return the report, judged; note what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = Inspector(subject.model).run_inspection(
            subject.inputs, subject.target, loss=subject.loss, backward=backward
        )
        report._judgement  # noqa: B018 - its warnings are caught, too
    ours = [str(warning.message) for warning in caught if "modelhealth" in warning.filename]
    result.warned = sorted(set(ours))
    return report


def _found(violation: Finding) -> str:
    place = violation.layer or "the model"
    return f"{violation.check} at {place}: {violation.message}. {violation.cause}"


def _bare(subject: Subject) -> dict[str, str]:
    """Return what a step of a copy computes, ``{}`` without a backward pass."""
    model, inputs = copy.deepcopy((subject.model, subject.inputs))
    step = Step(model)
    _seed()
    loss = compute_loss(run(model, inputs), subject.target, subject.loss)
    if loss is not None and loss.requires_grad:
        step.backward(loss)
    return step.seen


def _seed() -> None:
    """Seed every generator that a model may draw from: speech models mask with NumPy's."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


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


def sweep(architectures: Iterable[Architecture], settings: list[Setting]) -> Iterator[Result]:
    """Yield each result, made in a process with bounded time and memory.

    A process goes on to the next model; one that died or took too long is replaced.
    """
    context = multiprocessing.get_context("fork")
    waiting = list(architectures)
    while waiting:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(waiting, settings, sender))
        child.start()
        sender.close()
        left = list(settings)
        try:
            while waiting and receiver.poll(STUCK):
                yield receiver.recv()
                left = left[1:]
                if not left:
                    waiting.pop(0)
                    left = list(settings)
        except EOFError:
            child.join()
        if waiting:
            why = "the process died"
            if child.exitcode in (None, -signal.SIGPROF):
                why = f"over {SECONDS} s"
            lost = waiting.pop(0)
            yield Result(lost.family, lost.name, str(left[0]), not_run=why)
        child.kill()
        child.join()


def _child(waiting: list[Architecture], settings: list[Setting], sender: Any) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    with Path(os.devnull).open("w") as quiet:
        os.dup2(quiet.fileno(), 1)
        os.dup2(quiet.fileno(), 2)
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    for architecture in waiting:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends the process
        for result in examine(architecture, settings):
            sender.send(result)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)


def main(arguments: list[str] | None = None) -> None:
    """Inspect what was asked for, then print the table; or print the table of earlier results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", nargs="*", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--only", nargs="*", default=["*"], metavar="PATTERN", help="of models")
    parser.add_argument("--settings", nargs="*", default=["*"], metavar="PATTERN",
                        help=" | ".join(map(str, SETTINGS)))  # fmt: skip
    parser.add_argument("--results", type=Path, metavar="FILE",
                        help="each result, a line of JSON; models in it are left out")  # fmt: skip
    parser.add_argument("--table", nargs="*", type=Path, metavar="FILE", help="of these results")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print("\n".join(table(read(options.table))))
        return
    torch.set_num_threads(1)
    print(f"{machine()}\n", flush=True)
    settings = [one for one in SETTINGS if _is_any(str(one), options.settings)]
    earlier = read([options.results] if options.results and options.results.exists() else [])
    done = {(one.name, one.setting) for one in earlier}
    wanted = [
        architecture
        for name in options.source
        for architecture in SOURCES[name]()
        if _is_any(architecture.name, options.only)
        and any((architecture.name, str(one)) not in done for one in settings)
    ]
    list(examine(_WARM_UP, SETTINGS[:1]))  # processes then share what it imported
    every = earlier
    for result in sweep(wanted, settings):
        every.append(result)
        if options.results:
            with options.results.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(result)) + "\n")
    print("\n".join(table(every)))


def _is_any(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# ---- the table ----------------------------------------------------------------------------------


def read(paths: Iterable[Path]) -> list[Result]:
    """Return the results of these files; the last of those of a model in a setting."""
    found: dict[tuple[str, str, str], Result] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            result = Result(**json.loads(line))
            found[result.family, result.name, result.setting] = result
    return list(found.values())


def table(results: list[Result]) -> Iterator[str]:
    """Yield a row for each family, then one for each kind of alarm with its decision."""
    yield header(["family", *COLUMNS])
    families: dict[str, list[Result]] = {}
    for result in results:
        families.setdefault(result.family, []).append(result)
    for family, group in families.items():
        yield row([family, *_counts(group)])
    yield row(["all", *_counts(results)])
    yield "\n" + header(["alarm", "models", "settings", "decided"])
    for (decided, check), group in _alarms(results).items():
        said = check if decided else f"{check}: {_said(group[0], check)}"
        why = f"{decided.kind}: {decided.why}" if decided else "undecided"
        settings = "; ".join(dict.fromkeys(one.setting for one in group))
        yield row([said, ", ".join(dict.fromkeys(one.name for one in group)), settings, why])
    yield "\n" + header(["not run", "models"])
    for why, group in _not_run(results).items():
        names = dict.fromkeys(one.name for one in group)
        yield row([why, f"{len(names)}: {', '.join([*names][:MOST_NAMES])}"])


MOST_NAMES = 8
COLUMNS = ["models", "inspections", "healthy", "of these warned", "inconclusive",
           "unhealthy: rightly", "false", "undecided", "crashed", "differs", "not run"]  # fmt: skip


def _counts(group: list[Result]) -> list[int]:
    ran = [result for result in group if not result.not_run]
    sick = [result for result in ran if result.verdict == Verdict.UNHEALTHY]
    kinds = [_worst(result) for result in sick]
    return [
        len({result.name for result in ran}),
        len(ran),
        sum(result.verdict == Verdict.HEALTHY for result in ran),
        sum(result.verdict == Verdict.HEALTHY and bool(result.warned) for result in ran),
        sum(result.verdict == Verdict.INCONCLUSIVE for result in ran),
        *(kinds.count(kind) for kind in ("right", "false", "undecided")),
        sum(bool(result.crash) for result in ran),
        sum(bool(result.interference) for result in ran),
        len({result.name for result in group} - {result.name for result in ran}),
    ]


def _worst(result: Result) -> str:
    """Return the kind of the alarm that is least certain: one right finding frees no other."""
    kinds = {decided.kind if decided else "undecided" for decided, _ in _decided(result)}
    return next(kind for kind in ("undecided", "false", "right") if kind in kinds)


def _decided(result: Result) -> Iterator[tuple[Decision | None, str]]:
    for check in dict.fromkeys(one.partition(" at ")[0] for one in result.findings):
        yield decision(result.name, result.setting, check), check


def _alarms(results: list[Result]) -> dict[tuple[Decision | None, str], list[Result]]:
    found: dict[tuple[Decision | None, str], list[Result]] = {}
    for result in results:
        said = list(_decided(result))
        if result.crash:
            said.append((decision(result.name, result.setting, "crash"), "crash"))
        if result.interference:
            said.append((decision(result.name, result.setting, "differs"), "differs"))
        for one in said:
            found.setdefault(one, []).append(result)
    return found


def _said(result: Result, check: str) -> str:
    if check in ("crash", "differs"):
        text = result.crash or ", ".join(result.interference)
    else:
        text = next(one for one in result.findings if one.startswith(f"{check} at "))
    return text.replace("|", "\\|").replace("\n", " ")[:300]


def _not_run(results: list[Result]) -> dict[str, list[Result]]:
    """Return what did not run at all, or not in a setting, by the kind of reason."""
    found: dict[str, list[Result]] = {}
    for result in results:
        if result.not_run:
            found.setdefault(result.not_run.partition(":")[0], []).append(result)
    return found


_WARM_UP = Architecture("", "", lambda: Subject(nn.Linear(4, 2), torch.randn(8, 4)))

if __name__ == "__main__":
    main()
