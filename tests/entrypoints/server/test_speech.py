"""Answers to transcriptions by beams have all their segments, and what was said before is marked as Whisper's own."""

from __future__ import annotations

import asyncio
import inspect
import io
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from fastapi import UploadFile
from transformers import AutoTokenizer
from vllm.entrypoints.speech_to_text.base.serving import SpeechToTextBaseServing
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest, TranscriptionSegment
from vllm.logprobs import Logprob

from tests.support.audio import ENGLISH, EOS, FIRST_TIMESTAMP, PROMPT, make_whisper
from vllm_trie.entrypoints.server import speech

STOCK = inspect.unwrap(SpeechToTextBaseServing._get_verbose_segments)
PREVIOUS = 300


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(make_whisper(tmp_path_factory.mktemp("whisper")))


def at(seconds: float) -> int:
    return FIRST_TIMESTAMP + round(seconds * 50)


def request(**fields: Any) -> TranscriptionRequest:
    return TranscriptionRequest(file=UploadFile(io.BytesIO()), language="en", **fields)


def segments(asked: TranscriptionRequest, *tokens: int, start: float = 0.0) -> list[tuple[float, ...]]:
    speech._ends.set({0.0: 9.0, 30.0: 34.0})
    log_probs = [{token: Logprob(-1.0)} for token in tokens]
    of_part = tokens, log_probs, asked, TranscriptionSegment, start
    found = speech.get_all_segments.function(STOCK, SimpleNamespace(tokenizer=Marking()), *of_part)
    return [(one.start, one.end, one.text.split()) for one in found]


BEAMS = {"use_beam_search": True}, {"vllm_xargs": {"beam_width": 4}}


@pytest.mark.parametrize("fields", BEAMS, ids=str)
def test_an_empty_answer_has_no_segments(fields: dict[str, Any]) -> None:
    assert segments(request(**fields), EOS) == []
    assert segments(request(**fields)) == []
    with pytest.raises(IndexError):  # of an ordinary request it is vLLM's
        segments(request(), EOS)


@pytest.mark.parametrize("ends", [(), (EOS,)])
def test_text_that_names_no_end_ends_with_its_part_of_the_recording(ends: tuple[int, ...]) -> None:
    asked = request(use_beam_search=True)
    assert segments(asked, 5, 6, *ends) == [(0.0, 9.0, ["w5", "w6"])]
    both = 5, at(2), at(3), 6, 7
    assert segments(asked, *both, *ends) == [(0.0, 2.0, ["w5"]), (3.0, 9.0, ["w6", "w7"])]
    later = segments(asked, *both, *ends, start=30.0)
    assert later == [(30.0, 32.0, ["w5"]), (33.0, 34.0, ["w6", "w7"])]
    assert segments(request(), *both, *ends) == [(0.0, 2.0, ["w5"])], "vLLM loses it"


def test_an_end_that_is_named_stays() -> None:
    for tokens in ((5, at(2)), (5, at(2), EOS), (5, at(1), at(1), 6, at(12), EOS)):
        expected = segments(request(), *tokens)
        assert segments(request(use_beam_search=True), *tokens) == expected


class Marking:
    """A tokenizer of numbers and words, with Whisper's marks."""

    marks: ClassVar = {"<|startofprev|>": PREVIOUS, "<|0.00|>": FIRST_TIMESTAMP, "<|en|>": ENGLISH}
    eos_token_id = EOS

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if text in self.marks:
            return [self.marks[text]]
        assert text.startswith(" ")
        assert not add_special_tokens
        return [self.marks.get(word) or int(word) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(f"w{token}" for token in tokens)

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]:
        return [self.marks.get(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [{number: token for token, number in self.marks.items()}[one] for one in ids]


def preprocessed(serving: Any, asked: TranscriptionRequest) -> tuple[list[Any], str | None]:
    """The decoder's prompts of a recording of two parts, and the prompt that vLLM got."""
    prompt = None

    async def original(self: Any, request: TranscriptionRequest) -> Any:
        nonlocal prompt
        prompt = request.prompt
        parts = [{"type": "enc_dec", "decoder_prompt": {"prompt_token_ids": PROMPT}} for _ in range(2)]
        return parts, 34.0, [0.0, 30.0]

    parts, _, _ = asyncio.run(speech.preprocess_speech.function(original, serving, asked))
    assert asked.prompt in ("1 2 <|en|> 3", LONG)
    return [part["decoder_prompt"]["prompt_token_ids"] for part in parts], prompt


LONG = " ".join(map(str, range(200)))
WHISPER = SimpleNamespace(tokenizer=Marking(), model_config=SimpleNamespace(max_model_len=128))


@pytest.mark.parametrize("fields", BEAMS, ids=str)
def test_what_was_said_before_is_marked_and_leaves_half_of_the_room(fields: dict[str, Any]) -> None:
    expected = [PREVIOUS, 1, 2, 3, *PROMPT]
    assert preprocessed(WHISPER, request(prompt="1 2 <|en|> 3", **fields)) == ([expected] * 2, "")
    expected = [PREVIOUS, *range(200 - 63, 200), *PROMPT]
    assert preprocessed(WHISPER, request(prompt=LONG, **fields)) == ([expected] * 2, "")


def test_what_vllm_does_for_others_stays(tokenizer: Any) -> None:
    """Ordinary requests, models whose tokenizer lacks the marks, and those without timestamps, which keep none."""
    beams = request(prompt=LONG, use_beam_search=True)
    other, none = SimpleNamespace(tokenizer=tokenizer), SimpleNamespace()
    for serving, asked in ((WHISPER, request(prompt=LONG)), (other, beams), (none, beams)):
        assert preprocessed(serving, asked) == ([PROMPT] * 2, LONG)
