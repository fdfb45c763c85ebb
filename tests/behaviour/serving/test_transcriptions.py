"""Beams of transcriptions over HTTP: the real server, the real client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer
from vllm.multimodal.audio import split_audio

from benchmarks.server import Server, serving
from tests.support.audio import (
    ENGLISH,
    EOS,
    FIRST_TIMESTAMP,
    NO_TIMESTAMPS,
    PREVIOUS,
    SAMPLING_RATE,
    START,
    TIMESTAMPS_PER_SECOND,
    TRANSCRIBE,
    make_whisper,
    recording,
    start_hearing,
    transformers_answers,
    whispers_answer,
)
from tests.support.documents import TRANSCRIBES, Example, run_here
from tests.support.reference import Answer

pytestmark = pytest.mark.slow

MAX_TOKENS = 40
WIDTH = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"), TIMESTAMPS_PER_SECOND + 1, suppress_tokens=[START])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    command = ("vllm", "serve", str(model), "--served-model-name", "whisper", "--plugin", "trie_beam")
    limits = ["--max-model-len", "128", "--max-num-batched-tokens", "256", "--max-num-seqs", "16"]
    limits += ["--num-gpu-blocks-override", "24"]  # too few for long answers of 16 beams
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(log, *limits, command=command, start=start_hearing) as server:
        yield server


def transcribe(server: Server, seed: int, task: str = "transcribe", seconds: float = 1.0, **fields: Any) -> Any:
    """What the server answers at the endpoint of a task."""
    file = ("sound.wav", recording(seed, seconds)[0])
    fields = {"max_completion_tokens": MAX_TOKENS, **fields}
    xargs = fields.pop("vllm_xargs", None)
    extra = {"language": "en", **fields, **({} if xargs is None else {"vllm_xargs": json.dumps(xargs)})}
    endpoints = {"transcribe": server.client.audio.transcriptions, "translate": server.client.audio.translations}
    return endpoints[task].create(model="whisper", file=file, extra_body=extra)


def text_of(model: Path, answer: Answer) -> str:
    tokens = [token for token in answer.token_ids if token != EOS]
    return AutoTokenizer.from_pretrained(model).decode(tokens, skip_special_tokens=True)


def segments_of(model: Path, answer: Answer, seconds: float) -> list[tuple[float, float, str]]:
    """Start, end and text of all that timestamps enclose; what no timestamp ends, the end of the sound does."""
    found, start, said = list[tuple[float, float, str]](), 0.0, list[int]()
    for token in [*answer.token_ids, FIRST_TIMESTAMP + round(seconds * TIMESTAMPS_PER_SECOND)]:
        if token >= FIRST_TIMESTAMP:
            now = (token - FIRST_TIMESTAMP) / TIMESTAMPS_PER_SECOND
            if said:
                found.append((start, now, text_of(model, Answer(said, 0.0))))
            start, said = now, []
        elif token != EOS:
            said.append(token)
    return found


def num_searched(server: Server) -> float:
    return server.gauge("vllm:trie_beam_groups_finished_total")


@pytest.mark.parametrize("example", TRANSCRIBES, ids=str)
def test_an_example_of_a_client_runs(
    server: Server, example: Example, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "speech.wav").write_bytes(recording(7)[0])
    here = {"http://localhost:8000": server.url, "openai/whisper-small": "whisper"}
    run_here(example, **here, **{"speech.wav": str(tmp_path / "speech.wav")})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(("task", "seed"), [("transcribe", 0), ("transcribe", 3), ("translate", 2)])
def test_the_answer_is_transformers_best_hypothesis(server: Server, model: Path, task: str, seed: int) -> None:
    """By its rules, and both ways of asking for them."""
    before = num_searched(server)
    expected = text_of(model, whispers_answer(model, recording(seed)[1], WIDTH, MAX_TOKENS, task))
    as_vllm = transcribe(server, seed, task, use_beam_search=True, n=WIDTH)
    as_trie = transcribe(server, seed, task, vllm_xargs={"beam_width": WIDTH})
    assert as_vllm.text == as_trie.text == expected
    assert num_searched(server) == before + 2


def test_a_penalty_may_stand_in_either_place(server: Server) -> None:
    """The form has one in any case: its default."""
    options = {"use_beam_search": True, "n": WIDTH}
    as_option = transcribe(server, 3, **options, vllm_xargs={"length_penalty": 3.0})
    as_field = transcribe(server, 3, **options, length_penalty=3.0)
    assert as_option.text == as_field.text
    with pytest.raises(openai.BadRequestError, match=r"length_penalty=3\.0 of the request is 2\.0 in vllm_xargs"):
        transcribe(server, 3, **options, length_penalty=3.0, vllm_xargs={"length_penalty": 2.0})


def test_each_part_of_a_long_recording_is_searched(server: Server, model: Path) -> None:
    before, seconds = num_searched(server), 1.8
    parts = split_audio(recording(5, seconds)[1], SAMPLING_RATE, 1.0, 1.0, 1600)  # as vLLM cuts it
    assert len(parts) > 1
    expected = " ".join(text_of(model, whispers_answer(model, part, WIDTH, MAX_TOKENS)) for part in parts)
    as_vllm = transcribe(server, 5, seconds=seconds, use_beam_search=True, n=WIDTH)
    as_trie = transcribe(server, 5, seconds=seconds, vllm_xargs={"beam_width": WIDTH})
    assert as_vllm.text == as_trie.text == expected
    assert num_searched(server) == before + 2 * len(parts)


def test_a_streamed_transcription_is_the_same_text(server: Server) -> None:
    expected = transcribe(server, 0, vllm_xargs={"beam_width": WIDTH}).text
    fields = {"stream": "true", "language": "en", "max_completion_tokens": MAX_TOKENS}
    fields["vllm_xargs"] = json.dumps({"beam_width": WIDTH})
    url, files = "/v1/audio/transcriptions", {"file": ("sound.wav", recording(0)[0])}
    answer = server.http.post(url, data=fields, files=files).text
    events = [json.loads(line) for line in re.findall(r"^data: (\{.*)$", answer, re.MULTILINE)]
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == expected
    with pytest.raises(openai.BadRequestError, match="Streaming is not currently supported with beam search"):
        transcribe(server, 0, use_beam_search=True, n=WIDTH, stream=True)


def test_segments_are_those_of_transformers_best_hypothesis(server: Server, model: Path) -> None:
    """With its rules of timestamps."""
    seeds, num_segments = range(3), 0
    for seed in seeds:
        (best, *_) = transformers_answers(
            model,
            recording(seed)[1],
            WIDTH,
            MAX_TOKENS,
            [START, ENGLISH, TRANSCRIBE, FIRST_TIMESTAMP],
            has_rules_of_timestamps=True,
        )
        expected = segments_of(model, best, seconds=1.0)
        answer = transcribe(server, seed, response_format="verbose_json", vllm_xargs={"beam_width": WIDTH})
        assert [(round(one["start"], 2), round(one["end"], 2), one["text"]) for one in answer.segments] == expected
        num_segments += len(expected)
    assert num_segments > len(seeds)


def test_what_was_said_before_precedes_the_prompt_as_in_transformers(server: Server, model: Path) -> None:
    said = AutoTokenizer.from_pretrained(model).get_prompt_ids("ab ba", return_tensors="np").tolist()
    assert said[0] == PREVIOUS
    prompt = [*said, START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS]
    (best, *_) = transformers_answers(model, recording(3)[1], WIDTH, MAX_TOKENS, prompt)
    answer = transcribe(server, 3, prompt="ab ba", vllm_xargs={"beam_width": WIDTH})
    assert answer.text == text_of(model, best)
    assert answer.text != transcribe(server, 3, vllm_xargs={"beam_width": WIDTH}).text


@pytest.mark.nightly
def test_a_beam_of_one_is_what_vllm_transcribes_without(server: Server) -> None:
    before = num_searched(server)
    greedy = transcribe(server, 1)
    beam = transcribe(server, 1, use_beam_search=True, n=1)
    assert beam.text.startswith(greedy.text)  # where that ends, a beam may go on with the next best token
    assert num_searched(server) == before + 1
    assert "vLLM's own client loop" not in server.log.read_text()


def test_a_search_that_cannot_be_is_refused_in_one_sentence(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="use_beam_search with n=17 exceeds max_num_seqs=16"):
        transcribe(server, 1, use_beam_search=True, n=17)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="beam_width=17 exceeds max_num_seqs=16"):
            transcribe(server, 1, stream=stream, vllm_xargs={"beam_width": 17})


@pytest.mark.parametrize("width", [{"use_beam_search": True, "n": 16}, {"vllm_xargs": {"beam_width": 16}}], ids=str)
@pytest.mark.parametrize("seconds", [1, 3])
def test_a_search_that_fails_is_no_empty_text(server: Server, width: dict[str, Any], seconds: int) -> None:
    asked = "use_beam_search with n=16" if "n" in width else "beam_width=16"
    with pytest.raises(openai.InternalServerError, match=f"{asked} needs at least .* KV blocks after .* tokens"):
        transcribe(server, 3, seconds=seconds, max_completion_tokens=120, **width)
