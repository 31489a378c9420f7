"""Writes docs/reference/api.md from the docstrings of the public names.

Usage: ``python scripts/api_reference.py [--check]``; with --check, nothing is written and the exit
status says whether the page is what the docstrings say.
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

from griffe import GriffeLoader, Object, Parser
from griffe2md import ConfigDict, render_object_docs

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "api.md"
PACKAGE = "pytest_modelhealth"
INTRODUCTION = """\
# The public names

Made from their docstrings by `scripts/api_reference.py`: change those, and run it. All of it is
imported from `pytest_modelhealth`. The fixtures, markers and options of the pytest plugin are in
[the guide](../how-to/pytest.md) and in [the settings](settings.md).

"""
CONFIG: ConfigDict = {
    "docstring_section_style": "list",
    "filters": ["!^_"],
    "group_by_category": False,
    "heading_level": 2,
    "members_order": "source",
    "merge_init_into_class": True,
    "show_bases": False,
    "show_if_no_docstring": False,
    "show_object_full_path": False,
    "show_root_full_path": False,
    "signature_crossrefs": False,
    "summary": False,
}


def page() -> str:
    """Return the page as the docstrings have it now."""
    logging.getLogger("griffe").setLevel(logging.ERROR)  # of private classes' docstrings
    loader = GriffeLoader(
        search_paths=[ROOT],
        docstring_parser=Parser.google,
        docstring_options={"warn_unknown_params": False, "warn_missing_types": False},
    )
    package = loader.load(PACKAGE)
    loader.resolve_aliases()
    public = {
        name: one.final_target
        for name, one in package.members.items()
        if one.is_alias and one.target_path.startswith(f"{PACKAGE}.")
    }
    return INTRODUCTION + "\n".join(_entry(public[name]) for name in sorted(public))


def _entry(found: Object) -> str:
    text = render_object_docs(found, CONFIG)
    text = re.sub(r"\[([^\]\[]+)\]\(#[^)]*\)", r"\1", text)  # links to what is not on the page
    text = re.sub(r"<code>(.+?)</code>", r"`\1`", text)
    text = text.replace("```python\n", "```py\n")  # signatures, which are no code that runs
    text = re.sub(r"^(#+ `)[\w.]+\.(\w+\.\w+`)", r"\1\2", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def main(arguments: list[str]) -> int:
    """Write the page, or say whether it is as it should be."""
    made = page()
    if "--check" not in arguments:
        PAGE.write_text(made, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == made:
        return 0
    sys.stderr.write(f"{PAGE.relative_to(ROOT)} is not what the docstrings say: run {__file__}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
