"""Tensor parallel beams over HTTP: the real command, the real client, two ranks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.server import Server, serving
from tests.support.engine import TRAINED_TARGET, Engines
from tests.support.parallel_engine import RANKS
from vllm_trie import beam_params

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PROMPT = "def is_prime(number):"
LEAVES_AFTER_SECONDS = 20


def complete(server: Server, **options: Any) -> Any:
    return server.client.completions.create(model="target", prompt=PROMPT, **options)


def test_a_server_of_two_ranks_answers_as_one_engine_and_ends_with_all_its_processes(
    engines: Engines, tmp_path: Path
) -> None:
    params = beam_params(4, n=3, max_tokens=24)
    (expected,) = engines(TRAINED_TARGET).llm.generate(PROMPT, params, use_tqdm=False)
    with serving(tmp_path / "log", "--plugin", "trie_beam", "--tensor-parallel-size", str(RANKS)) as server:
        found = complete(server, max_tokens=24, n=3, extra_body={"vllm_xargs": {"beam_width": 4}})
        assert [choice.text for choice in found.choices] == [one.text for one in expected.outputs]

        ends: list[str] = []

        # A stock `vllm serve`, too, may end its engine before that answers, and then waits for the client to leave.
        def search_until_the_server_ends() -> None:
            options = {"vllm_xargs": {"beam_width": 64}, "ignore_eos": True}
            while not ends or ends[-1] == "length":  # one may be over before the server has heard that it is to end
                try:
                    cut = complete(server, max_tokens=480, extra_body=options, timeout=LEAVES_AFTER_SECONDS)
                except openai.APIError:
                    ends.append("no answer")
                else:
                    ends.append(cut.choices[0].finish_reason)

        search = threading.Thread(target=search_until_the_server_ends)
        search.start()
        while not server.gauge("vllm:num_requests_running"):
            assert search.is_alive(), "the search was over before anyone saw it"
    search.join()
    assert ends[-1] in ("no answer", "abort")
