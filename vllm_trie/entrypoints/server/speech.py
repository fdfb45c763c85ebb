"""Transcriptions and translations by beams: gives Whisper the prompt format of its training, and keeps all segments.

Requests without beams are unchanged.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from vllm.entrypoints.speech_to_text.base.serving import SpeechToTextBaseServing
from vllm.logprobs import Logprob

from vllm_trie.compat.patch import arguments_to_vllm, wraps_vllm
from vllm_trie.entrypoints.server.server import SpeechRequest
from vllm_trie.entrypoints.server.streams import begun_stream
from vllm_trie.options.request import options_ask_for_beams

MARKS = ["<|startofprev|>", "<|0.00|>"]  # the texts of the fields of `SpeechMarks`
TIMESTAMPS_PER_SECOND = 50
_ends: ContextVar[dict[float, float]] = ContextVar("trie_beam_speech_ends")  # starts of parts -> ends, in seconds


class SpeechMarks(NamedTuple):
    """Special tokens of Whisper."""

    previous: int  # precedes the previous text
    first: int  # the first timestamp


def speech_asks_for_beams(request: SpeechRequest) -> bool:
    """Whether a transcription or translation asks for beams."""
    return bool(request.use_beam_search) or options_ask_for_beams(request.vllm_xargs or {})


@wraps_vllm("_preprocess_speech_to_text", SpeechToTextBaseServing)
async def preprocess_speech(
    original: Callable[..., Awaitable[tuple[list[Any], float, list[float]]]],
    self: SpeechToTextBaseServing,
    request: SpeechRequest,
    *args: Any,
    **kwargs: Any,
) -> tuple[list[Any], float, list[float]]:
    """The prompts of the parts of a recording, its duration, and the start of each part, in seconds."""
    marks = speech_marks(self) if speech_asks_for_beams(request) else None
    if marks is None:
        return await original(self, request, *args, **kwargs)
    said = request.prompt
    # vLLM would put `<|prev|>` before it, which is no token of Whisper. It writes into the request: a copy will not do.
    request.prompt = ""
    parts, duration, starts = await original(self, request, *args, **kwargs)
    request.prompt = said
    _ends.set(dict(zip(starts, [*starts[1:], duration], strict=True)))
    before = _said_before(said, marks, self.tokenizer, self.model_config.max_model_len) if said else []
    for part in parts:
        decoder = part["decoder_prompt"]
        decoder["prompt_token_ids"] = [*before, *decoder["prompt_token_ids"]]
    return parts, duration, starts


@wraps_vllm("_create_speech_to_text", SpeechToTextBaseServing)
async def create_speech_response(
    original: Callable[..., Awaitable[Any]], self: SpeechToTextBaseServing, *args: Any, **kwargs: Any
) -> Any:
    """The answer; a stream's first event is awaited, so that a refusal becomes a 400."""
    call = arguments_to_vllm(original, self, *args, **kwargs)
    events = await original(**call)
    if not isinstance(events, AsyncGenerator) or not speech_asks_for_beams(call["request"]):
        return events
    return await begun_stream(events)


def speech_marks(serving: SpeechToTextBaseServing) -> SpeechMarks | None:
    """Whisper's tokens for the previous text and the first timestamp; None for other models."""
    if (tokenizer := getattr(serving, "tokenizer", None)) is None:  # a model without timestamps
        return None
    marks = tokenizer.convert_tokens_to_ids(MARKS)
    is_whisper = None not in marks and tokenizer.convert_ids_to_tokens(marks) == MARKS
    return SpeechMarks(*marks) if is_whisper else None


def _said_before(text: str, marks: SpeechMarks, tokenizer: Any, max_model_len: int) -> list[int]:
    """The previous text as Whisper expects it before a prompt: its last tokens, as half of `max_model_len` is reserved.

    Special tokens in it are dropped. Source: transformers 5.19 `WhisperTokenizer.get_prompt_ids`.
    """
    tokens = tokenizer.encode(f" {text.strip()}", add_special_tokens=False)
    said = [token for token in tokens if token < tokenizer.eos_token_id]  # the first special token
    return [marks.previous, *said[-(max_model_len // 2 - 1) :]]


@wraps_vllm("_get_verbose_segments", SpeechToTextBaseServing)
def get_all_segments(
    original: Callable[..., list[Any]],
    self: SpeechToTextBaseServing,
    *args: Any,
    **kwargs: Any,
) -> list[Any]:
    """The segments of an answer, none if it is empty; a last segment without an end ends with its part."""
    call = arguments_to_vllm(original, self, *args, **kwargs)
    tokens, start_time = call["tokens"], call["start_time"]
    marks = speech_marks(self) if speech_asks_for_beams(call["request"]) else None
    if marks is None:
        return original(**call)
    if tokens and tokens[-1] == self.tokenizer.eos_token_id:
        call["tokens"] = tokens = tokens[:-1]
    if not tokens:
        return []
    first = marks.first
    if tokens[-1] < first:
        last = next((token for token in reversed(tokens) if token >= first), first)
        end = max(last, first + round((_ends.get()[start_time] - start_time) * TIMESTAMPS_PER_SECOND))
        call["tokens"] = (*tokens, end)
        call["log_probs"] = [*(call["log_probs"][place] for place in range(len(tokens))), {end: Logprob(0.0)}]
    return original(**call)
