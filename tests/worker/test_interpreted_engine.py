"""An engine whose kernels do the work, as on a GPU, finds what one without them finds, and compiles none meanwhile."""

from __future__ import annotations

import pytest

from tests.support.engine import Engines
from tests.support.interpreted_engine import Served, jobs, serve, start_pair
from tests.support.interpreter import Interpreter

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

LAUNCHED = {  # among others
    "ordinary": {"_gumbel_sample_kernel", "_combine_sampled_and_draft_tokens_kernel"},
    "plain": {"_rank_rows_kernel", "_select_kernel", "_fork_kv_kernel"},
    "drafting": {
        *("_draft_nodes_kernel", "_place_draft_nodes_kernel", "_lay_out_forest_nodes_kernel", "_hold_kv_tokens_kernel"),
        "_combine_sampled_and_draft_tokens_kernel",
    },
    "controlled": {"_take_newest_kernel", "_reorder_counts_kernel", "_penalties_kernel"},
    "in one batch": {"_put_sampled_kernel", "_select_kernel", "_draft_nodes_kernel"},
}


@pytest.fixture(scope="module")
def served(interpreter: Interpreter) -> Served:
    by_kernels, _ = interpreter.call("tests.support.interpreted_engine:served")
    assert isinstance(by_kernels, Served)
    return by_kernels


def test_no_kind_of_request_launches_a_variant_that_was_not_warmed(served: Served) -> None:
    assert served.launched.keys() == served.new.keys() == jobs().keys()
    missing = {name: expected - {*served.launched[name]} for name, expected in LAUNCHED.items()}
    assert not any(missing.values()), missing
    assert not any(served.new.values()), served.new


def test_searches_find_by_kernels_and_graphs_what_they_find_without(served: Served, engines: Engines) -> None:
    expected = dict(serve(start_pair(engines)))
    assert sum(map(len, expected.values())) == 5
    for name, answers in expected.items():
        for own, theirs in zip(served.found[name], answers, strict=True):
            assert [tokens for tokens, _ in own] == [tokens for tokens, _ in theirs], name
            assert [score for _, score in own] == pytest.approx([score for _, score in theirs], abs=1e-4), name
    assert served.num_graphs >= 2
