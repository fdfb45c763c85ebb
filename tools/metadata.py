"""What a wheel says of where it comes from: hatchling's hook for metadata, see pyproject.toml.

A package index shows the README without the files that it links to. So where a release is built, RELEASE_HOME and
RELEASE_TAG say where its files are: links lead there, and the metadata has the addresses. Elsewhere the README stays
as it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE_LINK = re.compile(r"(!?\[[^\]]*\])\((?!https?:|#)([^)\s]+)\)")


class Metadata(MetadataHookInterface):
    """Fills in `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        text, urls = Path(self.root, "README.md").read_text(), {}
        if home := os.environ.get("RELEASE_HOME"):
            text = with_absolute_links(text, home, os.environ["RELEASE_TAG"])
            urls = {"Source": home, "Issues": f"{home}/issues", "Changelog": f"{home}/blob/main/CHANGELOG.md"}
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls


def with_absolute_links(text: str, home: str, revision: str) -> str:
    """The text with links to the files of one revision; pictures need the files themselves, not pages about them."""

    def absolute(link: re.Match[str]) -> str:
        label, path = link.groups()
        return f"{label}({home}/{'raw' if label.startswith('!') else 'blob'}/{revision}/{path})"

    return RELATIVE_LINK.sub(absolute, text)
