"""Claims on how a difference is shown: short, in order, and with nothing of its names obeyed."""

from __future__ import annotations

import re

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from pytest_modelhealth.runs.difference.comparing import Difference, TestDifference, compare
from pytest_modelhealth.runs.difference.inspections import Change, Grade, Place
from pytest_modelhealth.runs.difference.writers import render
from tests.runs.difference import made

HOSTILE = [
    "@somebody",
    "a|b",
    "a\\|b",
    "a\\\\|b|",
    "`tick`",
    "``",
    "`",
    "<img src=x onerror=alert(1)>",
    "</details><h1>",
    "<!-- -->",
    "-->",
    "[a](http://x.y)",
    "http://x.y/z",
    "www.x.y",
    "mail@x.y",
    "*a* _b_ ~~c~~ **d**",
    "#12 GH-12 owner/repo#3 !4 ~label %1 $x$ :+1:",
    "a\nb\r\n\n# c",
    "| a |",
    "\u202etxt",
    "\x1b[31m",
    "&lt;b&gt; &#64;x",
    "$`a`$",
    "",
    " ",
]
"""Names that a comment must show and not obey."""


def hostile(text: str) -> Difference:
    """Return a difference that has `text` everywhere it can stand."""
    places = tuple(Place(text, text, text, text) for _ in range(3))
    changes = (Change("finding", "new finding", places, Grade.WORSE),)
    causes = (text,) if text else ()
    tests = tuple(TestDifference(f"{text}{end}", changes, causes, (text,)) for end in ("", "2"))
    return Difference(tests, 3, (text,))


def large(tests: int, layers: int) -> Difference:
    """Return a difference of so many tests, so many layers changed in each, with long names."""
    places = tuple(Place(f"{'layer|`' * 40}{i}", "`|" * 200, "x" * 500) for i in range(layers))
    return Difference(
        tuple(
            TestDifference(
                f"{'test_' * 60}[{i}]",
                tuple(Change("shape", f"output shape {n}", places) for n in range(i % 7 + 1)),
                causes=("|" * 5000 + str(i),),
                remarks=(f"{'@' * 1000}{i}",),
            )
            for i in range(tests)
        ),
        0,
    )


def tokens(text: str) -> list[Token]:
    """Return what a Markdown with tables makes of a text.

    Mentions, references and bare links are found in its text, and in no code.
    """
    parser = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    return [one for token in parser.parse(text) for one in (token, *(token.children or ()))]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_name_is_shown_and_obeyed_nowhere(text: str) -> None:
    """In Markdown all of it is code, and what a reader sees is the name, but for a bar.

    No HTML is there but our mark, and each row has its six cells. No escape reaches a terminal, and
    no name breaks a line.
    """
    markdown = tokens(render(hostile(text), "markdown"))
    kinds = [token.type for token in markdown]
    assert not {*kinds} & {"link_open", "image", "em_open", "heading_open", "s_open", "html_inline"}
    html = [token.content.strip() for token in markdown if token.type == "html_block"]
    assert html == ["<!-- pytest-modelhealth diff -->"]
    ours = "".join(token.content for token in markdown if token.type == "text")
    assert not re.search(r"[@#<>`$:|\[]", ours)
    cells, rows = kinds.count("th_open") + kinds.count("td_open"), kinds.count("tr_open")
    assert cells == 6 * rows
    assert rows == 1 + 2  # titles; both tests are alike; the second place stands for the third
    if text.strip() and text.isprintable():
        shown = [token.content for token in markdown if token.type == "code_inline"]
        assert {text, text.replace("\\|", "\\¦")} <= {*shown}
    plain = render(hostile(text), "terminal")
    assert all(letter.isprintable() or letter == "\n" for letter in plain)
    lines = len(render(hostile("x"), "terminal").splitlines())
    assert len(plain.splitlines()) == lines - (not text)


@pytest.mark.parametrize(("tests", "layers"), [(1, 10_000), (1000, 3), (40, 40)])
def test_a_comment_is_bounded(tests: int, layers: int) -> None:
    """However much changed, it is far below GitHub's 65,536 characters, and sound."""
    shown = render(large(tests, layers), "markdown")
    assert len(shown) < 40_000
    assert shown.count("<details>") == shown.count("</details>") == (tests > 1)
    assert ("--format terminal" in shown) == (tests > 1)  # which has what is left out
    first = shown.partition("\n")[0]
    assert first == f"**`modelhealth: {tests:,} test{'s' * (tests > 1)} changed; 0 unchanged`**"


def test_new_warnings_come_first() -> None:
    """Before findings and what moved, a cause once; another layer of an old warning is new."""
    warned = made.finding(message="is read by nothing")
    ids = ("t.py::a", "t.py::b")
    before = made.run(*(made.test(made.inspection(), id=one) for one in ids))
    now = made.run(*(made.test(made.inspection(warnings=[warned]), id=one) for one in ids))
    lines = render(compare(before, now), "markdown").splitlines()
    assert lines[2] == "- `since this change: 2 tests: fc1 (dead_units: is read by nothing)`"
    found = [made.finding(message=f"{n} of 9 units") for n in (4, 5)]
    worse = made.run(
        *(
            made.test(made.inspection(one, warnings=[warned]), id=name)
            for name, one in zip(ids, found, strict=True)
        )
    )
    lines = render(compare(before, worse), "markdown").splitlines()
    assert lines[2:4] == [
        "- `since this change: 2 tests: fc1 (dead_units: is read by nothing)`",
        "- `since this change: 2 tests: fc1 (dead_units: 4 of 9 units)`",
    ]
    more = [{**warned, "affected": ["fc2"]}]
    after = made.run(made.test(made.inspection(warnings=more), id=ids[0]))
    assert "`new warning`" in render(compare(now, after), "markdown")


def test_the_verdict_is_the_first_line() -> None:
    """With how many tests got worse, better, changed and stayed."""
    sides = [made.test(made.inspection()), made.test(made.inspection(made.finding()))]

    def named(name: str, *order: int) -> list[dict[str, object]]:
        return [{**sides[index], "id": name} for index in order]

    pairs = [named("a", 0, 1), named("b", 0, 1), named("c", 1, 0), named("d", 0, 0)]
    difference = compare(*(made.run(*side) for side in zip(*pairs, strict=True)))
    line = "modelhealth: 2 tests got worse, 1 test got better; 1 unchanged"
    assert render(difference, "terminal").splitlines()[0] == line
    assert render(difference, "markdown").splitlines()[0] == f"**`{line}`**"
    nothing = compare(made.run(sides[0]), made.run(sides[0]))
    assert render(nothing, "terminal") == "modelhealth: nothing changed in 1 test\n"
    assert render(nothing, "markdown").startswith("**`modelhealth: nothing changed in 1 test`**\n")
