"""The code in the README and in docs/ runs, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
PAGES += sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))


def code_blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of `page` in `language`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


IS_TEST = re.compile(r"^ *(?:async )?def test_|^class \w+\(ModelHealthSuite\)", re.MULTILINE)
IN_CONFTEST = "# conftest.py\n"


def blocks_as_files(page: str) -> dict[str, str]:
    """Return the test files of a page: one for each block with a test, and one for all the others.

    A test stands below the blocks above it that have none, and runs with what they define.
    """
    above, files = "", {}
    name = f"test_{Path(page).parent.name}_{Path(page).stem}".replace("-", "_")
    for i, block in enumerate(code_blocks(page, "python")):
        if block.startswith(IN_CONFTEST):
            continue
        if IS_TEST.search(block):
            files[f"{name}_{i}"] = above + block
        else:
            above += block
    return {**files, f"{name}_script": above} if above else files


SICK = """
from torch import full, nn, ones

def test_sick(inspector):
    inspector(nn.Sequential(nn.Linear(4, 4), nn.ReLU())).run_inspection(full((64, 4), float("nan")))
"""


@pytest.fixture
def pages(pytester):
    """A project of all blocks: a test file each, one conftest.py and the README's settings."""
    files = {name: code for page in PAGES for name, code in blocks_as_files(page).items()}
    assert len(files) > 20
    python = [block for page in PAGES for block in code_blocks(page, "python")]
    conftest = [block for block in python if block.startswith(IN_CONFTEST)]
    pytester.makepyprojecttoml("\n".join(code_blocks("README.md", "toml")))
    pytester.makeconftest("\n".join(conftest))
    pytester.makepyfile(**files, test_sick=SICK)
    return files


@pytest.mark.slow
def test_python_blocks_run(pages, pytester):
    """Each Python block of README and docs runs, and its tests pass with warnings as errors.

    One further test fails, for the hooks that blocks of the conftest.py implement.
    """
    recorded = [f"{name}.py" for name, code in pages.items() if "health_snapshot" in code]
    assert recorded
    pytester.runpytest("--snapshot-update", "-p", "no:xdist", *recorded).assert_outcomes(
        passed=len(recorded)
    )
    result = pytester.runpytest("-W", "error", "-p", "no:xdist", "-k", "not compiled_equals_eager")
    outcomes = result.parseoutcomes()
    tests = sum(len(IS_TEST.findall(code)) for code in pages.values())
    assert outcomes["failed"] == 1
    assert "errors" not in outcomes
    assert outcomes["passed"] >= tests  # a suite has tests that it inherits
    assert "relu.png" in [path.name for path in pytester.path.iterdir()]  # of scripts
    assert pytester.path.joinpath("test_sick-culprit.png").exists()  # docs/how-to/pytest.md


INI = [(page, block) for page in PAGES for block in code_blocks(page, "ini")]


@pytest.mark.parametrize(("page", "block"), INI, ids=[page for page, _ in INI])
def test_settings_are_read(page, block, pytester):
    """Each block of an ini file is one that pytest starts with, and holds a setting in force."""
    pytester.makeini(block)
    result = pytester.runpytest("-p", "no:xdist", "--strict-config", "--modelhealth-explain=*")
    assert result.ret == pytest.ExitCode.OK
    assert "tox.ini: modelhealth_" in result.stdout.str() or "modelhealth_waive" in block


def test_options_and_ini_names_exist(pages, pytester):
    """Each `--modelhealth-...` and `modelhealth_...` that a page names exists."""
    told = pytester.runpytest("-p", "no:xdist", "--help").stdout.str()
    known = set(re.findall(r"(?:--modelhealth-|\bmodelhealth_)[\w-]+", told))
    explained = pytester.runpytest("-p", "no:xdist", "--modelhealth-explain").stdout.str()
    known |= {f"modelhealth_{name}" for name in re.findall(r"\w+", explained)}
    names = {"modelhealth_waive", "modelhealth_checks", "modelhealth_attach"}  # markers, hooks
    names |= {"modelhealth_ranks", "modelhealth_suite", "modelhealth_case"}
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        options = set(re.findall(r"--modelhealth-[a-z][\w-]*|\bmodelhealth_[a-z]\w*", text))
        assert not options - known - names, page


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


def as_package_indexes_get_it(text):
    """Return `text` with the substitutions that the build makes in the README."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    readme = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for change in readme["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    return text


def test_package_indexes_get_no_relative_link():
    """What PyPI shows has the words and the code of the README, and no link that leads nowhere."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = as_package_indexes_get_it(text)
    code = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    assert not re.search(r"\]\((?!https?:)", code.sub("", shown))
    assert code.findall(shown) == code.findall(text)
    links = "[docs/](docs/index.md), [Guide](docs/guide.md), [torch](https://a.b/c), [up](#top)"
    assert as_package_indexes_get_it(links) == (
        "`docs/`, Guide (`docs/guide.md`), [torch](https://a.b/c), [up](#top)"
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


def test_files_of_the_trace_exist():
    """Each file that the page on tracing a fault names is one of the package, by that name."""
    text = (ROOT / "docs" / "concepts" / "how-a-fault-is-traced.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    files = [str(path) for path in (ROOT / "pytest_modelhealth").rglob("*.py")]
    missing = [name for name in named if not any(path.endswith(f"/{name}") for path in files)]
    assert len(named) >= 5
    assert not missing


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


@pytest.mark.slow
def test_every_check_has_a_model_that_fails_it_and_a_page_that_shows_it():
    """One run of all these tests: each fails with its check as culprit, as the reference says."""
    made = subprocess.run(
        [sys.executable, "scripts/failing_checks.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
