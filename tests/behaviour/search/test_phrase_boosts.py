"""Searches by phrases that add to scores find what an independent search finds, which counts them anew."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.support.disturb import Clumsy
from tests.support.engine import TRAINED_TARGET, Engine, Engines
from tests.support.pairs import NOISE, TRAINED, Asked, Pair, check_exact, looking_up, speculating, steps_per_forward
from tests.support.phrases import Phrases, biased_beams, boost_of, next_logprobs
from tests.support.reference import Answer, agree, is_greedy
from tests.support.running import MOST_TIES, Job, prompt_of, run, trained_prompts
from vllm_trie import beam_params
from vllm_trie.search.constraints.phrase_boosts import PhraseBoostConstraint, _carried

pytestmark = pytest.mark.slow

MAX_TOKENS = 14
WEIGHTS = [4.0, 2.0, 1.5, -3.0]


def phrases_for(output: Any) -> Phrases:
    """Phrases that hypotheses of a plain search make likely to occur: parts of them, and some that begin as they do."""
    hypotheses = [list(hypothesis.token_ids) for hypothesis in output.outputs]
    parts = [[hypothesis[at : at + 1 + at % 3] for at in (0, 2, 5, 7)] for hypothesis in hypotheses]
    ways = [[part] for of_one in parts for part in of_one if part and 1 not in part]
    begun = [[[*way[0][:1], 11, *way[0]]] for way in ways[:2]]
    both = [[way[0], [9, *way[0]]] for way in ways[2:4]]
    return [(way, WEIGHTS[at % len(WEIGHTS)]) for at, way in enumerate([*ways, *begun, *both])]


def boosted(width: int, phrases: Phrases, **options: Any) -> SamplingParams:
    own = {"n": width, "max_tokens": MAX_TOKENS, **options}
    return beam_params(width, phrase_boosts=phrases, **own)


def check(engine: Engine, model: Path, prompts: list[list[int]], after_step: Callable[[], None] = lambda: None) -> None:
    """All in one batch with greedy requests."""
    widths, penalties = [2, 4, 8, 3, 5], [1.0, 0.0, 0.6, 1.0, -0.5]
    cases = list(zip(prompts, widths, penalties, strict=True))
    plain = run(engine, [(p, beam_params(w, n=w, max_tokens=MAX_TOKENS, length_penalty=lp)) for p, w, lp in cases])
    phrases = list(map(phrases_for, plain))
    jobs = list[Job]()
    for (prompt, width, penalty), of_search in zip(cases, phrases, strict=True):
        jobs.append((prompt, boosted(width, of_search, length_penalty=penalty)))
        jobs.append((prompt, SamplingParams(temperature=0, max_tokens=MAX_TOKENS)))
    outputs, in_full, num_changed = run(engine, jobs, after_step), 0, 0
    for number, ((prompt, width, penalty), of_search) in enumerate(zip(cases, phrases, strict=True)):
        output, ordinary = outputs[2 * number : 2 * number + 2]
        theirs = biased_beams(model, prompt, width, of_search, MAX_TOKENS, penalty)
        found = [
            (list(o.token_ids), o.cumulative_logprob, boost_of(of_search, list(o.token_ids), is_over=True))
            for o in output.outputs
        ]
        ours = [Answer(tokens, (total + boost) / len(tokens) ** penalty) for tokens, total, boost in found]
        in_full += agree(ours, [Answer(their.token_ids, their.score) for their in theirs])
        sums = {tuple(their.token_ids): their.sum_logprobs for their in theirs}
        for tokens, total, _ in found:
            assert total == pytest.approx(sums.get(tuple(tokens), total), abs=1e-3), "it is no longer the model's own"
        num_changed += [tokens for tokens, *_ in found] != [list(o.token_ids) for o in plain[number].outputs]
        assert is_greedy(model, prompt, list(ordinary.outputs[0].token_ids), MAX_TOKENS)
    assert in_full >= (1 - MOST_TIES) * len(cases)
    assert num_changed > len(cases) // 2, "the phrases change nothing"


def test_a_random_model_finds_the_beams_of_the_independent_search(
    engines: Engines, random_model: Callable[[str], Path]
) -> None:
    check(engines(random_model("gqa")), random_model("gqa"), [prompt_of(20, seed) for seed in range(5)])


def test_the_trained_model_finds_them_whatever_preempts_it(engines: Engines) -> None:
    engine = engines(TRAINED_TARGET)
    clumsy = Clumsy(engine)
    prompts = trained_prompts([12, 30, 41, 64, 77])
    check(engine, TRAINED_TARGET, prompts, clumsy.preempt_whenever_a_search_is_further)
    assert clumsy.num_preempted > MAX_TOKENS // 2


def asked(prompts: list[list[int]]) -> list[Asked]:
    """Searches of several widths, by phrases of frequent tokens."""
    phrases: Phrases = [([[20, 25]], 2.0), ([[30], [13, 9]], 1.0), ([[7]], -2.0), ([[25, 8, 20]], 3.0)]
    return [
        (prompt, {"beam_width": 2 + at % 3, "phrase_boosts": phrases, "max_tokens": MAX_TOKENS})
        for at, prompt in enumerate(prompts)
    ]


def test_speculation_by_a_draft_model_finds_what_plain_steps_find(
    engines: Engines, random_pair: Callable[[str, float], Pair]
) -> None:
    engine = speculating(engines, random_pair("gqa", NOISE), 3, max_num_seqs=128)
    outputs = check_exact(engine, asked([prompt_of(20, seed) for seed in range(6)]))
    assert max(map(steps_per_forward, outputs)) > 1.5


def test_nothing_is_left_on_the_device_of_phrases_that_ranked_drafts(
    engines: Engines, random_pair: Callable[[str, float], Pair]
) -> None:
    engine = speculating(engines, random_pair("gqa", NOISE), 3, max_num_seqs=128)
    phrases, prompt = [([[7, 8]], 2.0)], prompt_of(20)
    run(engine, [(prompt, boosted(3, phrases, speculation="exact"))])
    run(engine, [(prompt, SamplingParams(max_tokens=2))])
    assert PhraseBoostConstraint.of(phrases) not in _carried


def test_speculation_by_ngrams_finds_what_plain_steps_find(engines: Engines) -> None:
    engine = engines(TRAINED[0], **looking_up(3), max_num_seqs=128)
    outputs = check_exact(engine, asked(trained_prompts([90, 90, 90])))
    assert max(map(steps_per_forward, outputs)) > 1


def test_a_stream_sends_what_the_search_finds(engines: Engines) -> None:
    engine = engines(TRAINED_TARGET)
    for prompt in trained_prompts([30, 64]):
        params = boosted(4, [([[20, 25]], 3.0), ([[13]], 0.5)], n=1, max_tokens=40, early_stopping="never")
        (whole,) = run(engine, [(prompt, params)])
        params.output_kind, parts = RequestOutputKind.CUMULATIVE, list[list[int]]()
        core = engine.llm.llm_engine
        core.add_request("stream", {"prompt_token_ids": prompt}, params)
        while core.has_unfinished_requests():
            parts += [list(output.outputs[0].token_ids) for output in core.step()]
        assert parts[-1] == list(whole.outputs[0].token_ids)
        assert all(later[: len(before)] == before for before, later in pairwise(parts))


def test_text_is_boosted_in_each_way_in_which_it_is_tokenised_at_the_beginning_of_a_word(engines: Engines) -> None:
    engine = engines(TRAINED_TARGET)
    tokenizer = engine.llm.get_tokenizer()
    ways = [tokenizer.encode(text, add_special_tokens=False) for text in ("return", " return")]
    assert ways[0] != ways[1]
    prompts = trained_prompts([30, 41])
    by_text, by_tokens, plain = (
        run(engine, [(prompt, beam_params(4, n=4, max_tokens=MAX_TOKENS, **options)) for prompt in prompts])
        for options in ({"phrase_boosts": [("return", 5.0)]}, {"phrase_boosts": [(ways, 5.0)]}, {})
    )
    for of_text, of_tokens, without in zip(by_text, by_tokens, plain, strict=True):
        texts = [hypothesis.text for hypothesis in of_text.outputs]
        assert texts == [hypothesis.text for hypothesis in of_tokens.outputs]
        assert sum(text.count("return") for text in texts) > sum(o.text.count("return") for o in without.outputs)


def test_phrases_wait_for_room_and_leave_nothing_on_the_device(
    engines: Engines, random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt = engines(random_model("gqa")), prompt_of(20)
    phrases: list[Phrases] = [[([[20 + number, 25]], 2.0)] for number in range(4)]
    size = PhraseBoostConstraint.of(phrases[0]).num_bytes
    monkeypatch.setattr(engine.scheduler.catalogs, "room", int(2.5 * size))
    held, own = list[int](), {PhraseBoostConstraint.of(of_search) for of_search in phrases}
    jobs = [(prompt, boosted(2, of_search, ignore_eos=True)) for of_search in phrases]
    run(engine, jobs, lambda: held.append(len(own & {*_carried})))
    assert max(held) == 2
    run(engine, [(prompt, SamplingParams(max_tokens=2))])  # a step in which nothing is left of them
    assert not own & {*_carried}


def test_the_best_items_of_a_catalog_are_those_that_one_finds_by_looking_at_all(
    engines: Engines, random_model: Callable[[str], Path]
) -> None:
    model, prompt = random_model("gqa"), prompt_of(20, 5)
    items = [[5, 7, 9], [5, 7, 10], [6, 7], [6, 8, 9, 11], [12, 5, 7], [13]]
    items_begin = [([[9, 20]], 8.0), ([[10, 20]], -8.0)]  # which no item goes on with
    phrases: Phrases = [([[7, 10]], 3.0), ([[5]], -1.0), ([[8, 9]], 6.0), ([[13]], 0.5), *items_begin]
    (output,) = engines(model).generate(
        [prompt], boosted(6, phrases, allowed_sequences=items, ignore_eos=True, length_penalty=0.0)
    )
    expected = list[tuple[list[int], float]]()
    for item in items:
        rows = [next_logprobs(model, prompt, [item[:at]])[0][token] for at, token in enumerate(item)]
        expected.append((item, sum(rows)))
    expected.sort(key=lambda found: -found[1] - boost_of(phrases, found[0], is_over=True))
    assert [list(o.token_ids) for o in output.outputs] == [item for item, _ in expected]
    assert [o.cumulative_logprob for o in output.outputs] == pytest.approx([total for _, total in expected], abs=1e-3)


def test_filters_see_the_model_alone(engines: Engines, random_model: Callable[[str], Path]) -> None:
    """No weight brings back what a filter leaves out, of the vocabulary or of a catalog."""
    prompt, items = prompt_of(20, 5), [[5, 7], [5, 8], [6, 7], [6, 8]]
    for options in ({}, {"allowed_sequences": items, "ignore_eos": True}):
        plain, (other,) = (
            [
                list(o.token_ids)
                for o in engines(random_model("gqa")).generate([prompt], params)[0].outputs
                if o.token_ids
            ]
            for params in (
                beam_params(1, top_k=1, max_tokens=6, **options),
                beam_params(1, top_k=1, max_tokens=6, phrase_boosts=[([t], 50.0) for t in (6, 8, 40)], **options),
            )
        )
        assert plain == [other]


@pytest.mark.parametrize(
    ("phrases", "reason"),
    [
        ([([1, 7], 1.0)], r"phrase_boosts: \[1, 7\] goes on after a stop token, which ends hypotheses; end it there"),
        ([([7, 10**6], 1.0)], r"phrase_boosts: \[7, 1000000\] is not a list of token ids; the vocabulary has \d+"),
        ([([-7], 1.0)], r"phrase_boosts: \[-7\] is not a list of token ids"),
        ([("  ", 1.0)], "phrase_boosts: '  ' is only spaces, with which no word begins; pass its token ids"),
        ([("a\ud800", 1.0)], "phrase_boosts=.* is not a list of 1 to 1,000 pairs of a phrase"),
        ([([7] * 257, 1.0)], "phrase_boosts: a phrase has 257 tokens, and may have 256; shorten it"),
        ([([7] * 251, 1.0)] * 40, "phrase_boosts has 10040 tokens, and a request may have 10000; leave some out"),
        ([("self", 1e9)], "phrase_boosts=.* a weight from -100 to 100"),
    ],
)
def test_phrases_that_mean_nothing_are_refused(engines: Engines, phrases: list[Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        engines(TRAINED_TARGET).llm.generate("x", beam_params(2, phrase_boosts=phrases))
