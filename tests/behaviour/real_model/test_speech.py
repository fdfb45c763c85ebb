"""Whisper base hears long recordings, silence and noise over HTTP; offline, half a minute as transformers does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from benchmarks.server import Server, serving
from benchmarks.whisper_base.speech import (
    RATE,
    SENTENCES,
    SPEAKER,
    as_wav,
    recording,
    say,
    speaker_is_here,
    word_error_rate,
)
from tests.support.audio import prompt_of, start_hearing, transformers_answers, whispers_answer
from tests.support.engine import Engines
from tests.support.reference import agree, engine_answers
from vllm_trie import beam_params

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(not speaker_is_here(), reason=f"{SPEAKER} is not installed"),
]

WIDTH = 5
LIMITS = {"max_model_len": 448, "max_num_batched_tokens": 2048}  # the encoder makes 1500 tokens of 30 s


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, speech_model: Path) -> Iterator[Server]:
    command = ("vllm", "serve", str(speech_model), "--served-model-name", "whisper", "--plugin", "trie_beam")
    limits = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(log, *limits, command=command, start=start_hearing) as server:
        yield server


def transcribe(server: Server, sound: np.ndarray, **fields: Any) -> Any:
    xargs = json.dumps({"beam_width": WIDTH})
    return server.client.audio.transcriptions.create(
        model="whisper", file=("sound.wav", as_wav(sound)), extra_body={"language": "en", "vllm_xargs": xargs, **fields}
    )


def test_a_minute_of_speech_is_heard_from_beginning_to_end(server: Server) -> None:
    clip = recording()
    seconds = len(clip.sound) / RATE
    assert seconds > 30, "it is heard in one part"
    answer = transcribe(server, clip.sound, response_format="verbose_json")
    assert word_error_rate([answer.text], [clip.text]) < 0.2
    times = [time for segment in answer.segments for time in (segment["start"], segment["end"])]
    assert times == sorted(times)
    assert times[0] < 1
    assert seconds - 2 < times[-1] <= seconds
    assert word_error_rate([transcribe(server, clip.sound).text], [clip.text]) < 0.2


@pytest.mark.parametrize("loudness", [0.0, 0.01], ids=["silence", "noise"])
def test_where_nobody_speaks_the_answer_is_transformers(server: Server, speech_model: Path, loudness: float) -> None:
    """Which may repeat itself up to the limit."""
    sound, limit = np.random.default_rng(0).normal(0, loudness, 5 * RATE).astype(np.float32), 24
    heard = (sound.clip(-1, 1) * 32767).astype("<i2").astype(np.float32) / 32768  # as the server reads it
    best = whispers_answer(speech_model, heard, WIDTH, limit)
    expected = AutoTokenizer.from_pretrained(speech_model).decode(best.token_ids, skip_special_tokens=True)
    assert transcribe(server, sound, max_completion_tokens=limit).text == expected
    verbose = transcribe(server, sound, max_completion_tokens=limit, response_format="verbose_json")
    assert isinstance(verbose.segments, list)


@pytest.mark.parametrize("said_before", ["", " The bridge was repaired in nine days."], ids=["first", "continued"])
def test_half_a_minute_is_heard_as_by_transformers(engines: Engines, speech_model: Path, said_before: str) -> None:
    sound = say(" ".join(SENTENCES["en"][:4]), "en")
    assert 20 * RATE < len(sound) <= 30 * RATE
    engine = engines(speech_model, **LIMITS)
    tokenizer, max_tokens = engine.llm.get_tokenizer(), 128
    marks = ["<|startofprev|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
    previous, *prompt = tokenizer.convert_tokens_to_ids(marks)
    if said_before:
        prompt = [previous, *tokenizer.encode(said_before, add_special_tokens=False), *prompt]
    params = beam_params(WIDTH, n=WIDTH, max_tokens=max_tokens)
    (output,) = engine.llm.generate([prompt_of(sound, prompt)], params, use_tqdm=False)
    assert output.prompt_token_ids == prompt
    assert agree(engine_answers(output, 1.0), transformers_answers(speech_model, sound, WIDTH, max_tokens, prompt))
