"""Whether the tests would notice: the library is broken in 52 places, one at a time.

Usage: ``python -m benchmarks.mutations [--list] [--only PATTERN]``

Each mutation works on a copy of the project, which it leaves with one line changed; the tests of
that part then run until the first one fails. A mutation that no test notices is printed as
MISSED, and the command ends with status 1. Takes about ten minutes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.timing import header, row

ROOT = Path(__file__).parent.parent
COPIED = ("pytest_modelhealth", "tests", "examples", "benchmarks", "corpus", "docs")
COPIED += ("conftest.py", "pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")


@dataclass(frozen=True)
class Mutation:
    """One line broken.

    Args:
        what: what is wrong then, in words.
        find: what is replaced; it stands once in the whole package.
        replace: what takes its place.
        tests: which tests have to notice, as pytest's arguments.
    """

    what: str
    find: str
    replace: str
    tests: str


MUTATIONS = [
    # ---- statistics
    Mutation(
        "merging forgets the NaNs of the second batch",
        "nan_count=self.nan_count + other.nan_count",
        "nan_count=self.nan_count",
        "tests/statistics/test_summary.py",
    ),
    Mutation(
        "merged standard deviations leave out the gap between the means",
        "half_gap * (2 * math.sqrt(own * others)),",
        "0.0,",
        "tests/statistics/test_summary.py",
    ),
    Mutation(
        "the kernel of torch operations counts a negative infinity as a positive one",
        "ill = [wide.isnan().sum(), wide.isposinf().sum(), wide.isneginf().sum()]",
        "ill = [wide.isnan().sum(), wide.isinf().sum(), wide.isneginf().sum()]",
        "tests/statistics/test_summary.py tests/statistics/test_kernels.py",
    ),
    Mutation(
        "the dead fraction is that of the living",
        "return 1.0 - int(np.count_nonzero(self.units.alive)) / len(self.units.alive)",
        "return int(np.count_nonzero(self.units.alive)) / len(self.units.alive)",
        "tests/statistics/test_summary.py",
    ),
    Mutation(
        "the norm is that of a single value",
        "return math.hypot(self.mean, self.std) * math.sqrt(count) if count else 0.0",
        "return self.rms if count else 0.0",
        "tests/statistics/test_summary.py tests/statistics/test_kernels.py",
    ),
    # ---- capture
    Mutation(
        "random generators stay where the run left them",
        "stack.callback(self.restore_numbers)",
        "stack.callback(list)",
        "tests/capture/test_engine.py tests/capture/test_promises.py",
    ),
    Mutation(
        "attributes and hooks are not put back",
        "stack.callback(self.state.restore)",
        "stack.callback(list)",
        "tests/capture/test_engine.py tests/capture/test_promises.py",
    ),
    Mutation(
        "buffers keep what the run wrote to them",
        "stack.callback(memory.restore)",
        "stack.callback(list)",
        "tests/capture/test_engine.py tests/training/test_step_untouched.py",
    ),
    Mutation(
        "gradients of before are lost",
        "                leaf.grad = gradient\n",
        "                pass\n",
        "tests/capture/test_engine.py tests/training/test_step_untouched.py",
    ),
    Mutation(
        "a gradient that a forward takes for itself counts as one of the loss",
        "        return self._differentiating\n",
        "        return True\n",
        "tests/capture/test_engine.py tests/capture/test_hooks.py tests/capture/test_promises.py",
    ),
    Mutation(
        "what was written to in place is not read again",
        "found is None or found[0]() is not tensor or found[1] != version_now",
        "found is None or found[0]() is not tensor",
        "tests/capture/test_engine.py tests/capture/test_promises.py",
    ),
    Mutation(
        "an unused output counts as one without a graph",
        "return Status.UNUSED_IN_LOSS,",
        "return Status.NO_GRAD_PATH,",
        "tests/capture/test_engine.py tests/capture/test_promises.py "
        "tests/checks/test_missing_gradients.py tests/checks/test_tables.py",
    ),
    Mutation(
        "a loss gets target and output in the wrong order",
        "(output,) if target is None else (output, target)",
        "(output,) if target is None else (target, output)",
        "tests/test_inspector.py",
    ),
    Mutation(
        "the random projection is another in each run",
        "generator = torch.Generator().manual_seed(_PROJECTION_SEED)",
        "generator = torch.Generator().manual_seed(torch.seed() % 2**31)",
        "tests/capture/test_engine.py tests/test_inspector.py",
    ),
    # ---- flow
    Mutation(
        "gradients go back by operations that cut them",
        "enumerate(v.operands) if v.passes_gradient(at)],",
        "enumerate(v.operands)],",
        "tests/report/test_flow.py",
    ),
    Mutation(
        "a cut hides behind a way that values take",
        "if not live.isdisjoint(goal):",
        "if not self.walk(start).isdisjoint(goal):",
        "tests/report/test_flow.py",
    ),
    Mutation(
        "a sweep takes the last value that comes, and not the joined one",
        "value = given if value is None else join(value, given)",
        "value = given",
        "tests/report/test_flow.py tests/checks/test_tables.py",
    ),
    # ---- checks
    Mutation(
        "dead units are found only where all are dead",
        "limit, out = settings.exceeded(name, record.name, fraction), record.activations",
        "limit, out = settings.exceeded(name, record.name, fraction // 1.0), record.activations",
        "tests/checks/test_tables.py",
    ),
    Mutation(
        "units that something holds below zero are let pass",
        "for name, fraction in zip(_LIMITS, found, strict=False):",
        "for name, fraction in zip(_LIMITS[:1], found, strict=False):",
        "tests/checks/test_tables.py",
    ),
    Mutation(
        "a gradient vanishes unseen",
        "if record.name in weak - fed.keys()",
        "if record.name in weak & fed.keys()",
        "tests/checks/test_tables.py",
    ),
    Mutation(
        "gates that start nearly closed are called vanishing gradients",
        "parts[name] < limits[name].value * opened.get(name, 1.0)",
        "parts[name] < limits[name].value",
        "tests/checks/test_tables.py tests/checks/test_no_false_alarms.py "
        "tests/checks/test_starts.py",
    ),
    Mutation(
        "a norm under its lower bound passes",
        '("max_grad_norm", "over"), ("min_grad_norm", "under")',
        '("max_grad_norm", "over"), ("max_grad_norm", "under")',
        "tests/checks/test_values.py",
    ),
    Mutation(
        "saturation is judged the wrong way round",
        "limit = settings.exceeded(measure.setting, record.name, measure.value)",
        "limit = settings.exceeded(measure.setting, record.name, 1.0 - measure.value)",
        "tests/checks/test_tables.py",
    ),
    Mutation(
        "normalisations left in training mode pass in evaluation",
        'evaluated = root is not None and root.options.get("training") is False',
        "evaluated = False",
        "tests/checks/test_tables.py",
    ),
    Mutation(
        "an output that is the same for all samples passes",
        "not root.equal_samples or root.equal_input_samples is not False",
        "not root.equal_samples or root.equal_input_samples is not True",
        "tests/checks/test_tables.py",
    ),
    Mutation(
        "probabilities before cross-entropy pass",
        'if is_softmax and call.rows == "probabilities" and is_sure:',
        'if is_softmax and call.rows == "log probabilities" and is_sure:',
        "tests/checks/test_tables.py",
    ),
    Mutation(
        "a task drowns the other unseen",
        "if not (math.isfinite(high) and high > limit.value * low):",
        "if not (math.isfinite(high) and high > limit.value * 1e9 * low):",
        "tests/checks/test_task_balance.py",
    ),
    Mutation(
        "a story of missing gradients is told at its first layer, and not at its last",
        "place: object = last  # what one line does in every block is one fault",
        "place: object = name  # what one line does in every block is one fault",
        "tests/checks/test_tables.py tests/checks/test_beside_tables.py",
    ),
    Mutation(
        "layers that stand in for their siblings pass",
        "stories = [*_stand_ins(run)]",
        "stories: list[Any] = []",
        "tests/checks/test_tables.py tests/checks/test_beside_tables.py",
    ),
    # ---- judging and settings
    Mutation(
        "a waived violation fails all the same",
        "        if waiver is not None:\n",
        "        if waiver is not None and not finding.layer:\n",
        "tests/checks/test_control.py tests/test_inspector.py",
    ),
    Mutation(
        "of several thresholds for a layer the first one wins",
        "for special in self.layer_limits[::-1]:",
        "for special in self.layer_limits:",
        "tests/test_settings.py tests/checks/test_control.py",
    ),
    Mutation(
        "skipped checks run",
        'return named("checks") and not named("skip_checks")',
        'return named("checks")',
        "tests/checks/test_control.py",
    ),
    # ---- comparison, alignment, snapshot, tolerance
    Mutation(
        "a difference is none up to the square of its limit",
        "return self.ratio > self.limit",
        "return self.ratio > self.limit**2",
        "tests/comparison",
    ),
    Mutation(
        "layers of any size are taken for each other",
        "return kind(x) == kind(y) and _sizes(x) == _sizes(y)",
        "return kind(x) == kind(y)",
        "tests/alignment tests/comparison/test_causes.py tests/comparison/test_compare.py",
    ),
    Mutation(
        "a snapshot lets pass what left its tolerance",
        "if not distance <= allowance.distance:",
        "if distance > 1e3 * allowance.distance:",
        "tests/snapshot/test_drift.py",
    ),
    Mutation(
        "layers that are gone pass in a snapshot",
        "return tuple(change for change in self.changes if change.fails)",
        "return ()",
        "tests/snapshot/test_drift.py tests/snapshot/test_form.py",
    ),
    Mutation(
        "the noise to expect of rounding is 64 times as large",
        "return epsilon * math.sqrt(max(roundings, 1)) / 8",
        "return epsilon * math.sqrt(max(roundings, 1)) * 8",
        "tests/test_tolerance.py tests/comparison/test_compare.py",
    ),
    # ---- rendering and plugin
    Mutation(
        "nearly all is rounded to all",
        "    if 0.99 < fraction < 1:\n",
        "    if fraction == 2:\n",
        "tests/rendering/test_notation.py",
    ),
    Mutation(
        "a report that nobody asked is not checked",
        "unasked = [one for one in made if one.auto_check and not one.report._verdict_asked]",
        "unasked = [one for one in made if one.auto_check and one.report._verdict_asked]",
        "tests/plugin/test_verdict_asked.py tests/plugin/test_inspections.py",
    ),
    Mutation(
        "the farthest marker wins over the closest",
        "for node, marker in reversed(markers):",
        "for node, marker in markers:",
        "tests/plugin/test_markers.py",
    ),
    # ---- probes
    Mutation(
        "a probe leaves what it writes to the parameters",
        "*([values] if isinstance(values, Memory) else [])",
        "*[]",
        "tests/probes/test_verdicts.py tests/probes/test_alike_samples.py",
    ),
    Mutation(
        "only the even samples are overwritten",
        "index = torch.where(rows % 2 == parity, sources, rows)",
        "index = torch.where(rows % 2 == 0, sources, rows)",
        "tests/corpus/test_verdicts.py",
    ),
    Mutation(
        "later steps are changed from an even one on",
        "return min(self.length // 2 | 1, self.length - 1)",
        "return self.length // 2 // 2 * 2",
        "tests/corpus/test_verdicts.py",
    ),
    Mutation(
        "a mask is read with padding for real",
        "        return said == first[0]\n",
        "        return said != first[0]\n",
        "tests/probes/test_verdicts.py",
    ),
    Mutation(
        "another seed is the usual one",
        "                torch.manual_seed(seed)\n            numbers =",
        "                pass\n            numbers =",
        "tests/probes/test_verdicts.py",
    ),
    Mutation(
        "a property that could not be told passes",
        "        if not report.healthy:\n            raise report._denial()",
        "        if report._judgement.violations:\n            raise report._denial()",
        "tests/probes/test_verdicts.py",
    ),
    # ---- a training step
    Mutation(
        "variables that a step assigns to keep what it gave them",
        "cell.cell_contents = value",
        "pass",
        "tests/training/test_step_untouched.py",
    ),
    Mutation(
        "the slope of a step's loss is twice what it is",
        "slope, middle = (ends[0] - ends[1]) / (2.0 * narrow * weights), loss_in(first.result)",
        "slope, middle = (ends[0] - ends[1]) / (narrow * weights), loss_in(first.result)",
        "tests/training/test_step_forms.py",
    ),
    Mutation(
        "what later calls of a step raise is passed on",
        "                if not self.calls:\n                    raise\n",
        "                if True:\n                    raise\n",
        "tests/training/test_step_untouched.py tests/training/test_step_corpus.py",
    ),
    Mutation(
        "a half of the batch is replaced by itself",
        "first_by_second = [*ends[:half], *ends]",
        "first_by_second = [*starts, *ends]",
        "tests/training/test_step_corpus.py",
    ),
    Mutation(
        "what an optimizer stepped on is forgotten",
        "        used |= within",
        "        used |= set()",
        "tests/training/test_step_corpus.py",
    ),
]


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return how many mutations no test noticed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="the mutations, none is tried")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of what is wrong then")
    options = parser.parse_args(arguments)
    chosen = [one for one in MUTATIONS if fnmatchcase(one.what, options.only)]
    if options.list:
        for one in chosen:
            print(f"{_home(ROOT, one).relative_to(ROOT)}: {one.what}")
        return 0
    print(header(["broken", "in", "noticed by", "seconds"]))
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = _copied(Path(folder))
        for one in chosen:
            start = time.perf_counter()
            home = _home(copy, one)
            noticed = _noticed(copy, home, one)
            missed += not noticed
            where = home.relative_to(copy / "pytest_modelhealth")
            seconds = f"{time.perf_counter() - start:.0f}"
            print(row([one.what, str(where), noticed or "MISSED", seconds]), flush=True)
    print(f"\n{len(chosen) - missed} of {len(chosen)} noticed")
    return missed


def _copied(folder: Path) -> Path:
    for name in COPIED:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.exists():
            shutil.copy(path, folder / name)
    return folder


def _home(root: Path, mutation: Mutation) -> Path:
    """Return the one file of the package where the line stands, once.

    Raises:
        LookupError: it stands nowhere, or in several places.
    """
    found = list(_holding(root, mutation.find))
    if len(found) != 1:
        raise LookupError(f"{mutation.find!r} stands in {len(found)} places: {found}")
    return found[0]


def _holding(root: Path, text: str) -> Iterator[Path]:
    for path in sorted((root / "pytest_modelhealth").rglob("*.py")):
        yield from [path] * path.read_text(encoding="utf-8").count(text)


def _noticed(copy: Path, home: Path, mutation: Mutation) -> str:
    """Return the first test that fails once the line is broken, ``""`` if none does."""
    whole = home.read_text(encoding="utf-8")
    home.write_text(whole.replace(mutation.find, mutation.replace), encoding="utf-8")
    tests = [path for path in mutation.tests.split() if (copy / path).exists()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not corpus"]  # what is slow notices too
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            [*command, *tests], cwd=copy, env=environment, capture_output=True, text=True
        )
    finally:
        home.write_text(whole, encoding="utf-8")
    if not ended.returncode:
        return ""
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[-1].split(" - ")[0].split(" ", 1)[1] if lines else f"pytest: {ended.returncode}"


if __name__ == "__main__":
    sys.exit(bool(main()))
