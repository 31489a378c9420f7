"""Writes into the reference of checks which model fails each, what it says, and what to do.

Usage: ``python scripts/failing_checks.py [--check | --figures]``. It runs one small test for each
check, and fails where one does not fail with that check as its culprit. With --check nothing is
written, and the exit status also says whether the page has what the tests say: words are
compared, while numbers may differ, as they do from processor to processor. With --figures the
pictures of the gallery are drawn anew, too.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from failing_checks_texts import GALLERY, REPAIRS, Picture  # noqa: E402

REFERENCE = ROOT / "docs" / "reference" / "checks.md"
GALLERY_PAGE = ROOT / "docs" / "reference" / "gallery.md"
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
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--color=no"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # as a script loads it first
    with redirect_stdout(StringIO()), mock.patch.dict(os.environ, COLUMNS="80"):
        pytest.main([*options, *map(str, files)], plugins=[collector])
    return collector.printed


def culprit(text: str) -> str:
    """Return the check that the first line of a failure names."""
    found = re.search(r"^E +(?:unhealthy|inconclusive): .*? \((\w+)\): ", text, re.MULTILINE)
    if found:
        return found[1]
    # A note is no finding, and has no check in its line.
    return "input_effect" if "has no effect on the output" in text else ""


def block_of(check: str, printed: str) -> str:
    """Return what stands at the end of a check's section."""
    file = example_of(check)
    said = re.search(r"^E +(.*)$", printed, re.MULTILINE)
    link = f"[{file.name}](../../{file.as_posix()})"
    return (
        f"**Fails it**: {link}. {REPAIRS[check]}\n\n"
        f"```text\n{textwrap.fill(said[1] if said else '', 110)}\n```\n"
    )


def with_blocks(page: str, blocks: dict[str, str]) -> tuple[str, list[str]]:
    """Return the reference with the block of each check, and the checks without a section."""
    head, *sections = re.split(r"^(?=### |## )", page, flags=re.MULTILINE)
    missing = dict(blocks)
    for index, section in enumerate(sections):
        block = missing.pop(section.partition("\n")[0].lstrip("# `").rstrip("`"), None)
        if block is not None:
            kept = section.partition("**Fails it**: ")[0].rstrip()
            sections[index] = f"{kept}\n\n{block}\n"
    return head + "".join(sections).rstrip() + "\n", list(missing)


def gallery() -> str:
    """Return the page of pictures."""
    parts = [
        "# A gallery of failures",
        MADE.strip(),
        PICTURES,
    ]
    for picture in GALLERY:
        link = f"checks.md#{picture.check}" if picture.check else "../how-to/compare.md"
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
    from pytest_modelhealth.checks import every_check

    os.chdir(ROOT)
    checks = list(every_check())
    files = [example_of(check.name) for check in checks]
    wrong = [f"{file} is missing" for file in files if not file.exists()]
    printed = printed_by([file for file in files if file.exists()])
    blocks = {}
    for check, file in zip(checks, files, strict=True):
        text = printed.get(file.as_posix(), "")
        if culprit(text) != check.name:
            wrong.append(f"{file} fails with {culprit(text) or 'nothing'} as its culprit:\n{text}")
        else:
            blocks[check.name] = block_of(check.name, text)
    reference, missing = with_blocks(REFERENCE.read_text(encoding="utf-8"), blocks)
    wrong += [f"{REFERENCE} has no section {name}" for name in missing]
    pages = {REFERENCE: reference, GALLERY_PAGE: gallery()}
    if "--check" in arguments:
        wrong += _stale(pages)
    elif not wrong:
        for path, text in pages.items():
            path.write_text(text, encoding="utf-8")
    if "--figures" in arguments:
        for picture in GALLERY:
            draw(picture)
    sys.stderr.writelines(f"{one}\n" for one in wrong)
    return 1 if wrong else 0


def _stale(pages: dict[Path, str]) -> Iterator[str]:
    for path, text in pages.items():
        if not path.exists() or not same_words(text, path.read_text(encoding="utf-8")):
            yield f"{path} does not have what the tests say: run {__file__}"
    for picture in GALLERY:
        if not (FIGURES / f"{picture.name}.png").exists():
            yield f"the picture {picture.name} is missing: run {__file__} --figures"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
