"""Gives package indexes the README without its relative links, which lead nowhere there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # rewriting text needs no hatchling
    MetadataHookInterface = object

_CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)\s]+)\)")


def without_relative_links(text: str) -> str:
    """Return `text` with ``[Guide](docs/guide.md)`` as ``Guide (docs/guide.md)``."""
    parts = _CODE.split(text)  # prose and code take turns
    parts[::2] = [_LINK.sub(lambda link: _plain(*link.groups()), prose) for prose in parts[::2]]
    return "".join(parts)


def _plain(name: str, target: str) -> str:
    return f"`{name}`" if target.startswith(name.rstrip("/")) else f"{name} (`{target}`)"


class ReadmeHook(MetadataHookInterface):
    """Sets the field ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the text of README.md."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        plain = without_relative_links(text)
        metadata["readme"] = {"content-type": "text/markdown", "text": plain}
