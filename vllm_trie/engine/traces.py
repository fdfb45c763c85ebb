"""The trace of a search as it is sent to the front end: see `vllm_trie.trace`."""

from __future__ import annotations

from typing import Any

from vllm_trie.engine.group import BeamGroup
from vllm_trie.engine.hypothesis import FoundHypotheses
from vllm_trie.trie.traced import TracedTrie


def trace_of(group: BeamGroup, trie: TracedTrie, best: FoundHypotheses, block_size: int) -> dict[str, Any]:
    """What is sent of a search that is over; `trace/texts.py` adds the texts.

    Args:
        trie: The group's.
        best: What is returned.
        block_size: Tokens of a KV block.
    """
    returned = [trie.end(~leaf) if leaf < 0 else leaf for leaf in best.leaves.tolist()]
    own = {"prompt_length": group.plan.prompt_length, "block_size": block_size, "texts": []}
    return {**own, **trie.as_dict(returned)}
