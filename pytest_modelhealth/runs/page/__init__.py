"""A run as a page: one HTML file that needs no network, and no mouse.

What the tests found stands in it as plain HTML and SVG, which is read without a script, aloud and
on paper. The numbers of the layers are packed, a block a result, and unpacked by ``scripts/`` where
someone opens it, as are the charts of results for which there is no room as they are.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any, TextIO

from markupsafe import Markup

from pytest_modelhealth.rendering.charts.svg import STYLE as CHARTS
from pytest_modelhealth.rendering.document import templates
from pytest_modelhealth.runs.page.blocks import blocks
from pytest_modelhealth.runs.page.contents import contents
from pytest_modelhealth.runs.run import Run

# bytes of a page, and those after which the layers of no further test that passed are written
LIMIT, COMMON = 10_000_000, 2_900_000
# in the order in which they are joined
SCRIPTS = ("dom", "packed", "table", "inspection", "comparison", "start")

_FOLDER = Path(__file__).parent


def write(run: Run, file: TextIO, limit: int = LIMIT) -> None:
    """Write the page, in ASCII; one test at a time is in memory with its layers.

    What tests found is written in any case, numbers of layers where there is room in `limit` bytes:
    those of failing tests first.
    """
    shown = contents(run)
    paths = [_FOLDER / "scripts" / f"{name}.js" for name in SCRIPTS]
    script = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    script = script.encode("ascii", "backslashreplace").decode("ascii")  # of letters in strings
    digest = base64.b64encode(hashlib.sha256(script.encode("ascii")).digest()).decode("ascii")
    policy = (  # the browser may run this one script, and reach nothing
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )
    style = "".join(sheet.read_text(encoding="ascii") for sheet in (CHARTS, _FOLDER / "page.css"))
    before = _html("before.html", shown=shown, style=Markup(style), policy=Markup(policy))
    after = _html("after.html", script=Markup(script))
    results = [result for entry in shown["entries"] for result in entry["results"]]
    drawn = {result["anchor"] for result in results if result["is_drawn"]}
    rest = len(before) + len(after)
    file.write(before)
    file.writelines(blocks(run, drawn, limit - rest, COMMON - rest))
    file.write(after)


def _html(template: str, **values: Any) -> str:
    """Return HTML in ASCII, in which everything is escaped that is no markup of ours."""
    html: str = templates(_FOLDER / "templates").get_template(template).render(values)
    return html.encode("ascii", "xmlcharrefreplace").decode("ascii")
