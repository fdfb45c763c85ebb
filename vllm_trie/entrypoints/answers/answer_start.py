"""Detokenizes answers of searches from the last few tokens of their prompts.

vLLM's detokenizer would decode the whole prompt for each hypothesis. If a prompt ends within a character, it would
begin the text with the whole prompt, and find stop strings there that the search did not see.
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
    """Begin the text of a search's answer after its prompt."""
    original(self, tokenizer, request)
    extra_args = (request.sampling_params and request.sampling_params.extra_args) or {}
    if not extra_args.keys() & {TICKET, FORK}:
        return
    decode = partial(self.tokenizer.decode, skip_special_tokens=self.skip_special_tokens)
    context, before = search_text_context(request.prompt_token_ids or [], decode)
    if before.endswith(INCOMPLETE):
        self.stream = _AnswerAfterHalfCharacter(context, before, self.skip_special_tokens)
    elif before:  # otherwise the first token would lose its leading space
        self.stream = decoders.DecodeStream(ids=context, skip_special_tokens=self.skip_special_tokens)


class _AnswerAfterHalfCharacter:
    """Replaces vLLM's stream if the prompt ends within a character: the text begins with that character.

    Args:
        context: The last tokens of the prompt.
        before: Their text.
    """

    def __init__(self, context: list[int], before: str, skip_special_tokens: bool) -> None:
        self._tokens, self._before, self._skips = context, before, skip_special_tokens
        self._stream: decoders.DecodeStream | None = None  # once the text has only whole characters

    def __copy__(self) -> _AnswerAfterHalfCharacter:
        """A copy that continues independently."""
        other = object.__new__(_AnswerAfterHalfCharacter)
        other._tokens, other._before, other._skips = [*self._tokens], self._before, self._skips
        other._stream = copy(self._stream)
        return other

    def step(self, tokenizer: Tokenizer, token: int) -> str | None:
        """The text of one more token; None while a character is incomplete."""
        if self._stream is not None:
            return self._stream.step(tokenizer, token)
        self._tokens.append(token)
        text = tokenizer.decode(self._tokens, skip_special_tokens=self._skips)
        if text.endswith(INCOMPLETE):
            return None
        self._stream = decoders.DecodeStream(ids=self._tokens, skip_special_tokens=self._skips)
        return search_text_after(self._before, text)
