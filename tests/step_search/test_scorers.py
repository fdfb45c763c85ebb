"""Scorers of steps that are endpoints, those of vLLM's own format among them."""

from __future__ import annotations

import asyncio
import copy
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from vllm_trie.options import EngineOptions
from vllm_trie.step_search.scorers import HttpStepScorer, StepCandidate, step_scorer_of
from vllm_trie.step_search.scores import ScorerError

CANDIDATES = [
    StepCandidate("2+2?", ("a\n", "b"), (5, 6, 7), (0.5,), is_finished=True),
    StepCandidate("2+2?", ("c\n",), (8,), (), is_finished=False, lookahead="d\ne"),
]


@pytest.fixture
def endpoint() -> Iterator[Callable[..., Any]]:
    """`endpoint(path, answer, status)` gives the URL of an endpoint that answers so, and the questions that it gets."""
    servers = []

    def serve(path: str, answer: Any, status: int = 200) -> tuple[str, list[Any]]:
        questions = list[Any]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == path
                questions.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}{path}", questions

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def both_ways(url: str) -> list[list[Any]]:
    scorer = HttpStepScorer(url)
    return [scorer(CANDIDATES), asyncio.run(scorer.ask(CANDIDATES))]


def test_an_endpoint_is_told_all_of_the_candidates(endpoint: Callable[..., Any]) -> None:
    url, questions = endpoint("/prm", {"scores": [1.5, -2]})
    assert both_ways(url) == [[1.5, -2]] * 2
    first, second = questions[0]["candidates"]
    assert first == {
        **{"prompt": "2+2?", "steps": ["a\n", "b"], "text": "a\nb"},
        **{"token_ids": [5, 6, 7], "scores": [0.5], "is_finished": True, "lookahead": ""},
    }
    assert (second["text"], second["lookahead"]) == ("c\n", "d\ne")
    assert questions[0] == questions[1]


def test_a_question_is_built_without_copies_and_encoded_beside_the_loop(
    endpoint: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, questions = endpoint("/prm", {"scores": [1.5, -2]})
    threads, question = list[threading.Thread](), HttpStepScorer.question

    def noted_question(scorer: HttpStepScorer, candidates: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return question(scorer, candidates)

    monkeypatch.setattr(copy, "deepcopy", None)
    monkeypatch.setattr(HttpStepScorer, "question", noted_question)
    assert both_ways(url) == [[1.5, -2]] * 2
    assert questions[0] == questions[1]
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


def test_certificates_are_read_once(endpoint: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    url, _ = endpoint("/prm", {"scores": [1.5, -2]})
    both_ways(url)
    monkeypatch.setattr(ssl, "create_default_context", None)
    assert both_ways(url) == [[1.5, -2]] * 2


@pytest.mark.parametrize(
    ("path", "asked", "data"),
    [
        ("/classify", {"input": ["2+2?a\nb", "2+2?c\nd\ne"]}, [{"probs": [0.2, 0.8]}, {"probs": [0.7, 0.3]}]),
        ("/pooling", {"input": ["2+2?a\nb", "2+2?c\nd\ne"]}, [{"data": [[0.9], [0.8]]}, {"data": [0.3]}]),
        (
            "/v1/score",
            {"text_1": ["2+2?", "2+2?"], "text_2": ["a\nb", "c\nd\ne"]},
            [{"score": 0.8}, {"score": 0.3}],
        ),
    ],
)
def test_vllms_endpoints_are_asked_in_their_format(
    endpoint: Callable[..., Any], path: str, asked: Any, data: list[dict[str, Any]]
) -> None:
    out_of_order = [{"index": index, **data[index]} for index in (1, 0)]
    url, questions = endpoint(path, {"object": "list", "data": out_of_order})
    assert both_ways(url) == [[0.8, 0.3]] * 2
    assert questions == [asked] * 2


def test_the_formats_are_vllms_own() -> None:
    from pydantic import TypeAdapter
    from vllm.entrypoints.pooling.classify.protocol import ClassificationRequest
    from vllm.entrypoints.pooling.pooling.protocol import PoolingRequest
    from vllm.entrypoints.pooling.scoring.protocol import ScoreRequest

    for path, kind in (("classify", ClassificationRequest), ("pooling", PoolingRequest), ("score", ScoreRequest)):
        question = HttpStepScorer(f"http://host/{path}").question(CANDIDATES)
        parsed = TypeAdapter(kind).validate_python(question)
        assert not parsed.model_extra, path
        assert {name: getattr(parsed, name) for name in question} == question


@pytest.mark.parametrize(
    ("answer", "status", "why"),
    [
        ({"error": "no such model"}, 404, 'answered 404: {"error": "no such model"}'),
        ({"values": [1, 2]}, 200, "answered without scores: KeyError: 'scores'"),
        (b"<html>", 200, "answered without scores: JSONDecodeError"),
    ],
)
def test_an_endpoint_that_fails_says_how(endpoint: Callable[..., Any], answer: Any, status: int, why: str) -> None:
    url, _ = endpoint("/prm", answer, status)
    with pytest.raises(ScorerError, match=why):
        HttpStepScorer(url)(CANDIDATES)
    with pytest.raises(ScorerError, match=why):
        asyncio.run(HttpStepScorer(url).ask(CANDIDATES))


def test_an_endpoint_that_is_not_there_is_named() -> None:
    for ask in (lambda scorer: scorer(CANDIDATES), lambda scorer: asyncio.run(scorer.ask(CANDIDATES))):
        with pytest.raises(ScorerError, match=r"the scorer at http://127.0.0.1:9/prm cannot be reached"):
            ask(HttpStepScorer("http://127.0.0.1:9/prm"))


def test_clients_hear_no_more_of_an_engines_scorer_than_its_name(endpoint: Callable[..., Any]) -> None:
    url, _ = endpoint("/prm", {"error": "secret"}, 500)
    more = "; the log of the engine's front end has details"
    wrong = ("http://me:secret@127.0.0.1:9/prm", "http://host:abc/x", "http://[::1")
    for where, why in ((url, "answered 500"), *((where, "cannot be reached") for where in wrong)):
        scorer = HttpStepScorer(where, "prm")
        for ask in (scorer, lambda candidates, scorer=scorer: asyncio.run(scorer.ask(candidates))):
            with pytest.raises(ScorerError) as failed:
                ask(CANDIDATES)
            assert str(failed.value) == f"the scorer 'prm' {why}{more}"


def test_a_client_can_name_the_engines_scorers_alone() -> None:
    known = EngineOptions(scorers={"prm": "http://host/prm"}).scorers
    assert step_scorer_of("prm", known, is_offline=False) == HttpStepScorer("http://host/prm", "prm")
    assert step_scorer_of("http://other/prm", known, is_offline=True) == HttpStepScorer("http://other/prm")
    with pytest.raises(ValueError, match="scorer='http://other/prm' is not a scorer of this engine, which has: prm"):
        step_scorer_of("http://other/prm", known, is_offline=False)


@pytest.mark.parametrize(
    "scorers",
    [
        *({"prm": "file:///etc/passwd"}, {"prm": 3}, ["http://host"], {"prm": "host:80"}),
        *({"prm": "http://host:abc/x"}, {"prm": "http://[::1"}, {"prm": "http:///x"}, {"prm": "http://host:70000"}),
    ],
)
def test_an_engines_scorers_are_urls(scorers: Any) -> None:
    with pytest.raises(ValueError, match=r"scorers=.* is not a mapping of names to URLs"):
        EngineOptions(scorers=scorers)
