"""The trace of a search as it is sent to the front end: see `vllm_trie.trace`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.config import ModelConfig
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

from vllm_trie.engine.group import BeamGroup
from vllm_trie.trie.traced import TracedTrie


def trace_of(
    group: BeamGroup, trie: TracedTrie, count: int, block_size: int, model_config: ModelConfig
) -> dict[str, Any]:
    """What is sent of a search that is over.

    Args:
        trie: The group's.
        count: Hypotheses that are returned.
        block_size: Tokens of a KV block.
        model_config: Says by which tokenizer tokens have texts, if by any.
    """
    returned = group.pool.best(count)
    own = {"prompt_length": group.plan.prompt_length, "block_size": block_size}
    texts = _texts(trie.tokens_in_it(), model_config)
    return {**own, **trie.as_dict([finished.node for finished in returned]), "texts": texts}


def _texts(tokens: Sequence[int], model_config: ModelConfig) -> list[tuple[int, str]]:
    if model_config.skip_tokenizer_init:
        return []
    texts = convert_ids_list_to_tokens(cached_tokenizer_from_config(model_config), [*tokens])
    return [*zip(tokens, texts, strict=True)]
