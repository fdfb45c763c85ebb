"""What is said of a search besides its hypotheses, and goes with their output."""

from __future__ import annotations

from vllm.v1.engine import EngineCoreOutput

from vllm_trie.engine.group import BeamGroup
from vllm_trie.engine.hypothesis import FoundHypotheses
from vllm_trie.engine.outputs import add_to_answer, compact_answer, scores_and_stops
from vllm_trie.engine.traces import trace_of


def add_answer(
    output: EngineCoreOutput, group: BeamGroup, best: FoundHypotheses, block_size: int, is_aborted: bool = False
) -> None:
    """Add to the output of a search what its request asks for besides.

    Args:
        best: What is returned; whole, though a stream may have sent a part.
        block_size: Tokens of a KV block.
        is_aborted: The search was.
    """
    plan = group.plan
    answer = group.forests.report(group.counts)
    if plan.params.accept == "top_k":
        answer["is_exact"] = False
    if plan.params.compact:
        answer |= compact_answer(best, plan.stop_rules.max_length, is_aborted)
    answer |= plan.catalog.answer(plan.stop_rules.stop_token_ids, best.token_ids)
    if plan.params.beam_results:
        answer["beam_results"] = scores_and_stops(best)
    if group.traced:
        answer["trace"] = trace_of(group, group.traced, best, block_size)
    add_to_answer(output, answer)
