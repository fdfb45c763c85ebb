"""The text of an answer as it goes on behind the last few tokens of its prompt.

vLLM's detokenizer decodes the whole prompt for each hypothesis. Where a prompt ends within a character, it would begin
the text with the whole of it, and find stop strings there that a search does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial

from tokenizers import Tokenizer, decoders
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from vllm_trie.compat.patch import wraps_vllm
from vllm_trie.messages import FORK, TICKET
from vllm_trie.search.stop_strings import INCOMPLETE, search_text_after, search_text_context


@wraps_vllm("__init__", FastIncrementalDetokenizer)
def begin_answer_text(
    original: Callable[..., None], self: FastIncrementalDetokenizer, tokenizer: object, request: EngineCoreRequest
) -> None:
    """Answers of searches begin behind their prompts."""
    original(self, tokenizer, request)
    extra_args = (request.sampling_params and request.sampling_params.extra_args) or {}
    if not extra_args.keys() & {TICKET, FORK}:
        return
    decode = partial(self.tokenizer.decode, skip_special_tokens=self.skip_special_tokens)
    context, before = search_text_context(request.prompt_token_ids or [], decode)
    if before.endswith(INCOMPLETE):
        self.stream = _AnswerAfterHalfCharacter(context, before, self.skip_special_tokens)
    elif before:  # else the first token would lose the space that it begins with
        self.stream = decoders.DecodeStream(ids=context, skip_special_tokens=self.skip_special_tokens)


class _AnswerAfterHalfCharacter:
    """In place of vLLM's stream: begins with the character that the prompt leaves open, as stop strings are judged.

    Args:
        context: The last tokens of the prompt.
        before: Their text.
    """

    def __init__(self, context: list[int], before: str, skip_special_tokens: bool) -> None:
        self._tokens, self._before, self._skips = context, before, skip_special_tokens
        self._stream: decoders.DecodeStream | None = None  # once the text is one of whole characters

    def __copy__(self) -> _AnswerAfterHalfCharacter:
        """One that goes on by itself."""
        other = object.__new__(_AnswerAfterHalfCharacter)
        other._tokens, other._before, other._skips = [*self._tokens], self._before, self._skips
        other._stream = copy(self._stream)
        return other

    def step(self, tokenizer: Tokenizer, token: int) -> str | None:
        """The text of one more token, None as long as a character is open."""
        if self._stream is not None:
            return self._stream.step(tokenizer, token)
        self._tokens.append(token)
        text = tokenizer.decode(self._tokens, skip_special_tokens=self._skips)
        if text.endswith(INCOMPLETE):
            return None
        self._stream = decoders.DecodeStream(ids=self._tokens, skip_special_tokens=self._skips)
        return search_text_after(self._before, text)
