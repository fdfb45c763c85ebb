"""How many KV blocks a search holds at its peak, read from vLLM's BlockPool after every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.common import BLOCK_SIZE
from vllm_trie import beam_params

COLUMNS = ("beams", "reclaim_interval", "peak blocks", "unshared", "ratio to unshared", "floor", "ratio to floor")
WIDTHS = (3, 9, 15)
INTERVALS = (1, 15)
PROMPT_TOKENS, NEW_TOKENS, NUM_PROMPTS = 512, 128, 4


def peaks(llm: Any) -> Iterator[tuple[Any, ...]]:
    """Peak blocks of one group at a time, summed over several prompts.

    "Unshared" is what b separate rows would hold; the floor is the live distinct full blocks plus
    one tail per row, at the step where it is highest.

    Args:
        llm: An engine in this process.
    """
    manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    default_interval = manager.reclaim_interval
    for width in WIDTHS:
        for interval in INTERVALS:
            manager.reclaim_interval = interval
            held = least = 0
            for prompt in code_prompts(llm, NUM_PROMPTS, PROMPT_TOKENS):
                params = beam_params(width, max_tokens=NEW_TOKENS, ignore_eos=True)
                peak, floor = peak_of(llm, prompt, params)
                held, least = held + peak, least + floor
            unshared = NUM_PROMPTS * width * -(-(PROMPT_TOKENS + NEW_TOKENS - 1) // BLOCK_SIZE)
            yield width, interval, held, unshared, held / unshared, least, held / least
    manager.reclaim_interval = default_interval


def peak_of(llm: Any, prompt: list[int], params: Any) -> tuple[int, int]:
    """Peak blocks in use, and the highest floor, while one prompt is searched."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    llm.llm_engine.add_request("peak", {"prompt_token_ids": prompt}, params)
    peak = floor = 0
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        peak = max(peak, manager.num_used_blocks)
        floor = max(floor, manager.num_live_group_blocks)
    return peak, floor


def code_prompts(llm: Any, count: int, num_tokens: int) -> list[list[int]]:
    """`count` stretches of held-out code of exactly `num_tokens` tokens."""
    from benchmarks.stdlib_pair.corpus import held_out_text

    tokens = llm.get_tokenizer()(held_out_text()[: 12 * count * num_tokens])["input_ids"]
    return [tokens[:1] + tokens[1 + i * num_tokens : (i + 1) * num_tokens] for i in range(count)]
