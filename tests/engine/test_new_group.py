"""What ends a hypothesis, what `min_tokens` bars, and what is named as the reason, are what vLLM's parameters say."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.request import Request

from tests.engine.test_answer_stream import next_step
from tests.search.test_many_stop_tokens import Many
from vllm_trie.engine.catalogs import NoGroupCatalog
from vllm_trie.engine.group import BeamGroup
from vllm_trie.engine.hypothesis import GroupHypotheses
from vllm_trie.engine.new_group import new_group
from vllm_trie.engine.outputs import engine_answer_output
from vllm_trie.messages import HYPOTHESES, GroupTicketMessage
from vllm_trie.options import PLUGIN_NAME, BeamParams
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.ngrams import NGramConstraint
from vllm_trie.search.constraints.suppression import SuppressionConstraint
from vllm_trie.search.constraints.timestamps import TimestampConstraint
from vllm_trie.search.devices import NEVER
from vllm_trie.search.rules import SearchRules
from vllm_trie.search.step import search_logprobs_of_draft

EOS, OTHER_EOS, STOP = 1, 3, 4
MIN_TOKENS, MAX_TOKENS = 3, 6
SEARCHES: dict[str, dict[str, Any]] = {
    "hf": {},
    "vllm": {"semantics": "vllm"},
    "tridecode": {"semantics": "tridecode"},
    "in groups": {"num_beam_groups": 2, "diversity_penalty": 0.5},
    "sampled first": {"sample_first": 2},
    "sampled": {"do_sample": True, "replacement": False},
    "stochastic": {"do_sample": True, "stochastic": True},
}


def group_of(options: dict[str, Any], **fields: Any) -> BeamGroup:
    params = SamplingParams(max_tokens=MAX_TOKENS, seed=3, **fields)
    params.update_from_generation_config({"eos_token_id": [EOS, OTHER_EOS]}, EOS)
    ticket = GroupTicketMessage(4, EOS)
    beam = BeamParams(beam_width=4, **options)
    return new_group(Request("g", [5, 5], params, None), beam, ticket, 512, False, NoGroupCatalog(beam))


def rules_ahead(group: BeamGroup, ahead: int) -> SearchRules:
    """How the worker selects in a step after the next one."""
    return group.plan.search.in_phase(group.next_phase(ahead))


def found(options: dict[str, Any], **fields: Any) -> list[GroupHypotheses]:
    """What some whole searches by tables of random logits find."""
    searches = []
    for number in range(5):
        group, seed = group_of(options, **fields), 100 * number
        while not group.advance(next_step(group, seed, 1.0)):
            seed += 1
        searches.append(group.best(4))
    return searches


def test_an_answer_looks_up_the_last_tokens_of_hypotheses_alone() -> None:
    group, seed = group_of({}), 0
    group.plan = replace(group.plan, stop_token_ids=Many({EOS, OTHER_EOS}))
    while not group.advance(next_step(group, seed, 1.0)):
        seed += 1
    best = group.best(4)
    assert best.has_ended.tolist() == [tokens[-1] in (EOS, OTHER_EOS) for tokens in best.token_ids]


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES)
def test_min_tokens_bars_every_eos_ignored_or_not(options: dict[str, Any], ignore_eos: bool) -> None:
    later = set[int]()
    searches = found(options, min_tokens=MIN_TOKENS, ignore_eos=ignore_eos)
    for tokens in chain.from_iterable(best.token_ids for best in searches):
        assert not {EOS, OTHER_EOS} & {*tokens[:MIN_TOKENS]}
        assert len(tokens) == MAX_TOKENS or not ignore_eos
        later |= {*tokens[MIN_TOKENS:]}
    assert {EOS, OTHER_EOS} <= later, "one of them would not have come; choose other seeds"


def test_drafts_leave_out_what_min_tokens_bars() -> None:
    group = group_of({}, min_tokens=MIN_TOKENS, ignore_eos=True, stop_token_ids=[STOP])
    beams = SearchBeams(torch.zeros(1, 1))
    before, after = (
        search_logprobs_of_draft(rules_ahead(group, ahead), torch.zeros(1, 1, 6), beams) for ahead in (0, MIN_TOKENS)
    )
    assert (before == NEVER).nonzero()[:, 2].tolist() == [EOS, OTHER_EOS, STOP]
    assert (after == NEVER).nonzero()[:, 2].tolist() == [STOP]


def test_groups_of_equal_rules_stay_together_whatever_they_ignore() -> None:
    plain, barred = group_of({}, ignore_eos=True), group_of({}, ignore_eos=True, min_tokens=1)
    assert rules_ahead(plain, 0) == rules_ahead(barred, 1)


@pytest.mark.parametrize(("ignore_eos", "reason"), [(False, None), (True, EOS)])
def test_an_ignored_eos_that_is_a_stop_token_is_the_reason(ignore_eos: bool, reason: int | None) -> None:
    fields = {"ignore_eos": ignore_eos, "stop_token_ids": [EOS]}
    plan = group_of({}, **fields).plan
    reasons = set[int | None]()
    for best in found({}, **fields):
        sent = engine_answer_output(best, 4, plan.eos_token_id).kv_transfer_params[PLUGIN_NAME][HYPOTHESES]
        ended = zip(best.token_ids, sent.stop_reasons, strict=True)
        reasons |= {stop for tokens, stop in ended if tokens[-1] == EOS}
    assert reasons == {reason}


def test_what_a_model_rules_is_in_the_order_of_transformers_and_sees_the_prompt() -> None:
    """A token after the task is the first of the hypotheses: what is suppressed as their first token, is no longer."""
    eos, task, no_timestamps = 10, 12, 20
    ticket = GroupTicketMessage(4, eos, suppressed=([7], [8]), timestamps=(eos, no_timestamps, 50))
    params, beam = SamplingParams(max_tokens=MAX_TOKENS), BeamParams(beam_width=4, no_repeat_ngram_size=2)
    for after_task, at_first in (([], (8,)), ([21], ()), ([21, 5], ())):
        prompt = [25, 5, task, *after_task]
        request = Request("g", prompt, params, None)
        search = new_group(request, beam, ticket, 512, False, NoGroupCatalog(beam)).plan.search
        timestamps = TimestampConstraint.after(prompt, eos, no_timestamps, 50)
        assert search.constraints == (NGramConstraint(2), SuppressionConstraint((7,), at_first), timestamps)
