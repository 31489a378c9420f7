"""What a page of one failing test takes: seconds to write, bytes, ms until its layers are seen.

``python -m benchmarks.page``; needs playwright and a Chromium of the system. The layers are made
up: a stack of Transformer blocks with the tensors and histograms that an inspection records.
"""

from __future__ import annotations

import io
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from pytest_modelhealth.runs.page import write
from tests.runs.made_runs import inspection, made_test, names_of, run_of

SIZES = (100, 1_000, 10_000)
TESTS = 2_000
ROUNDS = 5
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise SystemExit("no Chromium on PATH: apt-get install chromium")
    print(" layers       bytes  write s  open ms  search ms  sort ms")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for size in SIZES:
            file = io.StringIO()
            run = run_of(
                made_test(
                    "test_dead", inspection(names_of(size), "blocks.0.mlp.gelu"), outcome="failed"
                )
            )
            start = time.perf_counter()
            write(run, file)
            seconds = time.perf_counter() - start
            path = Path(folder) / f"{size}.html"
            path.write_text(file.getvalue(), encoding="ascii")
            rounds = [opened(browser, path.as_uri()) for _ in range(ROUNDS)]
            medians = [1000 * statistics.median(column) for column in zip(*rounds, strict=True)]
            print(
                f"{size:7,} {path.stat().st_size:11,} {seconds:8.2f} {medians[0]:8.0f} "
                f"{medians[1]:10.0f} {medians[2]:8.0f}"
            )
        browser.close()
    file = io.StringIO()
    made = [inspection(names_of(6), seed=seed) for seed in range(100)]
    write(run_of(*(made_test(f"test_{at}", made[at % 100]) for at in range(TESTS))), file)
    print(f"{TESTS:,} tests that passed, of six layers: {len(file.getvalue()):,} bytes")


def opened(browser: Any, address: str) -> tuple[float, float, float]:
    """Seconds until the layers and the charts above them are there, of a search, of a sort."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000}, reduced_motion="reduce")
    start = time.perf_counter()
    page.goto(address)
    page.locator(".layers tbody tr").first.wait_for()
    seen = time.perf_counter()
    page.get_by_role("searchbox", name="Search layers").fill("query")
    searched = time.perf_counter()
    page.get_by_role("button", name="std").click()
    ordered = time.perf_counter()
    page.close()
    return seen - start, searched - seen, ordered - searched


if __name__ == "__main__":
    main()
