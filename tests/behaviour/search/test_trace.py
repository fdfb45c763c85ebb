"""`trace=True`: the search itself; that it leads to the answers is also tested wherever searches are disturbed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine import TRAINED_TARGET, Engine, Engines
from tests.support.running import run, trained_prompts
from tests.support.traces import check_trace
from vllm_trie import Trace, beam_params
from vllm_trie.entrypoints.requests import limits

pytestmark = pytest.mark.slow

PROMPT = trained_prompts([27])[0]


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines(TRAINED_TARGET, async_scheduling=False)


def test_blocks_are_shared_as_the_trace_says(engine: Engine) -> None:
    tables, first = dict[int, Any](), len(PROMPT) // 32

    def look() -> None:
        for group_id, group in engine.scheduler.groups.items():
            tries = engine.scheduler.kv_cache_manager._groups[group_id].tries
            if tries:
                tables[group.length - 1] = tries[0].table(), (tries[0].num_live_blocks, tries[0].num_common())

    params = beam_params(5, n=5, max_tokens=80, ignore_eos=True, trace=True)
    (output,) = run(engine, [(PROMPT, params)], look)
    trace = check_trace(output)
    assert trace.block_size == 32
    assert max(tables) > 70
    num_shared = 0
    for step, (table, counted) in tables.items():
        assert trace.blocks[step] == (counted if step > 0 else None)
        for column, owners in enumerate(zip(*trace.row_blocks(step), strict=True), start=first):
            blocks = table[:, column].tolist()
            same = [[one == other for other in blocks] for one in blocks]
            assert same == [[one == other for other in owners] for one in owners], (step, column)
            num_shared += any(sum(row) > 1 for row in same)
    assert num_shared > 0
    text = trace.text(trace.hypothesis(trace.returned[0]))
    assert text.replace("<s>", "").replace("</s>", "") == output.outputs[0].text


def test_what_would_be_too_large_to_draw_is_refused_by_name(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_TRACED", 1279)
    params = beam_params(64, max_tokens=20, trace=True)
    with pytest.raises(
        ValueError, match="trace=True with 64 beams, 0 drafts per step and max_tokens=20 might hold 1,280 tokens"
    ):
        engine.generate([PROMPT], params)


def test_a_search_that_is_not_traced_has_no_trace(engine: Engine) -> None:
    (output,) = engine.generate([PROMPT], beam_params(2, max_tokens=3))
    with pytest.raises(ValueError, match="has no trace"):
        Trace.of(output)
