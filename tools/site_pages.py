"""MkDocs hook: which files the site has.

The site has the repository's layout, so that the links of the documents lead to the same places there and on the forge.
Besides documents and their pictures it has what they link to.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("*.md", "docs/**/*.md", "examples/**/*.md")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    documents = [path for pattern in DOCUMENTS for path in sorted(ROOT.glob(pattern))]
    paths = dict.fromkeys([*documents, *(ROOT / style for style in config.extra_css)])
    for document in documents:
        linked = ((document.parent / link).resolve() for link in LINK.findall(document.read_text()))
        paths.update(dict.fromkeys(path for path in linked if path.is_file()))
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    pages = [File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)) for path in paths]
    return Files([*of_theme, *pages])
