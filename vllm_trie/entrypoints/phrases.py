"""The tokens of `phrase_boosts`, checked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm_trie.options.parts import MOST_PHRASE_LENGTH, MOST_PHRASE_TOKENS
from vllm_trie.sampling_params import stop_tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

Ways = list[list[int]]


def phrases_as_tokens(
    params: SamplingParams, boosts: Sequence[tuple[Any, float]], vllm_config: VllmConfig, tokenizer: Any
) -> list[tuple[Ways, float]]:
    """All ways to write each phrase, in tokens, and its weight.

    Args:
        params: The request's own copy, stop tokens filled in.
        boosts: As the option has them.
        tokenizer: None if the engine has none.

    Raises:
        ValueError: naming the phrase, and what would work.
    """
    found = [(_ways(phrase, tokenizer), weight) for phrase, weight in boosts]
    vocab_size, stops = vllm_config.model_config.get_vocab_size(), stop_tokens(params)
    for (ways, _), (phrase, _) in zip(found, boosts, strict=True):
        for way in ways:
            if not 0 <= min(way) <= max(way) < vocab_size:
                raise ValueError(f"phrase_boosts: {phrase!r} is no phrase of tokens; the vocabulary has {vocab_size}")
            if len(way) > MOST_PHRASE_LENGTH:
                raise ValueError(
                    f"phrase_boosts: a phrase has {len(way)} tokens, and may have {MOST_PHRASE_LENGTH}; shorten it"
                )
            if not set(way[:-1]).isdisjoint(stops):
                raise ValueError(
                    f"phrase_boosts: {phrase!r} goes on after a stop token, which ends hypotheses; end it there"
                )
    if (num_tokens := sum(map(len, chain.from_iterable(ways for ways, _ in found)))) > MOST_PHRASE_TOKENS:
        raise ValueError(
            f"phrase_boosts have {num_tokens} tokens, and a request may bring {MOST_PHRASE_TOKENS}; leave some out"
        )
    return found


def _ways(phrase: str | list[int] | Ways, tokenizer: Any) -> Ways:
    if not isinstance(phrase, str):
        return [phrase] if isinstance(phrase[0], int) else phrase
    if tokenizer is None:
        raise ValueError("phrase_boosts of strings need a tokenizer; pass lists of token ids")
    if not (word := phrase.lstrip(" ")):
        raise ValueError(f"phrase_boosts: {phrase!r} is space alone, of which no word begins; pass its token ids")
    written = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, f" {word}"))
    return [list(way) for way in dict.fromkeys(written)]
