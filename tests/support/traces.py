"""Whether a trace is that of the search whose answer it came with."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from vllm_trie.trace import Trace
from vllm_trie.trace.trace import trace_tokens_of
from vllm_trie.trie.traced import NO_DRAFT, DraftedForest, TracedTrie


def check_trace(output: Any) -> Trace:
    """The trace of a search that returned all of an output's hypotheses.

    Raises:
        AssertionError: walked back, it does not lead to them, or it contradicts itself.
    """
    trace = Trace.of(output)
    found = [hypothesis for hypothesis in output.outputs if hypothesis.cumulative_logprob is not None]
    assert [trace.hypothesis(number) for number in trace.returned] == [[*one.token_ids] for one in found]
    sums = [trace.finished.scores[number] for number in trace.returned]
    assert sums == pytest.approx([one.cumulative_logprob for one in found], abs=1e-4)
    for number, step in enumerate(trace.finished.steps):
        assert len(trace.hypothesis(number)) == step + 1
    assert trace.prompt_length == len(output.prompt_token_ids)
    assert len(trace.tokens) == len(trace.parents) == len(trace.scores) == len(trace.accepted) == len(trace.blocks)
    check_drafts(trace)
    return trace


def check_drafts(trace: Trace) -> None:
    """Raise AssertionError where a beam is not the draft that it is said to be."""
    forests = {forest.step: forest for forest in trace.forests}
    first = 0
    for step, accepted in enumerate(trace.accepted):
        first = step if step in forests else first
        for slot, draft in enumerate(accepted):
            if draft == NO_DRAFT:
                continue
            forest, parent = forests[first], trace.parents[step][slot]
            assert forest.tokens[draft] == trace.tokens[step][slot]
            before = -1 - parent if step == first else trace.accepted[step - 1][parent]
            assert forest.parents[draft] == before


def random_trace(width: int, num_steps: int, num_drafts: int = 0, seed: int = 0) -> Trace:
    """The trace of a search that chooses by chance, a prompt of 40 tokens behind it.

    Args:
        num_drafts: Of each forward, which takes two steps.
    """
    choose, trie = random.Random(seed), TracedTrie()
    scores, kept = [0.0], list[int]()
    for step in range(num_steps - 1):
        parents = sorted(choose.choices(range(len(scores)), k=width))
        tokens = [choose.randrange(400) for _ in parents]
        scores = [scores[parent] - choose.random() for parent in parents]
        if num_drafts and step % 2 == 1:
            drafted = min(num_drafts, width)
            others = [choose.randrange(400) for _ in range(num_drafts - drafted)]
            of_beams = [-1 - parent for parent in parents[:drafted]]
            accepted = [[*range(drafted), *[NO_DRAFT] * (width - drafted)]]
            trie.add_forest(DraftedForest(of_beams + [-1] * len(others), tokens[:drafted] + others, accepted))
        if step > num_steps // 2 and choose.random() < 0.2:
            kept += trie.finish([choose.randrange(width)], [1], [min(scores)]).tolist()
        trie.advance(np.array(parents), np.array(tokens), np.array(scores))
    kept += trie.finish([*range(width)], [1] * width, scores).tolist()
    sent = {"prompt_length": 40, "block_size": 16, **trie.as_dict(kept[-3:])}
    texts = [(token, "\n" if token == 5 else f" {chr(97 + token % 26)}{token}") for token in trace_tokens_of(sent)]
    return Trace.of({**sent, "texts": texts})
