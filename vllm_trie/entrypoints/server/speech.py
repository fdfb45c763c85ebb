"""Transcriptions and translations by beams: the prompt that Whisper was trained with, and all segments of an answer.

Ordinary requests are answered as vLLM answers them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from vllm.entrypoints.speech_to_text.base.serving import SpeechToTextBaseServing
from vllm.logprobs import Logprob

from vllm_trie.compat.patch import arguments_to_vllm, wraps_vllm
from vllm_trie.entrypoints.server.server import SpeechRequest
from vllm_trie.options.request import options_ask_for_beams

PREVIOUS, START = "<|startofprev|>", "<|startoftranscript|>"  # Whisper's marks of what was said before, and of a text
_ends: ContextVar[dict[float, float]] = ContextVar("trie_beam_speech_ends")  # by the second at which a part begins


def speech_asks_for_beams(request: SpeechRequest) -> bool:
    """Whether a transcription is to be searched."""
    return bool(request.use_beam_search) or options_ask_for_beams(request.vllm_xargs or {})


@wraps_vllm("_preprocess_speech_to_text", SpeechToTextBaseServing)
async def preprocess_speech(
    original: Callable[..., Awaitable[tuple[list[Any], float, list[float]]]],
    self: SpeechToTextBaseServing,
    request: SpeechRequest,
    *args: Any,
    **kwargs: Any,
) -> tuple[list[Any], float, list[float]]:
    """The parts of a recording, how long it is, and when each begins."""
    parts, duration, starts = await original(self, request, *args, **kwargs)
    if speech_asks_for_beams(request):
        _ends.set(dict(zip(starts, [*starts[1:], duration], strict=True)))
        for part in parts if request.prompt else ():
            _mark_what_was_said(part, request.prompt, self.tokenizer, self.model_config.max_model_len)
    return parts, duration, starts


def _mark_what_was_said(part: Any, text: str, tokenizer: Any, max_model_len: int) -> None:
    """Let the prompt of a part begin as Whisper's does: vLLM 0.32 writes `<|prev|>`, which is no token of Whisper's.

    Half of all tokens are for the answer. Source: transformers 5.19 `WhisperTokenizer.get_prompt_ids`.
    """
    marks = tokenizer.convert_tokens_to_ids([PREVIOUS, START])
    if part["type"] != "enc_dec" or tokenizer.convert_ids_to_tokens(marks) != [PREVIOUS, START]:
        return  # another model than Whisper
    decoder, (previous, start) = part["decoder_prompt"], marks
    tokens = decoder["prompt_token_ids"]
    said = tokenizer.encode(f" {text.strip()}", add_special_tokens=False)[-(max_model_len // 2 - 1) :]
    last_start = len(tokens) - 1 - tokens[::-1].index(start)
    decoder["prompt_token_ids"] = [previous, *said, *tokens[last_start:]]


@wraps_vllm("_get_verbose_segments", SpeechToTextBaseServing)
def get_all_segments(
    original: Callable[..., list[Any]],
    self: SpeechToTextBaseServing,
    *args: Any,
    **kwargs: Any,
) -> list[Any]:
    """The segments of an answer: none of an empty one, and the last ends with the recording if it names no end."""
    call = arguments_to_vllm(original, self, *args, **kwargs)
    tokens, start_time = call["tokens"], call["start_time"]
    if not speech_asks_for_beams(call["request"]):
        return original(**call)
    if tokens and tokens[-1] == self.tokenizer.eos_token_id:
        tokens = tokens[:-1]
    if not tokens:
        return []
    first = self.tokenizer.encode("<|0.00|>", add_special_tokens=False)[0]  # of the timestamps: 50 a second
    if tokens[-1] < first:
        last = next((token for token in reversed(tokens) if token >= first), first)
        end = max(last, first + round((_ends.get()[start_time] - start_time) * 50))
        call["log_probs"] = [*(call["log_probs"][place] for place in range(len(tokens))), {end: Logprob(0.0)}]
        tokens = (*tokens, end)
    return original(**{**call, "tokens": tokens})
