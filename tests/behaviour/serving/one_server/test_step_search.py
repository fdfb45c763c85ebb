"""Search by steps over HTTP: the real server, and a scorer that is an endpoint of the test."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from benchmarks.server import Server
from tests.support.engine import TRAINED_TARGET, Engines
from vllm_trie import beam_params

pytestmark = pytest.mark.slow


def ask(server: Server, xargs: dict[str, Any], timeout: float = 120, **fields: Any) -> httpx.Response:
    steps = {"beam_width": 2, "unit": "step", "step_stop": ["\n"], "scorer": "short", "max_steps": 4}
    body = {"model": "target", "max_tokens": 40, "n": 2, "seed": 3, "prompt": "def is_prime(number):"}
    body |= {"vllm_xargs": steps | xargs} | fields
    path = "chat/completions" if "messages" in body else "completions"
    body = {name: value for name, value in body.items() if value is not None}
    return server.http.post(f"/v1/{path}", json=body, timeout=timeout)


def test_a_client_gets_the_best_and_the_same_by_the_same_seed(server: Server) -> None:
    first, second = (ask(server, {}).json() for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    said = first["kv_transfer_params"]["trie_beam"]
    assert said["scores"] == [-len(text) for text in texts] == sorted(said["scores"], reverse=True)
    assert said["num_rounds"] <= 4
    server.wait_until_idle()


def test_chats_and_streams_work(server: Server) -> None:
    chat = ask(server, {}, messages=[{"role": "user", "content": "hi"}], prompt=None).json()
    assert [choice["index"] for choice in chat["choices"]] == [0, 1]
    streamed = ask(server, {}, stream=True).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert texts == [choice["text"] for choice in ask(server, {}).json()["choices"]]
    assert f'"text": {json.dumps(texts[0])}' in ask(server, {}, stream=True, n=1).text


CHANGING: list[dict[str, Any]] = [
    {},
    {"allot": "dvts"},
    {"allot": "rebase", "allot_temperature": 9.0},
    {"allot": "rebase", "allot_temperature": 1.0},
    {"allot": "rebase", "allot_temperature": 9.0, "prefer_shared": 2.0},
    {"order": "best"},
    {"order": "mcts", "exploration": 0.0},
    {"order": "mcts", "exploration": 90.0},
    {"lookahead": 4},
]
UNCHANGING = {"order": "best", "pool": 0}  # what is held, and not what is found


@pytest.mark.nightly
def test_options_do_what_they_do_offline(server: Server, engines: Engines, scorer_url: str) -> None:
    prompt, common = "def is_prime(number):", {"n": 2, "seed": 5, "max_tokens": 32}
    search = {"beam_width": 2, "unit": "step", "step_stop": ["\n"], "candidates": 3, "max_steps": 5}
    asked = [search | options for options in (*CHANGING, UNCHANGING)]
    params = [beam_params(**xargs, scorer=f"{scorer_url}/ahead", **common) for xargs in asked]
    answers = engines(TRAINED_TARGET).llm.generate([prompt] * len(asked), params, use_tqdm=False)
    with ThreadPoolExecutor() as clients:
        requests = [
            clients.submit(ask, server, xargs | {"scorer": "ahead"}, **common, prompt=prompt) for xargs in asked
        ]
        served = [[choice["text"] for choice in request.result().json()["choices"]] for request in requests]
    assert served == [[output.text for output in answer.outputs] for answer in answers]
    assert len({*map(tuple, served)}) == len(CHANGING), "an option changed nothing, so that it may be lost"


def test_several_prompts_are_refused_as_scores_are_told_of_one(server: Server) -> None:
    response = ask(server, {}, prompt=["x", "y"])
    assert response.status_code == 400
    why = 'unit="step" takes one prompt, and this request has 2; send each separately'
    assert response.json()["error"]["message"] == why
    assert ask(server, {}, prompt=["x"]).status_code == 200


def test_a_word_of_others_is_no_search(server: Server) -> None:
    body = {"model": "target", "prompt": "x", "max_tokens": 2, "vllm_xargs": {"unit": "step"}}
    assert server.http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("xargs", "status", "why"),
    [
        ({"scorer": "http://127.0.0.1/other"}, 400, "is not a scorer of this engine, which has: short, broken"),
        ({"allot": "fairly"}, 400, "allot='fairly' is unknown; known: 'even', 'rebase', 'dvts'"),
        ({"do_sample": 1}, 400, "do_sample=True is not supported together with unit="),
        ({"scorer": "broken"}, 500, "answered 500"),
    ],
)
def test_a_request_that_fails_says_why_and_the_server_goes_on(
    server: Server, xargs: dict[str, Any], status: int, why: str
) -> None:
    response = ask(server, xargs)
    assert response.status_code == status
    assert why in response.json()["error"]["message"]
    assert ask(server, {}).status_code == 200
    server.wait_until_idle()


def test_a_client_that_leaves_takes_its_candidates_along(server: Server) -> None:
    def leave(seconds: float, **xargs: Any) -> None:
        for _ in range(20):  # again where the search was over before that: it is a race, which a busy machine decides
            long: dict[str, Any] = {"max_tokens": 450, "ignore_eos": True}
            assert ask(server, {"beam_width": 8, **xargs}, seconds, **long).status_code == 200

    with pytest.raises(httpx.ReadTimeout):
        leave(0.7, step_stop=["no such line"])
    server.wait_until_idle()
    with pytest.raises(httpx.ReadTimeout):  # while blocks are held
        leave(1.5, max_steps=100)
    server.wait_until_idle()
