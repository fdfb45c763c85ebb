"""Answers to transcriptions by beams have all their segments, and what was said before is marked as Whisper's own."""

from __future__ import annotations

import inspect
import io
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from fastapi import UploadFile
from transformers import AutoTokenizer
from vllm.entrypoints.speech_to_text.base.serving import SpeechToTextBaseServing
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest, TranscriptionSegment
from vllm.logprobs import Logprob

from tests.support.audio import EOS, FIRST_TIMESTAMP, PROMPT, START, make_whisper
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


def segments(tokenizer: Any, asked: TranscriptionRequest, *tokens: int, start: float = 0.0) -> list[tuple[float, ...]]:
    speech._ends.set({0.0: 9.0, 30.0: 34.0})
    log_probs = [{token: Logprob(-1.0)} for token in tokens]
    serving: Any = SimpleNamespace(tokenizer=tokenizer)
    found = speech.get_all_segments.function(STOCK, serving, tokens, log_probs, asked, TranscriptionSegment, start)
    return [(one.start, one.end, one.text.split()) for one in found]


BEAMS = {"use_beam_search": True}, {"vllm_xargs": {"beam_width": 4}}


@pytest.mark.parametrize("fields", BEAMS, ids=str)
def test_an_empty_answer_has_no_segments(tokenizer: Any, fields: dict[str, Any]) -> None:
    assert segments(tokenizer, request(**fields), EOS) == []
    assert segments(tokenizer, request(**fields)) == []
    with pytest.raises(IndexError):  # of an ordinary request it is vLLM's
        segments(tokenizer, request(), EOS)


@pytest.mark.parametrize("ends", [(), (EOS,)])
def test_text_that_names_no_end_ends_with_its_part_of_the_recording(tokenizer: Any, ends: tuple[int, ...]) -> None:
    asked = request(use_beam_search=True)
    assert segments(tokenizer, asked, 5, 6, *ends) == [(0.0, 9.0, ["w5", "w6"])]
    both = 5, at(2), at(3), 6, 7
    assert segments(tokenizer, asked, *both, *ends) == [(0.0, 2.0, ["w5"]), (3.0, 9.0, ["w6", "w7"])]
    later = segments(tokenizer, asked, *both, *ends, start=30.0)
    assert later == [(30.0, 32.0, ["w5"]), (33.0, 34.0, ["w6", "w7"])]
    assert segments(tokenizer, request(), *both, *ends) == [(0.0, 2.0, ["w5"])], "vLLM loses it"


def test_an_end_that_is_named_stays(tokenizer: Any) -> None:
    for tokens in ((5, at(2)), (5, at(2), EOS), (5, at(1), at(1), 6, at(12), EOS)):
        expected = segments(tokenizer, request(), *tokens)
        assert segments(tokenizer, request(use_beam_search=True), *tokens) == expected


class Marking:
    """A tokenizer of numbers, with Whisper's marks."""

    marks: ClassVar = {"<|startofprev|>": PREVIOUS, "<|startoftranscript|>": START}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert text.startswith(" ")
        assert not add_special_tokens
        return [*map(int, text.split())]

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return [self.marks[token] for token in tokens]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [{number: token for token, number in self.marks.items()}[one] for one in ids]


@pytest.mark.parametrize(("said", "kept"), [([3, 4], [3, 4]), ([*range(200)], [*range(200 - 63, 200)])])
def test_what_was_said_before_is_marked_and_leaves_half_of_the_room(said: list[int], kept: list[int]) -> None:
    part = {"type": "enc_dec", "decoder_prompt": {"prompt_token_ids": [START, 9, 9, *PROMPT]}}
    speech._mark_what_was_said(part, " ".join(map(str, said)), Marking(), 128)
    assert part["decoder_prompt"]["prompt_token_ids"] == [PREVIOUS, *kept, *PROMPT]


def test_a_model_without_the_mark_keeps_its_prompt(tokenizer: Any) -> None:
    part = {"type": "enc_dec", "decoder_prompt": {"prompt_token_ids": PROMPT}}
    speech._mark_what_was_said(part, "w1", tokenizer, 128)
    assert part["decoder_prompt"]["prompt_token_ids"] == PROMPT
