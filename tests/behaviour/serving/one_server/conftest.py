"""The server that the tests of this folder share, and one without the plugin."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.common import TARGET
from benchmarks.server import Server, serving
from tests.support.forks import Fork
from tests.support.served import NEWER, TITLES
from vllm_trie.catalog import Catalog, tokenizer_digest


class ShortIsGood(BaseHTTPRequestHandler):
    """Prefers short texts, at /ahead with what comes next; at /broken it answers with an error."""

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fields = ("text", "lookahead") if self.path == "/ahead" else ("text",)
        scores = [-sum(len(candidate[field]) for field in fields) for candidate in question["candidates"]]
        body = json.dumps({"scores": scores}).encode()
        self.send_response(500 if self.path == "/broken" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="package")
def scorer_url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), ShortIsGood)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Catalogs; one of them is loaded, as "lines"."""
    folder = tmp_path_factory.mktemp("catalogs")
    write(folder / "lines.catalog", TITLES)
    write(folder / "newer.catalog", NEWER)
    Catalog.from_sequences([[5, 6]], tokenizer="another one").save(folder / "foreign.catalog")
    (folder / "loop.catalog").symlink_to("loop.catalog")
    for name, ids in (("blocked", "0\n"), ("newer", "1\n2\n"), ("words", "a b")):
        (folder / f"{name}.txt").write_text(ids)
    return folder


def write(path: Path, titles: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    rows = tokenizer(titles, add_special_tokens=False)["input_ids"]
    Catalog.from_sequences(rows, tokenizer=tokenizer_digest(tokenizer)).save(path)


@pytest.fixture(scope="package")
def server(folder: Path, scorer_url: str) -> Iterator[Server]:
    """It has catalogs and scorers, looks for tool calls in what chats answer, and lets any page ask."""
    scorers = {"short": scorer_url, "broken": f"{scorer_url}/broken", "ahead": f"{scorer_url}/ahead"}
    catalogs = {"catalogs": {"lines": str(folder / "lines.catalog")}, "catalog_folder": str(folder)}
    catalogs |= {"exclude": {"blocked": str(folder / "blocked.txt")}}
    options = ["--plugin", "trie_beam", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    options += ["--enable-scale-out", "--allowed-origins", '["*"]']
    options += ["--additional-config", json.dumps({"trie_beam": {"scorers": scorers, **catalogs}})]
    with serving(folder / "log", *options) as server:
        yield server


@pytest.fixture(scope="package")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("stock") / "log", start=Fork) as server:
        yield server
