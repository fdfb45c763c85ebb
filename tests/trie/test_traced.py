"""What a traced trie says of a search is what happened, whatever led nowhere."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from tests.support.traces import check_drafts
from vllm_trie.speculation.search.forest import Forest
from vllm_trie.speculation.worker.verify import verified_draft_forest
from vllm_trie.trace import Trace
from vllm_trie.trace.trace import trace_tokens_of
from vllm_trie.trie import hypotheses
from vllm_trie.trie.traced import DraftedForest, TracedTrie


def trace_of(trie: TracedTrie, returned: list[int]) -> Trace:
    """As a client reads it."""
    sent = {"prompt_length": 5, "block_size": 4, **trie.as_dict(returned), "texts": []}
    return Trace.of(json.loads(json.dumps({"trace": sent}, allow_nan=False)))


def advance(trie: TracedTrie, parents: list[int], tokens: list[int], scores: list[float]) -> None:
    trie.advance(np.array(parents), np.array(tokens), np.array(scores))


@pytest.mark.parametrize("seed", range(8))
def test_walking_back_gives_what_plain_lists_hold_and_forgetting_changes_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = random.Random(seed)
    monkeypatch.setattr(hypotheses, "SPARE_BYTES", 0)
    width, trie = choose.randint(1, 6), TracedTrie()
    rows, expected, kept = [list[int]()], list[list[int]](), dict[int, int]()
    for step in range(20):
        for _ in range(choose.randint(0, 2)):
            row, token = choose.randrange(len(rows)), choose.randrange(50)
            (leaf,) = trie.finish([row], [token], [-float(step)]).tolist()
            kept[leaf] = len(expected)
            expected.append([*rows[row], token])
        while len(kept) > 2:
            worst = choose.choice([*kept])
            trie.drop([worst])
            del kept[worst]
        parents = [choose.randrange(len(rows)) for _ in range(width)]
        tokens = [choose.randrange(50) for _ in parents]
        advance(trie, parents, tokens, [-1.0] * width)
        rows = [[*rows[parent], token] for parent, token in zip(parents, tokens, strict=True)]
    trace = trace_of(trie, [*kept])
    assert [trace.hypothesis(number) for number in range(len(expected))] == expected
    assert trace.returned == [*kept.values()]
    assert [trace.beam(19, slot) for slot in range(width)] == rows


def test_beams_of_a_search_that_is_aborted_are_hypotheses_that_ended_in_its_newest_step() -> None:
    trie = TracedTrie()
    advance(trie, [0, 0], [7, 8], [-1.0, -2.0])
    (leaf,) = trie.finish([1], [1], [-2.5]).tolist()
    advance(trie, [1, 0], [3, 5], [-3.0, -4.0])
    trace = trace_of(trie, [trie.end(1), leaf])
    assert [trace.hypothesis(number) for number in trace.returned] == [[7, 5], [8, 1]]
    assert trace.num_steps == 2


def test_scores_without_a_beam_and_unknown_blocks_are_none_and_drafts_lie_where_they_were() -> None:
    trie = TracedTrie()
    advance(trie, [0, 0], [7, 8], [-0.123456789, -float("inf")])
    trie.add_forest(DraftedForest([-1, 0, -1], [3, 4, 5], [[0, 2], [1, -1]]))
    advance(trie, [0, 0], [3, 5], [-1.0, -2.0])
    advance(trie, [0, 1], [4, 9], [-3.0, -4.0])
    trie.add_blocks(6, 2)
    advance(trie, [0, 0], [1, 2], [-5.0, -6.0])
    (leaf,) = trie.finish([1], [6], [-7.0]).tolist()
    trace = trace_of(trie, [leaf])
    assert trace.scores[0] == [-0.12346, None]
    assert trace.blocks == [None, None, (6, 2), None]
    assert trace.accepted == [[], [0, 2], [1, -1], []]
    assert trace.hypothesis(0) == [7, 3, 4, 2, 6]
    assert trace_tokens_of(trace.as_dict()) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    check_drafts(trace)


def test_a_forest_is_told_without_its_roots() -> None:
    forest = Forest([5, 6], max_drafts=4)
    first, second = forest.add(1, 7), forest.add(0, 8)
    third = forest.add(second, 9)
    traced = verified_draft_forest(forest, [[0, 1], [second, 0], [third, first]])
    assert traced == DraftedForest(parents=[-2, -1, 1], tokens=[7, 8, 9], accepted=[[1, -1], [2, 0]])


def test_an_answer_without_a_trace_is_told_so() -> None:
    with pytest.raises(ValueError, match="has no trace; ask for one with trace=True"):
        Trace.of({"choices": [], "kv_transfer_params": {"trie_beam": {"steps": 3}}})
