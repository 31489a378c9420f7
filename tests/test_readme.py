"""The code in the README and in the first guide runs, and their links lead somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
PAGES += sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))
RUN_PAGES = ("README.md", "docs/how-to/first-test.md", "docs/how-to/compare.md")


def code_blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of `page` in `language`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", RUN_PAGES)
def test_python_blocks_run(page, pytester):
    """Each Python block is a test file that passes, under the settings that the page shows."""
    blocks = code_blocks(page, "python")
    assert blocks
    pytester.makepyprojecttoml("\n".join(code_blocks(page, "toml")))
    pytester.makepyfile(**{f"test_block_{i}": block for i, block in enumerate(blocks)})
    pytester.runpytest("--snapshot-update", "-p", "no:xdist")
    result = pytester.runpytest("-W", "error", "-p", "no:xdist")
    tests = sum(len(re.findall(r"^def test_", block, re.MULTILINE)) for block in blocks)
    result.assert_outcomes(passed=tests)
    assert result.ret == pytest.ExitCode.OK


def relative_links(page: Path) -> list[str]:
    """Return the targets of Markdown links on `page` that are neither addresses nor anchors."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)", re.sub(r"`[^`\n]*`", "", prose))
    return [target for target in targets if "://" not in target]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """Each relative link leads to a file or folder of the repository."""
    links = relative_links(ROOT / page)
    missing = [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    assert not missing


def test_links_are_found():
    """The links that the test above follows are those of the pages: it does not look at none."""
    assert {"docs/index.md", "CONTRIBUTING.md"} <= set(relative_links(ROOT / "README.md"))


def test_package_indexes_get_no_relative_link():
    """What PyPI shows has the words and the code of the README, and no link that leads nowhere."""
    rewrite = runpy.run_path(str(ROOT / "hatch_metadata.py"))["without_relative_links"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = rewrite(text)
    code = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    assert not re.search(r"\]\((?!https?:)", code.sub("", shown))
    assert code.findall(shown) == code.findall(text)
    assert rewrite("[docs/](docs/index.md), [Guide](docs/guide.md), [torch](https://a.b/c)") == (
        "`docs/`, Guide (`docs/guide.md`), [torch](https://a.b/c)"
    )


@pytest.mark.parametrize("page", PAGES)
def test_links_to_headings_have_one(page):
    """Each link to a place on its own page names a heading there."""
    text = (ROOT / page).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors


def test_decisions_have_a_number_each():
    """No two decisions share a number, none is left out, and the title has that of the file."""
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    for number, page in enumerate(pages, start=1):
        assert page.read_text(encoding="utf-8").startswith(f"# {number}. ")


def test_index_lists_every_page():
    """`docs/index.md` links to each page under `docs/` but itself, or to the folder it is in."""
    docs = ROOT / "docs"
    linked = {(docs / link).resolve() for link in relative_links(docs / "index.md")}
    pages = set(docs.rglob("*.md")) - {docs / "index.md"}
    assert not {page for page in pages if page not in linked and page.parent not in linked}


def test_commands_exist():
    """Each command of the repository that the README names is there and can be executed."""
    commands = re.findall(
        r"^(scripts/\w+)", "\n".join(code_blocks("README.md", "console")), re.MULTILINE
    )
    assert commands
    assert all((ROOT / command).stat().st_mode & 0o111 for command in commands)


def test_benchmarks_are_listed_once_each():
    """The table of commands names every benchmark that can be run, once."""
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `python -m benchmarks\.(\w+)`", text, re.MULTILINE)
    folder = (ROOT / "benchmarks").glob("*.py")
    runnable = [page.stem for page in folder if '"__main__"' in page.read_text(encoding="utf-8")]
    assert sorted(listed) == sorted(runnable)
