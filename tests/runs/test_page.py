"""The page of a run, as a browser shows it and as it stands in the file."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import random
import re
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.rendering.notation import in_bytes, number, percent, scaled
from pytest_modelhealth.runs.page import LIMIT, write
from pytest_modelhealth.runs.run import Run
from tests.runs.made_runs import comparison, drift, inspection, made_test, names_of, run_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DEAD = "blocks.2.mlp.gelu"
NAMES = names_of(100)
UNHEALTHY = inspection(NAMES, DEAD)
SMALL = names_of(30)
PASSING = inspection(SMALL, seed=1)
PASSING["layers"][-1]["status"] = "not_called"
RUN = run_of(
    made_test("test_passes", PASSING),
    made_test("test_dead", UNHEALTHY, outcome="failed"),
    made_test("test_refactor", comparison(SMALL, "blocks.0.mlp.gelu"), outcome="failed"),
    made_test("test_no_drift", drift(SMALL, "blocks.0.mlp.fc1"), outcome="failed"),
)


def html_of(run: Run, **options: int) -> str:
    """The page as text."""
    file = io.StringIO()
    write(run, file, **options)
    return file.getvalue()


def saved(run: Run, folder: Path) -> str:
    """The address of the page, written to a file."""
    path = folder / "page.html"
    path.write_text(html_of(run), encoding="ascii")
    return path.as_uri()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of `RUN`."""
    return saved(RUN, tmp_path_factory.mktemp("page"))


OUTSIDE = """() => [...document.querySelectorAll(".view:not([hidden]) svg text")].filter((text) => {
    const [box, frame] = [text, text.closest("svg")].map((each) => each.getBoundingClientRect());
    return box.width && (box.left < frame.left - 1 || box.right > frame.right + 1
        || box.top < frame.top - 1 || box.bottom > frame.bottom + 1);
}).map((text) => text.textContent)"""


class Watched:
    """What a page asked for and complained about."""

    def __init__(self, page: Page) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(dialog.message))


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """An empty page of a size that shows the list of tests beside the result."""
    with browser.new_context(viewport={"width": 1400, "height": 1000}) as context:
        page = context.new_page()
        page.set_default_timeout(10_000)
        yield page


def column(page: Page, title: str) -> list[str]:
    """The cells below a heading of the table of layers that is seen; whole names of layers."""
    table = page.locator(".view:not([hidden]) table.layers")
    titles = [
        text.strip(" \u25b4\u25be") for text in table.locator(":scope > thead th").all_inner_texts()
    ]
    cells = table.locator(":scope > tbody > tr:not(.details)").evaluate_all(
        """(rows, at) => rows.map(({ children }) =>
            children[at].querySelector(".layer")?.title ?? children[at].innerText)""",
        titles.index(title),
    )
    return list(map(str.strip, cells))


def heads(page: Page, anchor: str) -> list[str]:
    """The headings of the table of layers."""
    return page.locator(f"#{anchor} table.layers thead th").all_inner_texts()


def open_at(page: Page, address: str) -> None:
    """Open the page and wait for its layers."""
    page.goto(address)
    page.locator(".view:not([hidden]) table.layers tbody tr").first.wait_for()


def test_the_page_needs_nothing_but_itself(page: Page, address: str) -> None:
    """Every result is shown without another request, a word on the console or a failed chart."""
    watched = Watched(page)
    for anchor in ("t0-0", "t1-0", "t2-0"):
        open_at(page, f"{address}#{anchor}")
        page.locator(f"#{anchor} summary", has_text="Memory").or_(
            page.locator(f"#{anchor} summary").last
        ).first.click()
        page.locator(f"#{anchor} .more .chart").first.wait_for()
        assert "could not be drawn" not in page.inner_text("main")
        assert (page.locator(f"#{anchor} .evidence svg").count() > 0) == (anchor == "t1-0")
    assert watched.complaints == []
    assert set(watched.requests) == {address}
    # numbers are written in one way, by Python and by the script
    chance = random.Random(0)
    some = [chance.choice((1, -1)) * 10 ** chance.uniform(-9, 9) for _ in range(500)]
    for name, ours, values in (
        ("number", number, [*some, 0.0, 1.0, -100.0, 1e-3, 99999.0]),
        ("bytes", in_bytes, [0, 999, 1023, 1024, 10_239, *(int(abs(one)) for one in some)]),
        ("large", scaled, [0, 999, 1000, 9_999, 123_456_789]),
        ("percent", percent, [0, 0.001, 0.314, 0.995, 1]),
    ):
        told = page.evaluate(f"(all) => all.map(globalThis.page.text.{name})", values)
        assert told == [*map(ours, values)]


def test_failures_come_first_and_the_first_is_shown(page: Page, address: str) -> None:
    """The list begins with failing tests, the header counts the verdicts, a button dims it."""
    open_at(page, address)
    names = page.locator("#tests li a .name").all_text_contents()
    assert [name.partition(",")[0] for name in names[1:]] == [
        "test_dead", "test_refactor", "test_no_drift", "test_passes",
    ]  # fmt: skip
    assert page.inner_text(".run").startswith("1 unhealthy, 1 different, 1 drifted, 1 healthy")
    assert DEAD in page.inner_text(".view:not([hidden]) h2")
    # the table is open at the culprit, where the tensor that is meant is marked, and no other
    marked = page.locator(f'tr[data-layer="{DEAD}"] + tr.details th.meant')
    assert marked.all_inner_texts() == ["activations"]
    assert page.locator("tr.details").count() == 1
    assert page.locator("table.layers td.found").all_inner_texts() == ["100%"]
    surface = "getComputedStyle(document.documentElement).getPropertyValue('--surface')"
    before = page.evaluate(surface)
    page.get_by_role("button", name="theme").click()
    assert page.evaluate(surface) != before
    page.get_by_role("searchbox", name="Filter tests").fill("passes")
    page.get_by_role("link", name="test_passes").click()
    page.wait_for_url("**#t0-0*")
    page.locator("#t0-0:not([hidden])").wait_for()
    assert "no check objects" in page.inner_text(".view:not([hidden]) h2")


def test_what_headline_or_story_says_is_not_said_again() -> None:
    """A remark stands once, and the verdict once before what it rests on."""
    doubt = inspection(SMALL)
    reason = "4 samples say nothing about dead units"
    doubt["inconclusive"] = [{"label": "act", "check": "dead_units", "reason": reason}]
    doubt.update(verdict="inconclusive", headline=f"inconclusive: act (dead_units): {reason}")
    doubt["notes"] = ["a note of its own"]
    same = comparison(SMALL, "none")
    same.update(verdict="equivalent", text="", basis="rounding", notes=[])
    same["headline"] = "equivalent by rounding: Old computes what New does"
    text = html_of(run_of(made_test("test_net", doubt, same), made_test("test_dead", UNHEALTHY)))
    remarks = re.findall(r'<ul class="remarks">(.*?)</ul>', text, re.DOTALL)
    assert [re.findall("<li>(.*)</li>", one) for one in remarks] == [["a note of its own"]]
    assert '>equivalent</span></td><td class="found">by rounding: Old computes' in text
    line, cause = UNHEALTHY["headline"], UNHEALTHY["violations"][0]["message"]
    (view,) = re.findall(r'<section id="t1-0".*?</section>', text, re.DOTALL)
    assert line not in view
    assert (
        view.index(cause)
        < view.index("<p>likely cause: its bias")
        < view.index('<div class="evidence">')
    )


def rows_of(text: str) -> list[tuple[str, ...]]:
    """What the overview says of each test, headings too: name, outcome, verdict and its tone."""
    row = (
        r'<a href="#[^"]*">(.*?)</a>.*?<td.*?>(\w+)</td><td><span class="pill (\w+)">(.*?)</span>'
        r'|colspan="5">(.*?)</th>'
    )
    return [tuple(filter(None, one)) for one in re.findall(row, text)]


def test_a_failed_test_is_nowhere_healthy_and_causes_are_told_once() -> None:
    """Tests that fail by one cause stand together, first; what is expected to fail counts apart."""
    own = {"outcome": "failed", "message": "AssertionError: my own", "raised_at": "a.py:3"}
    tests = [
        made_test("test_own", PASSING) | own,
        made_test("test_dead[a b]", UNHEALTHY, outcome="failed") | {"replay": "pytest --from=x"},
        made_test("test_known", UNHEALTHY, outcome="xfailed"),
        made_test("test_other", UNHEALTHY, outcome="failed"),
        made_test("test_cured", PASSING, outcome="xpassed"),
        made_test("test_fine", PASSING),
    ]
    run = run_of(*tests)
    known = {"command": "pytest -x", "commit": "0123456789abcdef", "branch": "topic"}
    run.head["run"] = known | {"link": "https://ci.example/runs/7"}
    text = html_of(run)
    file = "tests/test_models.py"
    assert rows_of(text) == [
        (f"2 tests: {DEAD} (dead_units)",),
        (f"{file}::test_dead[a b]", "failed", "bad", "unhealthy"),
        (f"{file}::test_other", "failed", "bad", "unhealthy"),
        (file,),
        ("test_own", "failed", "bad", "failed"),
        ("test_own", "failed", "quiet", "no objection"),
        ("test_known", "xfailed", "quiet", "xfailed"),
        ("test_cured", "xpassed", "quiet", "xpassed"),
        ("test_fine", "passed", "good", "healthy"),
    ]
    (head,) = re.findall("<title>(.*) - modelhealth", text)
    assert head == "2 unhealthy, 1 failed, 1 healthy, 1 xfailed, 1 xpassed"
    (view,) = re.findall(r'<section id="t1-0".*?</section>', text, re.DOTALL)
    for move in (f"pytest '{file}::test_dead[a b]'", "pytest --from=x", f"{file}:12"):
        assert f"<dd><code>{html.escape(move).replace('&#x27;', '&#39;')}</code></dd>" in view
    assert ">0123456789</span> on topic" in text
    assert '<code class="code">pytest -x</code>' in text
    assert '<a href="https://ci.example/runs/7">' in text
    run.head["run"] = {"link": "javascript:window.harm=1"}
    assert "javascript:" not in html_of(run)


def test_layers_are_sorted_and_searched(page: Page, address: str) -> None:
    """By a number the largest comes first, then the least; a search keeps the rows it matches.

    Where all layers were observed there is no column that says so.
    """
    open_at(page, f"{address}#t0-0")
    assert any("status" in head for head in heads(page, "t0-0"))
    open_at(page, f"{address}#t1-0")
    assert not any("status" in head for head in heads(page, "t1-0"))
    stds = {
        layer["label"]: float(f"{tensor['std']:.4g}")
        for layer in UNHEALTHY["layers"]
        for tensor in layer["tensors"]
        if tensor["role"] == "activations"
    }
    ascending = sorted(stds, key=stds.__getitem__)
    descending = sorted(stds, key=lambda name: -stds[name])
    heading = page.locator("#t1-0 th[aria-sort]", has_text="std")
    for order, direction in ((descending, "descending"), (ascending, "ascending")):
        page.get_by_role("button", name="std").click()
        assert heading.get_attribute("aria-sort") == direction
        assert column(page, "layer") == order
    page.get_by_role("searchbox", name="Search layers").fill("LINEAR fc1")
    found = column(page, "layer")
    assert sorted(found) == sorted(name for name in NAMES if name.endswith("fc1"))
    page.get_by_role("button", name="Back to execution order").click()
    assert column(page, "layer") == [name for name in NAMES if name.endswith("fc1")]
    page.get_by_role("searchbox", name="Search layers").fill("dead_units")
    assert len(column(page, "layer")) == 1


def test_a_layer_shows_its_tensors_and_histograms(page: Page, address: str) -> None:
    """A link leads to a layer, whose tensors each have their values by size beside them."""
    name = DEAD.replace("gelu", "fc1")
    open_at(page, f"{address}#t1-0/{name}")
    bars = page.locator("tr.details").get_by_role("img", name="histogram of parameters weight")
    bars.wait_for()
    (layer,) = [layer for layer in UNHEALTHY["layers"] if layer["name"] == name]
    assert page.locator(f'tr[data-layer="{name}"] + tr .bins').count() == len(layer["tensors"])
    (tensor,) = [t for t in layer["tensors"] if (t["role"], t["name"]) == ("parameters", "weight")]
    told = bars.locator("i").evaluate_all("(all) => all.map((each) => each.title)")
    counts = [int(title.split()[0].replace(",", "")) for title in told]
    sides = tensor["bins"]
    zeros = [tensor["zeros"]] if tensor["zeros"] else [0]
    assert counts == [*sides["negative"][::-1], *zeros, *sides["positive"]]
    heights = bars.locator("i").evaluate_all("(all) => all.map((each) => each.offsetHeight)")
    assert heights.index(max(heights)) == counts.index(max(counts))


def test_a_mark_of_a_chart_leads_to_its_layer(page: Page, address: str) -> None:
    """What is clicked in a chart is opened in the table, also where it is folded, and again.

    A folded module hides what is in it, and says that something was found there.
    """
    open_at(page, address)
    page.get_by_role("button", name="layers in blocks.2", exact=True).click()
    assert len(column(page, "layer")) == sum(not n.startswith("blocks.2.") for n in NAMES)
    assert "1 inside" in page.inner_text('tr[data-layer="blocks.2"]')
    for _ in range(2):
        page.locator(f'#t1-0 .chart-depth a[href$="/{DEAD}"]').first.click()
        page.locator(f'tr[data-layer="{DEAD}"] + tr.details').wait_for()
        assert page.url.endswith(f"#t1-0/{DEAD}")
        page.locator(f'tr[data-layer="{DEAD}"] button.layer').click()


def test_the_style_of_the_page_leaves_charts_alone(page: Page, address: str) -> None:
    """No rule of the page gives a shape another size, and no text leaves the frame of its chart."""
    sizes = []
    for anchor in ("t0-0", "t1-0", "t2-0"):
        open_at(page, f"{address}#{anchor}")
        sizes += page.locator(f"#{anchor} svg rect[width]").evaluate_all(
            "(all) => all.map((each) => [each.getAttribute('width'), getComputedStyle(each).width])"
        )
        assert page.evaluate(OUTSIDE) == []
    assert len(sizes) > 50
    assert all(float(own) == pytest.approx(float(seen[:-2]), abs=0.01) for own, seen in sizes)


def test_the_keyboard_is_enough(page: Page, address: str) -> None:
    """From the skip link to a test, its table, a sorted column and an opened row."""
    open_at(page, address)
    focused = (
        "(document.activeElement.querySelector('.name') ?? document.activeElement).textContent"
    )

    def press_until(key: str, text: str, most: int = 200) -> None:
        for _ in range(most):
            page.keyboard.press(key)
            if page.evaluate(focused).partition(",")[0].strip() == text:
                return
        raise AssertionError(f"{text!r} is not reached by {key}")

    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "Skip to the result"
    press_until("Tab", "test_dead")
    press_until("ArrowDown", "test_passes")
    page.keyboard.press("Enter")
    page.locator("#t0-0 table.layers tbody tr").first.wait_for()
    assert page.evaluate("document.activeElement.id") == "t0-0"
    press_until("Tab", "std")
    page.keyboard.press("Enter")
    assert page.get_by_role("columnheader", name="std").get_attribute("aria-sort") == "descending"
    assert page.evaluate(focused).startswith("std")  # the focus stays
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.className") == "layer":
            break
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator("#t0-0 tr.details").count() == 1
    assert page.evaluate("document.activeElement.ariaExpanded") == "true"


def test_a_screen_reader_finds_names_and_roles(page: Page, address: str) -> None:
    """Landmarks, headings, the table with its headers and the charts have roles and names."""
    open_at(page, address)
    told = page.locator("body").aria_snapshot()
    for part in (
        'navigation "Tests"',
        "main",
        f'heading "unhealthy {DEAD} (dead_units)',
        'table "Layers"',
        'columnheader "std"',
        f'rowheader "{DEAD.rpartition(".")[2]} dead units"',
        "img ",
        'searchbox "Search layers"',
    ):
        assert part in told, part
    assert len(marks := page.evaluate(LANDMARKS)) == len(set(map(tuple, marks))) > 3, marks
    unnamed = page.evaluate(
        """[...document.querySelectorAll("button, a, input, summary")]
        .filter((each) => each.checkVisibility())
        .filter((each) => !(each.ariaLabel || each.textContent).trim()).length"""
    )
    assert unnamed == 0


LANDMARKS = """() => [...document.querySelectorAll("header, nav, main, section, [role=region]")]
    .filter((each) => each.checkVisibility()).map((each) => {
        const by = document.getElementById(each.getAttribute("aria-labelledby"));
        return [each.tagName, (each.ariaLabel ?? by?.textContent ?? each.innerText).trim()];
    })"""
"""Roles and names of what a screen reader jumps to: each has its own."""

INKS = {
    "surface": "ink muted accent accent2 alarm warn good",
    "panel": "ink muted alarm",
    "chosen": "ink muted",
    **{f"{tone}-soft": tone for tone in ("alarm", "warn", "good")},
}


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb``, as WCAG 2.2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_are_told_apart(theme: int) -> None:
    """Text has a contrast of 4.5 in both themes."""
    themes = re.findall(r":root[^{]*\{([^}]*--ink: #[^}]*)\}", html_of(run_of()))
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", themes[theme]))
    for ground, inks in INKS.items():
        for ink in inks.split():
            dark, light = sorted(luminance(colours[one]) for one in (ground, ink))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, ground)


def test_paper_and_a_narrow_screen(page: Page, address: str) -> None:
    """On paper every story and column is there; on a phone only frames are wider than it."""
    open_at(page, address)
    page.set_viewport_size({"width": 760, "height": 1000})
    page.emulate_media(media="print")
    assert page.locator(".story:visible").count() == 3
    ends = "(all) => all.map((each) => each.getBoundingClientRect().right)"
    assert max(page.locator("th:visible, td:visible").evaluate_all(ends)) <= 760
    assert page.locator(".overview thead:visible").count() == 1
    assert page.locator("#tests:visible, .tools:visible, button.theme:visible").count() == 0
    page.emulate_media(media="screen")
    page.set_viewport_size({"width": 360, "height": 780})
    for anchor in ("overview", "t0-0", "t1-0", "t2-0", "t3-0"):
        page.goto(f"{address}#{anchor}")
        page.locator("#" + anchor).wait_for()
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, anchor


def test_without_a_script_verdicts_and_stories_are_read(browser: Browser, address: str) -> None:
    """What was found is plain HTML."""
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(address)
        text = page.text_content("main") or ""
        assert page.locator(".story").first.is_visible()
        assert len(marks := page.evaluate(LANDMARKS)) == len(set(map(tuple, marks))) > 5, marks
        assert text.count("likely cause: its bias (mean -10) holds them on the flat side") == 1
        assert page.locator("a[href='#t0-0']").is_visible()
        assert page.locator("#t2-0 .chart-errors").is_visible()


HOSTILE = (
    "<script>window.harm=1</script>",
    "</script><script>window.harm=1</script>",
    "\"><img src=x onerror='window.harm=1'>",
    "<!--<script>",
    "]]>${window.harm=1}{{ 7*7 }}",
    "javascript:window.harm=1",
    "\u202eright\u2066to\u2028left\x00\x1b[31m",
    "\ud800",
)


def poisoned(value: Any, names: Iterator[str], fixed: frozenset[str]) -> Any:
    """`value` with a hostile string behind each string in it, but under keys that choose a view."""
    if isinstance(value, str):
        return f"{value}{next(names)}"
    if isinstance(value, list):
        return [poisoned(item, names, fixed) for item in value]
    if isinstance(value, dict):
        items = value.items()
        return {k: one if k in fixed else poisoned(one, names, fixed) for k, one in items}
    return value


def test_nothing_becomes_markup(page: Page, tmp_path: Path) -> None:
    """Names, messages and types full of markup run nothing, ask for nothing and are shown."""
    fixed = frozenset({"kind", "role", "layers"})
    tests = [poisoned(test, cycle(HOSTILE), fixed) | {"outcome": "failed"} for test in RUN.tests]
    address = saved(Run(poisoned(RUN.head, cycle(HOSTILE), frozenset()), tests), tmp_path)
    watched, shown = Watched(page), ""
    for anchor in ("t0-0", "t1-0", "t2-0", "t3-0", "overview"):
        page.goto(f"{address}#{anchor}")
        page.wait_for_timeout(300)
        for button in page.locator(".view:not([hidden]) button.layer").all()[:3]:
            button.click()
        closed = page.locator(".view:not([hidden]) .more > .panel > details:not([open]) summary")
        while closed.count():
            closed.first.click()
        assert page.evaluate(OUTSIDE) == []
        shown += page.inner_text("body")
    assert page.evaluate("window.harm") is None
    assert page.locator("img, iframe, object, a[href^=javascript]").count() == 0
    assert page.locator("script:not([type])").count() == 1
    assert set(watched.requests) == {address}
    assert watched.complaints == []
    assert "<script>window.harm=1</script>" in shown
    assert "\"><img src=x onerror='window.harm=1'>" in shown
    assert "\u202e" not in page.content()
    assert r"\u202eright\u2066to\u2028left\x00\x1b[31m" in shown


def test_the_browser_may_run_this_script_and_reach_nothing() -> None:
    """The policy names the script by its digest and allows no address at all."""
    text = html_of(RUN)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.strip().split(" ", 1) for rule in html.unescape(policy).split(";"))
    assert rules["default-src"] == "'none'"
    (script,) = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert not {"img-src", "connect-src", "font-src", "frame-src"} & rules.keys()
    markup = re.sub(r"<script.*?</script>|<style.*?</style>", "", text, flags=re.DOTALL)
    assert all(target.startswith("#") for target in re.findall(r'(?:src|href)="([^"]*)"', markup))
    assert text.isascii()


def test_ten_thousand_layers_are_used(page: Page, tmp_path: Path) -> None:
    """The page stays below its limit, draws few rows at once and finds every layer."""
    names = names_of(10_000)
    run = run_of(made_test("test_dead", inspection(names, "blocks.700.mlp.gelu"), outcome="failed"))
    address = saved(run, tmp_path)
    assert (tmp_path / "page.html").stat().st_size < LIMIT
    open_at(page, address)
    assert page.locator("table.layers tbody tr").count() < 1_000
    assert page.locator('tr[data-layer="blocks.700.mlp.gelu"]').is_visible()
    page.get_by_role("searchbox", name="Search layers").fill("blocks.7")
    expected = [name for name in names if "blocks.7" in name]
    assert f"{len(expected):,} of 10,000 layers found" in page.inner_text(".status")
    shown = column(page, "layer")
    assert shown == expected[: len(shown)]
    page.get_by_role("button", name="Show 300 more").click()
    assert len(column(page, "layer")) == min(len(shown) + 300, len(expected))


def test_failing_tests_get_the_room() -> None:
    """Where not all layers fit, those of failing tests are there, and the page says what is not."""
    passing = [made_test(f"test_{i}", inspection(names_of(60), seed=i)) for i in range(8)]
    failing = made_test(
        "test_dead", inspection(names_of(60), "blocks.0.mlp.gelu"), outcome="failed"
    )
    whole = len(html_of(run_of(*passing, failing)))
    limit = whole - 60_000
    text = html_of(run_of(*passing, failing), limit=limit)
    assert len(text) <= limit
    kept = re.findall(r"(t\d+)-0[ \"]", " ".join(re.findall('data-of="[^>]*', text)))
    assert kept[0] == "t8"
    assert 1 < len(kept) < 9
    assert all(f'href="#t{i}-0"' in text for i in range(9))


def test_a_link_opens_any_of_two_thousand_tests(page: Page, tmp_path: Path) -> None:
    """Their page has at most 3 MB; of a test whose numbers are not on it, it says so."""
    made = [inspection(names_of(6), seed=seed) for seed in range(100)]
    tests = [made_test(f"test_{at}", made[at % 100]) for at in range(2_000)]
    address = saved(run_of(*tests), tmp_path)
    assert (tmp_path / "page.html").stat().st_size <= 3_000_000
    open_at(page, f"{address}#t50-0")
    assert page.inner_text("#t50-0 .facts").startswith("Encoder")
    assert page.locator("#t50-0 .chart-depth").count() == 1
    page.goto(f"{address}#t1999-0")
    page.get_by_text("The layers of this result are not on the page").wait_for()
    assert "tests/test_models.py::test_1999" in page.inner_text("#t1999-0 .where")
    assert page.inner_text("#t1999-0 h2").startswith("healthy")


def test_numbers_left_out_are_told(page: Page, tmp_path: Path) -> None:
    """A result without its numbers says so in a sentence, with what to do."""
    (tmp_path / "page.html").write_text(html_of(RUN, limit=0), encoding="ascii")
    page.goto((tmp_path / "page.html").as_uri())
    page.get_by_text("The layers of this result are not on the page").first.wait_for()
    assert page.locator(".story:visible").count() == 1
