"""`python -m vllm_trie.trace answer.json search.html`: draw a search on a page."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from vllm_trie.trace.html_page import trace_page
from vllm_trie.trace.trace import Trace


def trace_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_trie.trace",
        description="Draw a beam search with trace=True as a single HTML page, which needs no network.",
    )
    parser.add_argument("answer", type=Path, help="a server's response as JSON, or the output of Trace.to_json")
    parser.add_argument("page", type=Path, help="the HTML file to write")
    parser.add_argument("--title", default="Beam search")
    return parser


def main() -> None:
    options = trace_parser().parse_args()
    try:
        page = trace_page(Trace.of(json.loads(options.answer.read_text("utf-8"))), options.title)
    except (OSError, ValueError) as error:
        sys.exit(f"{options.answer}: {error}")
    except (AttributeError, KeyError, IndexError, TypeError, RecursionError):
        sys.exit(f"{options.answer} is not an answer with a trace, or is damaged")
    try:
        options.page.write_text(page, "utf-8")
    except (OSError, ValueError) as error:
        sys.exit(f"{options.page}: {error}")


if __name__ == "__main__":
    main()
