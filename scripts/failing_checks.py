"""Writes docs/checks/: every check with a model that fails it, what it prints, and some pictures.

Usage: ``python scripts/failing_checks.py [--check | --figures]``. It runs one small test for each
check, and fails where one does not fail with that check as its culprit. With --check nothing is
written, and the exit status also says whether the pages are what the tests print: words are
compared, while numbers may differ, as they do from processor to processor. With --figures the
pictures of the gallery are drawn anew, too.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from failing_checks_texts import GALLERY, REPAIRS, Picture  # noqa: E402

PAGES = ROOT / "docs" / "checks"
FIGURES = ROOT / "docs" / "images" / "failures"
# Those that examples/broken has a test of already.
BROKEN = {
    "causality": "test_leaking_future.py",
    "dead_units": "test_dead_relu.py",
    "finite": "test_nan_masked_softmax.py",
    "grad_norm": "test_vanishing_gradient.py",
    "initial_weights": "test_exploding_gradient.py",
    "missing_gradients": "test_detached_branch.py",
    "sample_independence": "test_leaking_batch.py",
}
SHELVES = {
    "checks": "An inspection",
    "probes": "Probes: what one run does not show",
    "ranks": "Between ranks",
    "contract": "A training step",
    "rules": "A whole training",
}
MEANT_SO = (
    "Meant so? [Accept it with a reason](../how-to/checks.md#accept-a-violation-with-a-reason). "
    "[The reference](../reference/checks.md#{check}) says what exactly is measured, and when "
    "nothing can be said."
)
INDEX = (
    "Each check has a small model that it fails, and what it prints of it, made by running it. "
    "[The gallery](gallery.md) has some of them as pictures."
)
PICTURES = (
    "What some failures look like. Each picture is one line of Python, or is drawn by "
    "`pytest --modelhealth-artifacts=DIR`."
)
MADE = "<!-- Made by scripts/failing_checks.py: change that or the example, and run it. -->\n\n"


def example_of(check: str) -> Path:
    """Return the file with the model that fails a check, relative to the repository."""
    if check in BROKEN:
        return Path("examples", "broken", BROKEN[check])
    return Path("examples", "failing", f"{check}.py")


def shelf_of(check: Any) -> str:
    """Return the shelf that a check stands on, a key of `SHELVES`."""
    from pytest_modelhealth.checks.between_ranks import BetweenRanks

    if isinstance(check, BetweenRanks):
        return "ranks"
    return next(name for name in reversed(SHELVES) if f".{name}." in type(check).__module__)


class Collector:
    """A plugin of pytest that keeps what failing tests print."""

    def __init__(self) -> None:
        self.printed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the text from the line that raised on, and the sections of the plugin."""
        if not report.failed:
            return
        text = report.longreprtext
        parts = [text[re.search(r"^>", text, re.MULTILINE).start() :] if "\n>" in text else text]
        for title, content in report.sections:
            if title.startswith("modelhealth"):
                parts.append(f"{f' {title} ':-^80}\n{content}")
        # Neither where this repository lies nor how long a probe took.
        told = "\n".join(parts).replace(str(ROOT) + os.sep, "")
        lines = re.sub(r"(further forwards?), [\d.e-]+ s\)", r"\1)", told).splitlines()
        file = report.nodeid.partition("::")[0]
        self.printed[file] = "\n".join(line.rstrip() for line in lines) + "\n"


def printed_by(files: list[Path]) -> dict[str, str]:
    """Run the tests of some files in this process, and return what each failing one prints."""
    collector = Collector()
    os.environ["COLUMNS"] = "80"
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--color=no"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # as a script loads it first
    with redirect_stdout(StringIO()):
        pytest.main([*options, *map(str, files)], plugins=[collector])
    return collector.printed


def culprit(text: str) -> str:
    """Return the check that the first line of a failure names."""
    found = re.search(r"^E +(?:unhealthy|inconclusive): .*? \((\w+)\): ", text, re.MULTILINE)
    if found:
        return found[1]
    # A note is no finding, and has no check in its line.
    return "input_effect" if "has no effect on the output" in text else ""


def page_of(check: Any, printed: str) -> str:
    """Return the page of a check."""
    file = example_of(check.name)
    source = (ROOT / file).read_text(encoding="utf-8")
    story = source[3 : source.index('"""', 3)].strip()
    parts = [
        f"# {check.name}",
        MADE.strip(),
        check.summary,
        f"**Here:** {story}",
        "## A model that fails it",
        f'```py title="{file.as_posix()}"\n{source}```',
        "## What it prints",
        f"`pytest {file.as_posix()}`",
        f"```text\n{printed}```",
        "## What to do",
        REPAIRS[check.name],
        *_limits(check),
        MEANT_SO.format(check=check.name),
    ]
    picture = next((p for p in GALLERY if p.check == check.name), None)
    if picture is not None:
        shown = f"![{picture.title}](../images/failures/{picture.name}.png)"
        parts[-1:-1] = [shown]
    return "\n\n".join(parts) + "\n"


def _limits(check: Any) -> Iterator[str]:
    if check.settings:
        rows = [f"| `{s.name}` | {s.default} | {s.help} |" for s in check.settings]
        yield "\n".join(["| limit | default | what it is |", "| --- | --- | --- |", *rows])


def index_of(checks: list[Any]) -> str:
    """Return the page that lists all checks."""
    parts = [
        "# Every check, failing",
        MADE.strip(),
        INDEX,
    ]
    for shelf, title in SHELVES.items():
        of_shelf = [check for check in checks if shelf_of(check) == shelf]
        lines = [f"- [{check.name}]({check.name}.md): {check.summary}" for check in of_shelf]
        parts += [f"## {title}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def gallery() -> str:
    """Return the page of pictures."""
    parts = [
        "# A gallery of failures",
        MADE.strip(),
        PICTURES,
    ]
    for picture in GALLERY:
        link = f"{picture.check}.md" if picture.check else "../how-to/compare.md"
        parts += [
            f"## {picture.title}",
            f"![{picture.title}](../images/failures/{picture.name}.png)",
            f"{picture.caption} ([the model]({link}), `{picture.call}`)",
        ]
    return "\n\n".join(parts) + "\n"


class Recorder:
    """Stands for the fixture `inspector`: keeps what is made with it."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}

    def __call__(self, model: Any, **settings: Any) -> Any:
        """Return an inspector whose report and monitor are kept."""
        from pytest_modelhealth import Inspector

        inspector = Inspector(
            model, on_report=lambda r: self.made.setdefault("report", r), **settings
        )
        start = inspector.monitor

        def monitor(*arguments: Any, **options: Any) -> Any:
            self.made["monitor"] = start(*arguments, **options)
            return self.made["monitor"]

        inspector.monitor = monitor  # type: ignore[method-assign]
        return inspector

    def compare(self, *arguments: Any, **options: Any) -> Any:
        """Compare two models, and keep the result."""
        from pytest_modelhealth import compare

        self.made["comparison"] = compare(*arguments, **options)
        return self.made["comparison"]


def draw(picture: Picture) -> None:
    """Draw a picture of the gallery anew."""
    from pytest_modelhealth import ModelHealthError

    file = ROOT / (example_of(picture.check) if picture.check else picture.file)
    recorder, functions = Recorder(), runpy.run_path(str(file))
    (test,) = [function for name, function in functions.items() if name.startswith("test_")]
    with suppress(ModelHealthError):
        test(recorder)
    figure = eval(picture.call, {}, recorder.made)  # ours, and shown on the page
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / f"{picture.name}.png", dpi=100, metadata={"Software": None})


def same_words(one: str, other: str) -> bool:
    """Whether two pages differ in nothing but numbers, bars and the space that these take."""
    bare = re.compile(r"[-+]?[\d.,]+(?:e[-+]?\d+)?|[\s█▉▊▋▌▍▎▏<>-]+")
    return bare.sub(" ", one) == bare.sub(" ", other)


def main(arguments: list[str]) -> int:
    """Write the pages, or say what is wrong with them."""
    from pytest_modelhealth.training.shelf import every_check

    os.chdir(ROOT)
    checks = list(every_check())
    files = [example_of(check.name) for check in checks]
    wrong = [f"{file} is missing" for file in files if not file.exists()]
    printed = printed_by([file for file in files if file.exists()])
    pages = {"index.md": index_of(checks), "gallery.md": gallery()}
    for check, file in zip(checks, files, strict=True):
        text = printed.get(file.as_posix(), "")
        if culprit(text) != check.name:
            wrong.append(f"{file} fails with {culprit(text) or 'nothing'} as its culprit:\n{text}")
        else:
            pages[f"{check.name}.md"] = page_of(check, text)
    if "--check" in arguments:
        wrong += _stale(pages)
    elif not wrong:
        PAGES.mkdir(exist_ok=True)
        for page in PAGES.glob("*.md"):
            page.unlink()
        for name, text in pages.items():
            (PAGES / name).write_text(text, encoding="utf-8")
    if "--figures" in arguments:
        for picture in GALLERY:
            draw(picture)
    sys.stderr.writelines(f"{one}\n" for one in wrong)
    return 1 if wrong else 0


def _stale(pages: dict[str, str]) -> Iterator[str]:
    there = {page.name: page.read_text(encoding="utf-8") for page in PAGES.glob("*.md")}
    for name in sorted({*pages, *there}):
        if not same_words(pages.get(name, ""), there.get(name, "")):
            yield f"docs/checks/{name} is not what its test prints: run {__file__}"
    for picture in GALLERY:
        if not (FIGURES / f"{picture.name}.png").exists():
            yield f"the picture {picture.name} is missing: run {__file__} --figures"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
