"""Searches that no forest follows, in an engine that speculates: they take plain steps, and find the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engine import Engines
from tests.support.grammars import structured
from tests.support.items import random_items
from tests.support.pairs import TRAINED
from tests.support.sweep import sweep
from tests.support.trained_pair import held_out, search, tokens, trained_pair
from vllm_trie.speculation.engine import speculation_budget
from vllm_trie.speculation.engine.lookahead import lend_lookahead
from vllm_trie.worker.attention import tree_layers

pytestmark = pytest.mark.slow

ITEMS = [[*item] for item in random_items(300, [2, 4, 6])]
SAMPLED = {"do_sample": True, "seed": 1}
SEARCHES: dict[str, dict[str, Any]] = {
    "groups": {"num_beam_groups": 2, "diversity_penalty": 0.7},
    "groups along items": {"num_beam_groups": 2, "diversity_penalty": 0.7, "allowed_sequences": ITEMS},
    "widths": {"width": 4, "beam_widths": [2, 4, 3]},
    "stochastic": SAMPLED | {"stochastic": True},
    "grammar": {"structured_outputs": structured("regex"), "ignore_eos": False},
    "grammar and draws": SAMPLED | {"structured_outputs": structured("regex"), "ignore_eos": False},
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_that_asks_to_speculate_finds_what_it_finds_without(engines: Engines, name: str) -> None:
    engine, prompts = trained_pair(engines), held_out()[:2]
    options = {"width": 4, "max_tokens": 16, **SEARCHES[name]}
    plain = search(engine, prompts, **options, speculation="off")
    for asked in ({"speculation": "sample" if "seed" in options else "exact"}, {"speculation": "auto"}, {}):
        for own in (asked, asked | {"draft_width": 8}):
            found = search(engine, prompts, **options, **own)
            assert tokens(found) == tokens(plain)
            if name != "groups along items":  # which have ids
                assert [output.kv_transfer_params for output in found] == [None, None]
            assert not any("steps_per_forward" in str(output.kv_transfer_params) for output in found)


@pytest.mark.parametrize("drafts", [{"method": "draft_model", "model": str(TRAINED[1])}, {"method": "ngram"}])
@pytest.mark.parametrize("speculation", sweep(["exact", "auto"], "exact"))
def test_where_attention_takes_no_trees_steps_are_plain_and_no_budget_is_given_again(
    engines: Engines, drafts: dict[str, Any], speculation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_layers, "attention_builder_takes_trees", lambda _: False)
    warnings, budgets = list[str](), 0
    logger = SimpleNamespace(warning_once=lambda text, *given: warnings.append(text % given))
    monkeypatch.setattr(tree_layers, "logger", logger)
    engines.close()
    config = {"num_speculative_tokens": 3, **drafts}
    engine = engines(TRAINED[0], speculative_config=config, max_num_seqs=59)
    (warning,) = warnings
    assert warning.startswith("Searches take plain steps even if they ask for speculation: ")

    def counted(*args: Any) -> Any:
        nonlocal budgets
        budgets += 1
        return lend_lookahead(*args)

    monkeypatch.setattr(speculation_budget, "lend_lookahead", counted)
    (prompt, *_) = held_out()
    (plain,) = search(engine, [prompt], 4, speculation="off")
    (found,) = search(engine, [prompt], 4, speculation=speculation)
    assert tokens([found]) == tokens([plain])
    assert found.kv_transfer_params["trie_beam"]["drafted"] == 0
    assert budgets <= 1
    engines.close()
