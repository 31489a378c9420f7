"""What mkdocs calls while it builds the site: navigation, files beside docs/, external links.

- The navigation is the lists of docs/index.md, so that a page is listed in one place.
- Links that leave docs/, to an example or to CONTRIBUTING.md, lead to a page with that file.
- External links are not fetched: they are listed in external-links.txt of the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BESIDE = "beside"  # the folder of the site with files of the repository that lie outside docs/

_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
_EXTERNAL = re.compile(r"https?://[^\s)\"'<>`\]]+")
_ENTRY = re.compile(r"^- \[(.+?)\]\(([^)#]+)\)", re.MULTILINE)

_UNSEARCHED = "---\nsearch: {exclude: true}\n---\n\n"  # as code would come before what is written

_external: dict[str, set[str]] = {}
_outside: dict[Path, str] = {}


def on_config(config: MkDocsConfig) -> None:
    """Take the navigation from docs/index.md, and find what lies outside."""
    _external.clear()
    _outside.clear()
    pages = {page: page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md")}
    for page, text in pages.items():
        for target in _links(text):
            path = (page.parent / target).resolve()
            if path.exists() and not path.is_relative_to(DOCS):
                _add(path)
    config.nav = [{"Home": "index.md"}, *_nav(DOCS / "index.md")]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add a page for each file outside that is linked to."""
    for path, text in _outside.items():
        files.append(File.generated(config, _place(path), content=_UNSEARCHED + text))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links to files outside docs/ lead to their pages, and take down external ones."""
    here = page.file.src_uri
    for url in _EXTERNAL.findall(_CODE.sub("", markdown)):
        _external.setdefault(url.rstrip(".,"), set()).add(here)
    folder = _folder(here)

    def lead(link: re.Match[str]) -> str:
        before, target, anchor, after = link.groups(default="")
        if "://" in target or not (path := (folder / target).resolve()).exists():
            return link[0]
        if path.is_dir() and path.is_relative_to(DOCS):
            path = path / "README.md"
        place = _place(path)
        return f"{before}{posixpath.relpath(place, posixpath.dirname(here) or '.')}{anchor}{after}"

    return _outside_code(markdown, lambda text: _LINK.sub(lead, text))


def on_post_build(config: MkDocsConfig) -> None:
    """Write the list of external links, with the pages that have them."""
    lines = [f"{url}  {' '.join(sorted(pages))}\n" for url, pages in sorted(_external.items())]
    Path(config.site_dir, "external-links.txt").write_text("".join(lines), encoding="utf-8")


def _links(text: str) -> list[str]:
    return [m[2] for m in _LINK.finditer(_CODE.sub("", text)) if "://" not in m[2]]


def _outside_code(text: str, change: Any) -> str:
    """Return `text` with `change` made in what is no code."""
    parts, end = [], 0
    for code in _CODE.finditer(text):
        # a link whose words are code is a link: [`wiring`](...)
        if not code[0].startswith("```"):
            continue
        parts += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(text[end:])])


def _add(path: Path) -> None:
    """Make the page of a file outside docs/, or of a folder and the examples in it."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        if path not in _outside:
            there = sorted(path.glob("*.py"))
            lines = [f"- [{file.name}]({file.name}.md): {_story(file)}" for file in there]
            _outside[path] = "\n".join([f"# {name}/", "", *lines, ""])
            for file in there:
                _add(file)
    elif path.suffix == ".md":
        _outside[path] = path.read_text(encoding="utf-8")
    else:
        kind = path.suffix[1:] or "bash"
        text = path.read_text(encoding="utf-8")
        _outside[path] = f"# {path.name}\n\n`{name}`\n\n```{kind}\n{text}```\n"


def _story(file: Path) -> str:
    found = re.match(r'"""(.+?)(?:"""|\n\n)', file.read_text(encoding="utf-8"), re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def _place(path: Path) -> str:
    """Return where in the site the page of a file is."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"{BESIDE}/{name}/index.md"
    return f"{BESIDE}/{name}" if path.suffix == ".md" else f"{BESIDE}/{name}.md"


def _folder(place: str) -> Path:
    """Return the folder that the links of a page start from."""
    if place.startswith(f"{BESIDE}/"):
        return (ROOT / place.removeprefix(f"{BESIDE}/")).parent
    return (DOCS / place).parent


def _nav(index: Path) -> list[dict[str, Any]]:
    """Return the sections of an index page, each with the pages that its lists link to."""
    sections: list[dict[str, Any]] = []
    for part in re.split(r"^## ", index.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title = part.partition("\n")[0].partition(":")[0].strip()
        entries: list[Any] = []
        for name, target in _ENTRY.findall(part):
            entry = _entry(name.strip("`"), (index.parent / target).resolve())
            if entry not in entries:
                entries.append(entry)
        if entries:
            sections.append({title: entries})
    return sections


def _entry(name: str, path: Path) -> Any:
    if path.is_dir() and path.is_relative_to(DOCS):
        pages = sorted(path.glob("[0-9]*.md"))
        return {name: [_place(path / "README.md"), *(_place(page) for page in pages)]}
    if path.is_dir():
        files = sorted(path.glob("*.py"))
        return {name: [_place(path), *({file.name: _place(file)} for file in files)]}
    return {name: _place(path)}
