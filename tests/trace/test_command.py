"""The command that draws a trace says in one sentence why it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.traces import random_trace
from vllm_trie.trace.__main__ import main

ANSWER = random_trace(2, 4).as_dict()
NONE = "answer.json is not an answer with a trace, or is damaged"


@pytest.mark.parametrize(
    ("answer", "page", "message"),
    [
        ("{", "page.html", "answer.json: Expecting property name"),
        ("{}", "page.html", "answer.json: this answer has no trace; ask for one with trace=True"),
        ("[]", "page.html", NONE),
        ('{"kv_transfer_params": "x"}', "page.html", NONE),
        (100_000 * "[", "page.html", NONE),
        (json.dumps({name: value for name, value in ANSWER.items() if name != "finished"}), "page.html", NONE),
        (json.dumps(ANSWER | {"forests": [3]}), "page.html", NONE),
        (json.dumps(ANSWER), "nowhere/page.html", "nowhere/page.html: [Errno 2] No such file"),
    ],
)
def test_what_cannot_be_drawn_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, page: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("answer.json").write_text(answer)
    monkeypatch.setattr("sys.argv", ["trace", "answer.json", page])
    with pytest.raises(SystemExit) as ended:
        main()
    assert str(ended.value.code).startswith(message)
