"""Catalogs over HTTP: requests name them, a running server takes new versions, /metrics counts them."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from transformers import AutoTokenizer

from benchmarks.common import TARGET
from benchmarks.server import Server
from tests.support.served import NEWER, TITLES
from vllm_trie.engine.catalog_exclusion import item_list_digest

pytestmark = pytest.mark.slow

JSON = {"Content-Type": "application/json"}

PROMPT = "def close(self):\n    "


def complete(server: Server, n: int, **xargs: Any) -> list[str]:
    extra_body = {"vllm_xargs": {"beam_width": 8, **xargs}}
    answer = server.client.completions.create(model="target", prompt=PROMPT, max_tokens=16, n=n, extra_body=extra_body)
    return [choice.text for choice in answer.choices]


def load(server: Server, name: str, **body: Any) -> httpx.Response:
    return server.http.post(f"/v1/catalogs/{name}", json=body)


def test_hypotheses_are_items_and_requests_may_bring_their_own(server: Server) -> None:
    assert sorted(complete(server, 5, catalog="lines")) == sorted(TITLES)
    assert sorted(complete(server, 3, allowed_sequences=NEWER)) == sorted(NEWER)
    tokens = AutoTokenizer.from_pretrained(TARGET)(NEWER, add_special_tokens=False)["input_ids"]
    assert sorted(complete(server, 3, allowed_sequences=json.dumps(tokens))) == sorted(NEWER)
    body = {"use_beam_search": True, "vllm_xargs": {"catalog": "lines"}}
    answer = server.client.completions.create(model="target", prompt=PROMPT, max_tokens=16, n=5, extra_body=body)
    assert sorted(choice.text for choice in answer.choices) == sorted(TITLES)
    item_ids = answer.kv_transfer_params["trie_beam"]["item_ids"]
    assert [TITLES[own_id] for own_id in item_ids] == [choice.text for choice in answer.choices]


def test_what_is_wrong_is_a_400_that_says_what_would_work(server: Server) -> None:
    for xargs, why in (
        ({"catalog": "books"}, "catalog='books' is unknown; known: lines"),
        ({"catalog": "lines", "allowed_sequences": ["x"]}, "is not supported together with catalog="),
        ({"catalog": "lines", "catalog_after": "two words"}, "pass text that is one token"),
        ({"catalog": "lines", "catalog_after": "</s>"}, "catalog_after='</s>' is a stop token"),
        ({"allowed_sequences": "[[1, 2"}, "is not a list of 1 to 100,000 strings"),
        ({"allowed_sequences": "[" * 100_000}, "is not a list of 1 to 100,000 strings"),
    ):
        with pytest.raises(openai.BadRequestError, match=re.escape(why)):
            complete(server, 1, **xargs)


def test_a_list_of_items_is_excluded_and_replaced(server: Server) -> None:
    def without(*gone: int) -> list[str]:
        return sorted(title for at, title in enumerate(TITLES) if at not in gone)

    def replace(name: str, file: str) -> httpx.Response:
        return server.http.post(f"/v1/exclude/{name}", json={"file": file})

    (at_start,) = server.http.get("/v1/exclude").json()
    assert at_start == {"name": "blocked", "items": 1, "digest": item_list_digest(np.array([0]))}
    assert sorted(filter(None, complete(server, 5, catalog="lines", exclude_list="blocked"))) == without(0)
    for name, file, why in (
        ("books", "newer.txt", "exclude_list='books' is unknown; known: blocked"),
        ("blocked", "../log", "is not in trie_beam.catalog_folder"),
        ("blocked", "words.txt", "line 1: "),
        ("blocked", "none.txt", "cannot be read"),
    ):
        refusal = replace(name, file)
        assert (refusal.status_code, why in refusal.text) == (400, True), refusal.text
    try:
        reply = replace("blocked", "newer.txt").json()
        assert (reply["items"], reply["digest"]) == (2, item_list_digest(np.array([1, 2])))
        assert server.http.get("/v1/exclude").json() == [reply]
        found = complete(server, 5, catalog="lines", exclude_list="blocked", exclude_items="[3]")
        assert sorted(filter(None, found)) == without(1, 2, 3)
    finally:
        replace("blocked", "blocked.txt")


def test_half_a_character_is_refused(server: Server) -> None:
    for name, xargs in (
        ("catalog_after", {"catalog": "lines", "catalog_after": "\ud800"}),
        ("allowed_sequences", {"allowed_sequences": ["x", "\ud800"]}),
        ("allowed_sequences", {"allowed_sequences": '["\\ud800"]'}),
    ):
        body = {"model": "target", "prompt": PROMPT, "vllm_xargs": {"beam_width": 2, **xargs}}
        refusal = server.http.post("/v1/completions", content=json.dumps(body), headers=JSON)  # in escapes
        assert refusal.status_code == 400
        assert f"{name} has half of a surrogate pair, " in refusal.text


def test_a_new_version_is_taken_and_counted(server: Server) -> None:
    complete(server, 1, catalog="lines")
    loads = server.gauge("vllm:trie_beam_catalog_loads_total")
    for file, why in (
        ("../log", "is not in trie_beam.catalog_folder"),
        ("log", "log"),
        ("foreign.catalog", "was built for another vocabulary"),
        ("none.catalog", "cannot be read"),
        ("loop.catalog", "cannot be read"),
        ("a\0b", "cannot be read"),
    ):
        refusal = load(server, "lines", file=file)
        assert (refusal.status_code, why in refusal.text) == (400, True), refusal.text
    assert load(server, "books", file="newer.catalog").status_code == 400
    assert load(server, "lines", path="newer.catalog").status_code in (400, 422)  # vLLM's own answer to a wrong body
    try:
        reply = load(server, "lines", file="newer.catalog").json()
        assert reply["items"] == len(NEWER)
        assert server.http.get("/v1/catalogs").json() == [reply]
        assert sorted(complete(server, 3, catalog="lines")) == sorted(NEWER)
        assert server.gauge("vllm:trie_beam_catalog_loads_total") == loads + 1
        assert server.gauge("vllm:trie_beam_catalog_bytes") > 0
    finally:
        assert load(server, "lines", file="lines.catalog").status_code == 200
    assert sorted(complete(server, 5, catalog="lines")) == sorted(TITLES)
