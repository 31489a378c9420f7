"""Takes down what the runs of an inspector are made of, so that one of them can be saved."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pytest_modelhealth.bundles.file import Packer, Saved, described, qualified_name, write
from pytest_modelhealth.bundles.state import held_tensors, surroundings, take, versions
from pytest_modelhealth.capture import Request
from pytest_modelhealth.capture.observing.sample_statistics import Collector
from pytest_modelhealth.capture.observing.tensors import find_tensors, version
from pytest_modelhealth.capture.step.isolation import random_state
from pytest_modelhealth.checks import all_checks
from pytest_modelhealth.inspector import Inspector
from pytest_modelhealth.layers import named_modules
from pytest_modelhealth.report import HealthReport, Observation
from pytest_modelhealth.training import every_check

PARTS = ("weights", "inputs")
"""What can be left out of a bundle."""


class HookedInspector(Inspector):
    """Has each inspection made by `hooks.run`; `hooks` is told each request and each report."""

    hooks: Any

    def run_inspection(self, *args: Any, **options: Any) -> HealthReport:
        """As in `Inspector`."""
        report: HealthReport = self.hooks.run(self, "batch", super().run_inspection, args, options)
        return report

    def run_batches(self, *args: Any, **options: Any) -> HealthReport:
        """As in `Inspector`."""
        report: HealthReport = self.hooks.run(self, "batches", super().run_batches, args, options)
        return report

    def _observe(self, request: Request, collectors: tuple[Collector, ...] = ()) -> Observation:
        self.hooks.before(request)
        return super()._observe(request, collectors)

    def _note_report(self, report: HealthReport) -> None:
        super()._note_report(report)
        self.hooks.after(report)


_OPTIONS = {"batch": ("batch_dim", "time_dim", "causal", "padding"), "batches": ("training",)}
"""Arguments of `run_inspection` and `run_batches` that a replay gives again."""


class Ran:
    """What a report was made of. It holds model and batches.

    Args:
        inspector: what runs it.
        of: ``"batch"`` or ``"batches"``.
        options: arguments of `run_inspection` or `run_batches`.
        limit: the most bytes of several batches that are held.

    Attributes:
        model: the module that has the layers.
        compiled: as in `Inspector`.
        requests: what was run, in order.
        states: the random state before each.
        surroundings: switches of torch.
        too_large: whether the batches were over the limit, and are not held.
    """

    def __init__(
        self, inspector: Inspector, of: str, options: dict[str, Any], limit: float
    ) -> None:
        self.of, self.limit = of, limit
        self.model = inspector._engine.module(inspector._model)
        self.compiled = "observe" if inspector._engine.compiled else "eager"
        self.options = {name: options.get(name) for name in _OPTIONS[of]}
        self.surroundings = surroundings()
        self.requests: list[Request] = []
        self.states: list[dict[str, Any]] = []
        self.too_large = False
        self._bytes = 0
        self._before: list[tuple[Tensor, int | None]] = []
        self._after: list[Any] = []

    def add(self, request: Request) -> None:
        """Take down what is about to run."""
        if self.too_large:
            return
        tensors = [*find_tensors((request.inputs, request.target))]
        self._bytes += sum(map(size, tensors))
        if self.requests and self._bytes > self.limit:
            self.too_large = True
            self.requests, self.states, self._before = [], [], []
            return
        self.requests.append(request)
        self.states.append(random_state())
        tensors += [] if self._before else self.model.parameters()
        self._before += [(tensor, version(tensor)) for tensor in tensors]

    def tensors(self) -> list[Tensor]:
        """Return the tensors of all batches."""
        return [*find_tensors([(request.inputs, request.target) for request in self.requests])]

    def end(self) -> None:
        """Take down how model and batches are left."""
        self._after = self._now()

    def written(self) -> list[Tensor]:
        """Return the parameters and tensors of batches that the run wrote to."""
        return [tensor for tensor, before in self._before if version(tensor) != before]

    def is_as_it_was(self) -> bool:
        """Whether nothing of model and batches was written to or replaced since the run."""
        return self._after == self._now()

    def _now(self) -> list[Any]:
        tensors = [*held_tensors(self.model), *self.tensors()]
        modes = [module.training for module in self.model.modules()]
        return [*((id(t), version(t), t.requires_grad) for t in tensors), *modes]


def size(tensor: Tensor) -> int:
    """Return how many bytes the values of a tensor take; of one without plain memory, 0."""
    try:
        return tensor.numel() * tensor.element_size()
    except (RuntimeError, ValueError):  # lazy, nested
        return 0


def save(
    folder: Path,
    ran: Ran,
    report: HealthReport,
    test: dict[str, Any] | None,
    without: Iterable[str] = (),
) -> Saved:
    """Write a bundle into a folder that is made for it; what is the user's own code is named.

    Args:
        folder: the new folder.
        ran: what the report was made of; ``ran.limit`` is the most bytes of tensors to write.
        report: the report, under the settings that failed it.
        test: the test that made it: its ``id``, the ``number`` of this inspection among its own,
            counted from 1, and the ``place`` of the call, ``path:line``.
        without: parts to leave out.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    request, settings, packer = ran.requests[0], report._settings, Packer()
    left_out = _left_out(ran, without)
    batches = [_batch(ran, index, packer, left_out) for index in range(len(ran.requests))]
    model = take(ran.model, packer, left_out.get("weights", ""))
    for tensor in ran.written():
        packer.lack(tensor, "values", "the run wrote to it: what is kept is what it left")
    known = {type(check) for check in (*all_checks(), *every_check())}
    scaler, backward = request.scaler, request.backward
    content = {
        "versions": versions(),
        "test": test,
        "model": model,
        "of": ran.of,
        "batches": batches,
        "loss": packer.loss(request.loss),
        "backward": described(backward) if callable(backward) else backward,
        "scaler": scaler
        and packer.pack((getattr(scaler, "_device", "cuda"), scaler.state_dict()), "scaler"),
        "options": packer.pack(ran.options, "options"),
        "compiled": ran.compiled,
        "watch": _watched(request, report.observation, ran.model),
        "settings": {name: limit for name, limit in settings.items() if limit.origin != "default"},
        "waivers": settings.waivers,
        "own_checks": [
            qualified_name(type(check)) for check in settings.checks if type(check) not in known
        ],
        "surroundings": ran.surroundings,
        "missing": packer.missing,
    }
    return write(folder, content, report, left_out)


def _watched(request: Request, seen: Observation, model: nn.Module) -> dict[str, list[str]] | None:
    """Return which roles of each layer were watched; ``None`` where all were."""
    if not request.selection.rules:
        return None
    modules = {named.name: named.module for named in named_modules(model)}
    return {
        name: sorted(request.selection.roles(name, modules.get(name)))
        for name in {**modules, **seen.layers}  # functional layers are no modules
    }


def _left_out(ran: Ran, without: Iterable[str]) -> dict[str, str]:
    """Return the parts to leave out: those asked for, then weights, then inputs over the limit."""
    left_out = dict.fromkeys(without, "left out as --modelhealth-replay-without asks")
    tensors = {"weights": held_tensors(ran.model), "inputs": ran.tensors()}
    sizes = {part: sum(map(size, tensors[part])) for part in PARTS if part not in left_out}
    for part in PARTS:
        total = sum(sizes.values())
        if part in sizes and total > ran.limit:
            left_out[part] = (
                f"{sizes.pop(part) / 1e6:,.1f} MB, with which the bundle is over its limit "
                f"of {ran.limit / 1e6:,.0f} MB (--modelhealth-replay-limit)"
            )
    return left_out


def _batch(ran: Ran, index: int, packer: Packer, left_out: dict[str, str]) -> dict[str, Any]:
    """Return a batch and the state of all random generators before it ran."""
    request, before = ran.requests[index], "" if ran.of == "batch" else f"batches[{index}]."
    batch = {
        name: packer.lack(value, before + name, left_out["inputs"])
        if "inputs" in left_out and value is not None
        else packer.pack(value, before + name)
        for name, value in (("inputs", request.inputs), ("target", request.target))
    }
    return batch | {"random": packer.pack(ran.states[index], f"{before}random")}
