"""Every feature once, on two engines: without a draft model, and with one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams

from tests.support.cases import EOS, Case, prompted
from tests.support.cases import run as check_cases
from tests.support.disturb import Clumsy
from tests.support.engine import BLOCK_SIZE, TRAINED_TARGET, Engine, Engines
from tests.support.grammars import MATCHES, structured
from tests.support.items import along, random_items
from tests.support.loop import loop_beams
from tests.support.options import OPTIONS
from tests.support.pairs import TRAINED, check_exact, speculating, steps_per_forward
from tests.support.reference import SCORE_TOLERANCE, agree, engine_answers, is_greedy, transformers_beams
from tests.support.running import count_ties, run, trained_prompts
from tests.support.trained_pair import own_sum
from vllm_trie import beam_params, hypotheses
from vllm_trie.entrypoints.llm import llm_beam_search
from vllm_trie.messages import NO_HYPOTHESIS

WIDTH, MAX_TOKENS = 4, 16
VARYING = {"beam_widths": [2, WIDTH, 3]}
PROMPTS = trained_prompts([5, BLOCK_SIZE - 5, 2 * BLOCK_SIZE])  # the second crosses a block boundary


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines(TRAINED_TARGET, max_logprobs=64)  # vLLM's own loop asks for many


@pytest.fixture
def drafting(engines: Engines) -> Engine:
    return speculating(engines, TRAINED, 3)


def params(**options: Any) -> SamplingParams:
    return beam_params(**{"beam_width": WIDTH, "n": WIDTH, "max_tokens": MAX_TOKENS} | options)


# Without a draft model.


def test_beams_are_those_of_transformers(engine: Engine) -> None:
    asked = [*product(PROMPTS, (1, WIDTH), (False, True))]
    outputs = run(engine, [(p, params(beam_width=b, n=b, ignore_eos=ignore)) for p, b, ignore in asked])
    for (prompt, width, ignore_eos), output in zip(asked, outputs, strict=True):
        eos = None if ignore_eos else EOS
        theirs = transformers_beams(TRAINED_TARGET, prompt, width, width, MAX_TOKENS, eos_token_id=eos)
        assert agree(engine_answers(output, 1.0), theirs)


def test_length_penalties_and_early_stopping_are_those_of_transformers(engine: Engine) -> None:
    asked = [*product((-1.0, 2.0), (False, True, "never"))]
    options = [{"length_penalty": penalty, "early_stopping": early} for penalty, early in asked]
    outputs = run(engine, [(PROMPTS[0], params(**one)) for one in options])
    for one, output in zip(options, outputs, strict=True):
        theirs = transformers_beams(TRAINED_TARGET, PROMPTS[0], WIDTH, WIDTH, MAX_TOKENS, **one)
        assert agree(engine_answers(output, one["length_penalty"]), theirs)


CASES: dict[str, list[Case]] = {
    "semantics": [Case(WIDTH, semantics, ignore_eos=False) for semantics in ("hf", "vllm", "tridecode")],
    "stop strings": [Case(WIDTH, stop=("self.", "f(x", "):\n")), Case(WIDTH, "vllm", stop=("\n",))],
    "stop tokens": [Case(WIDTH, stop_token_ids=(13, 15), min_tokens=5), Case(WIDTH, "vllm", stop_token_ids=(13,))],
    "log-probabilities": [Case(WIDTH, logprobs=3), Case(WIDTH, "vllm", logprobs=0, controls="penalties")],
    "penalties": [Case(WIDTH, controls="penalties"), Case(1, controls="all")],
    "bans": [Case(WIDTH, controls="harsh bans", logprobs=1), Case(WIDTH, bad_words=("self", "return"))],
    "filters": [Case(WIDTH, controls="all filters"), Case(WIDTH, controls="the best alone")],
    "pruning": [Case(WIDTH, pruning="relative"), Case(WIDTH, pruning="two per parent")],
}


@pytest.mark.parametrize("feature", CASES)
def test_what_acts_on_hypotheses_acts_as_in_a_plain_loop_and_on_nobody_else(engine: Engine, feature: str) -> None:
    check_cases(engine, prompted(CASES[feature]))


def test_beams_along_a_catalog_are_those_of_transformers_and_come_back_as_arrays(engine: Engine) -> None:
    items = random_items(900, [2, 3, 4])
    asked = params(allowed_sequences=[[*item] for item in items], catalog_stop=True, compact=True, n=1, max_tokens=6)
    (output,) = run(engine, [(PROMPTS[1], asked)])
    found = hypotheses(output)
    along_items = along(items, PROMPTS[1])
    theirs = transformers_beams(TRAINED_TARGET, PROMPTS[1], WIDTH, WIDTH, 6, prefix_allowed_tokens_fn=along_items)
    assert found.scores == pytest.approx([answer.score for answer in theirs], rel=SCORE_TOLERANCE)
    assert [list(items[own_id]) for own_id in found.item_ids] == [answer.token_ids[:-1] for answer in theirs]


def test_hypotheses_under_a_grammar_match_and_widths_may_vary(engine: Engine) -> None:
    asked = {"structured_outputs": structured("regex"), "max_tokens": 40}
    for output in run(engine, [(p, params(**asked, **more)) for p in PROMPTS for more in ({}, VARYING)]):
        ended = [o for o in output.outputs if o.finish_reason == "stop" and o.stop_reason != NO_HYPOTHESIS]
        assert ended
        assert [o.text for o in ended if not MATCHES["regex"](o.text)] == []


def test_n_hypotheses_are_the_best_of_all(engine: Engine) -> None:
    everything, some = run(engine, [(PROMPTS[0], params(beam_width=8, n=n)) for n in (8, 3)])
    assert [o.token_ids for o in some.outputs] == [o.token_ids for o in everything.outputs[:3]]


def test_beams_are_sampled_by_their_seed_and_reported_by_the_targets_probability(engine: Engine) -> None:
    sampled = [(PROMPTS[0], params(do_sample=True, seed=seed, temperature=0.7)) for seed in (3, 4, 3)]
    first, other, again = run(engine, sampled)
    assert count_ties([again], [first]) == 0
    assert [o.token_ids for o in first.outputs] != [o.token_ids for o in other.outputs]
    for o in first.outputs:
        expected = own_sum(PROMPTS[0], tuple(o.token_ids))
        assert o.cumulative_logprob == pytest.approx(expected, abs=SCORE_TOLERANCE * MAX_TOKENS)


def test_a_search_goes_on_from_the_tokens_that_it_sampled_first(engine: Engine) -> None:
    sampled = {"sample_first": 3, "seed": 5, "ignore_eos": True, "min_tokens": 3}
    prefixes, found = run(engine, [(PROMPTS[0], params(**sampled, max_tokens=length)) for length in (3, MAX_TOKENS)])
    start = [([*o.token_ids], o.cumulative_logprob) for o in prefixes.outputs]
    theirs = loop_beams(TRAINED_TARGET, PROMPTS[0], WIDTH, WIDTH, MAX_TOKENS, ignore_eos=True, start=start)
    assert agree(engine_answers(found, 1.0), [*theirs])


def test_a_cached_prompt_changes_no_answer_and_hypotheses_can_be_gone_on_with(engine: Engine) -> None:
    assert engine.llm.llm_engine.reset_prefix_cache()
    jobs = [(PROMPTS[2], params(max_tokens=BLOCK_SIZE + 9, ignore_eos=True))]
    (first,), (again,) = run(engine, jobs), run(engine, jobs)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, BLOCK_SIZE)
    assert count_ties([again], [first]) == 0
    history = [*PROMPTS[2], *first.outputs[-1].token_ids]
    (greedy,) = run(engine, [(history, SamplingParams(temperature=0, max_tokens=5))])
    assert greedy.num_cached_tokens >= len(PROMPTS[2])
    assert is_greedy(TRAINED_TARGET, history, [*greedy.outputs[0].token_ids], 5)


def test_preempted_groups_go_on_where_they_were(engine: Engine) -> None:
    jobs = [(prompt, params(**options)) for prompt, options in zip(PROMPTS, OPTIONS, strict=False)]
    undisturbed, clumsy = run(engine, jobs), Clumsy(engine)
    assert count_ties(run(engine, jobs, clumsy.preempt_whenever_a_search_is_further), undisturbed) == 0
    assert clumsy.num_preempted >= MAX_TOKENS - 1


def test_beam_search_of_the_llm_is_vllms_own_loop(engine: Engine) -> None:
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    asked = BeamSearchParams(WIDTH, max_tokens=MAX_TOKENS)
    ours, theirs = engine.llm.beam_search(prompts, asked), llm_beam_search.original(engine.llm, prompts, asked)
    assert [[s.tokens for s in one.sequences] for one in ours] == [[s.tokens for s in one.sequences] for one in theirs]


def test_a_mistake_is_refused_and_leaves_nothing(engine: Engine) -> None:
    with pytest.raises(ValueError, match="beam_width=65 exceeds max_num_seqs=64; lower it, or raise --max-num-seqs"):
        engine.generate(PROMPTS, [params(), params(beam_width=65), params()])
    engine.check_nothing_is_left()


def test_beams_of_windows_and_of_full_attention_share_an_engine(
    engines: Engines, random_model: Callable[[str], Path]
) -> None:
    """Two KV cache groups."""
    model, prompt = random_model("gemma2"), [*range(2, 60)]
    (output,) = run(engines(model), [(prompt, params(ignore_eos=True))])
    theirs = transformers_beams(model, prompt, WIDTH, WIDTH, MAX_TOKENS, eos_token_id=None)
    assert agree(engine_answers(output, 1.0), theirs)


# With one.


def test_exact_speculation_finds_what_plain_steps_find(drafting: Engine) -> None:
    options = [{}, *OPTIONS[:3], {"semantics": "vllm"}, {"beam_width": 1}]
    prompts = trained_prompts([BLOCK_SIZE - 5] * len(options))
    defaults = {"beam_width": WIDTH, "draft_width": 3 * WIDTH, "max_tokens": MAX_TOKENS}
    asked = [(prompt, defaults | one) for prompt, one in zip(prompts, options, strict=True)]
    ordinary = [(PROMPTS[0], SamplingParams(temperature=0, max_tokens=MAX_TOKENS))]
    assert max(map(steps_per_forward, check_exact(drafting, asked, ordinary=ordinary))) > 1.5


@pytest.mark.parametrize("mode", [{}, {"threshold": 0.8}, {"memory_mode": True}], ids=["plain", "narrower", "memory"])
def test_drafts_of_sampled_beams_are_reported_by_the_targets_probability(drafting: Engine, mode: dict) -> None:
    sampled = [(prompt, params(speculation="sample", seed=1, ignore_eos=True, **mode)) for prompt in PROMPTS]
    outputs = run(drafting, sampled)
    assert count_ties(run(drafting, sampled), outputs) == 0
    assert max(map(steps_per_forward, outputs)) > 1
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        for o in output.outputs:
            if o.cumulative_logprob is not None:
                expected = own_sum(prompt, tuple(o.token_ids))
                assert o.cumulative_logprob == pytest.approx(expected, abs=SCORE_TOLERANCE * MAX_TOKENS)


def test_preempted_groups_that_speculate_go_on_where_they_were(drafting: Engine) -> None:
    clumsy = Clumsy(drafting)
    asked = [(prompt, {"beam_width": WIDTH, "draft_width": 3 * WIDTH, "max_tokens": MAX_TOKENS}) for prompt in PROMPTS]
    check_exact(drafting, asked, clumsy.preempt_whenever_a_search_is_further)
    assert clumsy.num_preempted > 3
