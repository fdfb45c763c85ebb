"""The real model, served by the command of the README to the client of the README."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server import Server, serving
from tests.support.documents import README_CLIENT, README_SERVES, is_as_shown, run_here
from tests.support.forks import Fork
from tests.support.reference import Answer, agree, transformers_beams_of_all

pytestmark = pytest.mark.slow

EOS = 2
WIDTH = 4
TOKENS = 24
NAME = "smollm2"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, real_model: Path) -> Iterator[Server]:
    command = [str(real_model) if word == "$MODEL" else word for word in README_SERVES]
    with serving(tmp_path_factory.mktemp("server") / "log", command=command, start=Fork) as server:
        yield server


def complete(server: Server, prompt: list[int], **options: Any) -> Any:
    own = {"vllm_xargs": {"beam_width": WIDTH}, "return_token_ids": True}
    return server.client.completions.create(
        model=NAME, prompt=prompt, max_tokens=TOKENS, extra_body=own, logprobs=1, **options
    )


def test_the_example_of_the_readme_runs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(README_CLIENT, **{"http://localhost:8000": server.url})
    printed = capsys.readouterr().out
    assert "Paris" in printed.splitlines()[0]
    assert is_as_shown(README_CLIENT, printed), printed


@pytest.mark.nightly
def test_served_beams_are_those_of_transformers(server: Server, real_model: Path, prompts: list[list[int]]) -> None:
    prompts = prompts[:3]
    answers_of_all = transformers_beams_of_all(real_model, prompts, WIDTH, WIDTH, TOKENS, eos_token_id=EOS)
    for prompt, theirs in zip(prompts, answers_of_all, strict=True):
        choices = complete(server, prompt, n=WIDTH).choices
        answers = [
            Answer(choice.token_ids, sum(choice.logprobs.token_logprobs) / len(choice.token_ids)) for choice in choices
        ]
        assert agree(answers, theirs)


@pytest.mark.nightly
def test_the_parts_of_a_stream_make_the_whole(server: Server, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        (whole,) = complete(server, prompt).choices
        parts = [part.choices[0] for part in complete(server, prompt, stream=True) if part.choices]
        assert "".join(part.text for part in parts) == whole.text
        assert [token for part in parts for token in part.token_ids or ()] == whole.token_ids
        assert parts[-1].finish_reason == whole.finish_reason
