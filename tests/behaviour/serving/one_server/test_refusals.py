"""What cannot be searched is a 400 that says why."""

from __future__ import annotations

from itertools import product
from typing import Any

import openai
import pytest

from benchmarks.server import Server
from tests.support.served import beams, complete

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (beams(0), "beam_width=0 is not a whole number of beams"),
        (beams(-1), "beam_width=-1 is not a whole number of beams"),
        (beams(2.5), "beam_width=2.5 is not a whole number of beams"),
        (beams("8"), "beam_width='8' is not a whole number of beams"),
        (beams("many"), "beam_width='many' is not a whole number of beams"),
        (beams(10**6), "beam_width=1000000 exceeds max_num_seqs=64; lower it, or raise --max-num-seqs"),
        ({"use_beam_search": True, "n": 65}, "use_beam_search with n=65 exceeds max_num_seqs=64; lower it, or raise"),
        ({"use_beam_search": True, "n": 2, **beams(65)}, "beam_width=65 exceeds max_num_seqs=64; lower it, or raise"),
        ({"use_beam_search": True, "prompt_logprobs": 1}, "prompt_logprobs=1 is not supported together with use_beam"),
        ({"use_beam_search": True, "min_tokens": 17}, "min_tokens must be less than or equal to max_tokens=16"),
        ({"use_beam_search": True, "vllm_xargs": {"foo": 1}}, "unknown option foo=1; known: beam_width, "),
        (
            {"use_beam_search": True, "length_penalty": 40.0},
            "length_penalty=40.0 is not a number above -40 and below 40; 1.0 compares means",
        ),
        (beams(4, num_beams=4), "unknown option num_beams=4; did you mean beam_width?"),
        (beams(4, beam_results=1, compact=1), "beam_results=True is not supported together with compact=True, which"),
        (beams(4, best_of=4), "unknown option best_of=4; beam_width is the number of beams, n the number of"),
        (
            {"use_beam_search": True, "vllm_xargs": {"diversity_penalty": 0.5}},
            "diversity_penalty=0.5 needs more than one group of beams; set num_beam_groups",
        ),
        (beams(4, n=2), "n=2 has no effect in vllm_xargs (extra_args); it is a field of the request"),
        (beams(4, catalog_name="items"), "unknown option catalog_name='items'; did you mean catalog"),
        (beams(4, foo=1), "unknown option foo=1; known: beam_width, "),
        ({"echo": True, "logprobs": 1, **beams(4)}, "logprobs=1 with echo=True asks for log-probabilities of"),
        ({"use_beam_search": True, "vllm_xargs": {"unit": "step"}}, 'unit="step" does not work with use_beam_search'),
        ({"use_beam_search": True, "best_of": 2}, "best_of=2; with use_beam_search, n is the number of beams"),
        ({"num_beams": 4, **beams(4)}, "unknown option num_beams=4; did you mean beam_width?"),
        ({"use_beam_search": True, "num_beams": 4}, "num_beams=4; with use_beam_search, n is the number of beams"),
        ({"use_beam_search": True, "early_stopping": True}, 'request; pass it in "vllm_xargs" with semantics="hf"'),
        ({"beam_width": 4}, 'beam_width=4 is not a field of a request; pass it in "vllm_xargs"'),
        ({"n": 5, **beams(4)}, "n=5 exceeds beam_width=4"),
        (beams(4, length_penalty="nan"), "length_penalty='nan' is not a number above -6 and below 6"),
        ({"use_beam_search": True, "length_penalty": "nan"}, "length_penalty=nan is not a number above -40"),
        ({"use_beam_search": True, "length_penalty": "Infinity"}, "length_penalty=inf is not a number"),
        ({"vllm_xargs": {"beam_widht": 4}}, "unknown option beam_widht=4; did you mean beam_width?"),
        ({"prompt": "", **beams(4)}, "prompt"),
        ({"prompt": [5] * 512, **beams(4)}, "max_tokens must be at least 1"),
        ({"prompt": [5] * 513, **beams(4)}, "maximum context length is 512"),
        ({"n": 2, "temperature": 0, **beams(4)}, "n must be 1 when using greedy sampling"),
        (
            {"length_penalty": 1.5, **beams(4, length_penalty=0.5)},
            "length_penalty=1.5 of the request is 0.5 in vllm_xargs; leave one of them out",
        ),
        ({"seed": 1, **beams(4)}, "seed=1 has no effect in a search that does not sample"),
        (
            {"response_format": {"type": "json_object"}, "ignore_eos": True, **beams(4)},
            "ignore_eos=True is not supported together with structured_outputs (over HTTP also response_format",
        ),
        ({"stream": True, **beams(65)}, "beam_width=65 exceeds max_num_seqs=64"),
        ({"stream": True, "use_beam_search": True, "n": 65}, "use_beam_search with n=65 exceeds max_num_seqs=64"),
    ],
)
def test_a_bad_request_is_a_400_that_names_the_option(server: Server, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        complete(server, **options)
    assert message in refusal.value.message
    assert server.gauge("vllm:num_requests_running") == 0


def test_several_chats_in_one_request_have_no_beams(server: Server) -> None:
    chats = {"model": "target", "messages": [[{"role": "user", "content": "x"}]] * 2, "max_tokens": 4}
    where = "/v1/chat/completions/batch"
    assert len(server.http.post(where, json=chats).json()["choices"]) == 2
    for asked in (beams(4), {"beam_width": 4}):
        refusal = server.http.post(where, json=chats | asked)
        assert refusal.status_code == 400
        why = "beam_width does not work at /v1/chat/completions/batch; send each chat to /v1/chat/completions"
        assert why in refusal.json()["error"]["message"]


def test_a_schema_that_vllm_refuses_is_a_400(server: Server) -> None:
    for options in (beams(3), {"use_beam_search": True}):
        with pytest.raises(openai.BadRequestError, match="regex"):
            complete(server, structured_outputs={"regex": "(["}, **options)


def test_our_own_marks_cannot_be_forged(server: Server) -> None:
    for mark, width in product(("trie_beam_ticket", "trie_beam_caller"), ({}, {"beam_width": 2})):
        with pytest.raises(openai.BadRequestError, match=f"{mark} is reserved for the front end"):
            complete(server, vllm_xargs={mark: "y", **width})
