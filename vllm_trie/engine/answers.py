"""What is said of a search besides its hypotheses, and goes with their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.engine import EngineCoreOutput

from vllm_trie.engine.group import BeamGroup
from vllm_trie.engine.hypothesis import Hypothesis
from vllm_trie.engine.outputs import compact_answer, scores_and_stops
from vllm_trie.engine.traces import trace_of
from vllm_trie.options import PLUGIN_NAME


def add_answer(
    outputs: Sequence[EngineCoreOutput], group: BeamGroup, best: Sequence[Hypothesis], block_size: int
) -> None:
    """Add to the outputs of a search what its request asks for besides.

    Args:
        outputs: In their order.
        best: What is returned; whole, though a stream may have sent a part.
        block_size: Tokens of a KV block.
    """
    plan = group.plan
    answer = group.forests.report(group.counts)
    if plan.params.accept == "top_k":
        answer["is_exact"] = False
    if plan.params.compact:
        answer |= compact_answer(best, plan.stop_rules.max_length)
    answer |= plan.catalog.answer(plan.stop_rules.stop_token_ids, [hypothesis.token_ids for hypothesis in best])
    for output in outputs if answer else ():  # the one open field of an output; there is no KV connector
        output.kv_transfer_params = {PLUGIN_NAME: answer}
    large: dict[str, Any] = {}  # the last output alone has it, from which vLLM makes the user's
    if plan.params.beam_results:
        large["beam_results"] = scores_and_stops(best)
    if group.traced:
        large["trace"] = trace_of(group, group.traced, best, block_size)
    if large:
        outputs[-1].kv_transfer_params = {PLUGIN_NAME: {**answer, **large}}
