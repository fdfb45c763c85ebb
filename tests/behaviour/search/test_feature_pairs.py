"""Any two of the things that a search may ask for: they work together or are refused in a sentence, and never go wrong.

All pairs are tried at night, and some of each feature always, not a selection of larger sets: where three things are
asked for at once, one refusal hides what becomes of the other pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain, combinations
from typing import Any, NamedTuple

import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind

from tests.support.disturb import preempt_all
from tests.support.engine import Engine, Engines
from tests.support.grammars import MATCHES, structured
from tests.support.items import random_items
from tests.support.pairs import TRAINED, count_differing, drafting
from tests.support.reference import SCORE_TOLERANCE, load
from tests.support.running import MOST_TIES, trained_prompts
from tests.support.sweep import sweep
from vllm_trie import Trace, beam_params
from vllm_trie.options.matrix import options_refusal

pytestmark = pytest.mark.slow

WIDTH, MAX_TOKENS, NGRAM, LEAST = 4, 12, 2, 6
EOS, OTHER_STOP, BANNED = 1, 400, set(range(300, 340))
ITEMS = random_items(300, [3, 4])
PROMPT = trained_prompts([40])[0]
ASKED = tokens_input(PROMPT)


def score(candidates: Sequence[Any]) -> list[float]:
    """Of steps: the shorter, the better."""
    return [-len(candidate.text) for candidate in candidates]


FEATURES: dict[str, dict[str, Any]] = {
    "length_penalty": {"length_penalty": 2.0},
    "early_stopping": {"early_stopping": True},
    'early_stopping="never"': {"early_stopping": "never"},
    'semantics="vllm"': {"semantics": "vllm"},
    'semantics="tridecode"': {"semantics": "tridecode"},
    "stop": {"stop": ["\n"]},
    "ignore_eos": {"ignore_eos": True},
    "min_tokens": {"min_tokens": LEAST},
    "logprobs": {"logprobs": 2},
    "frequency_penalty": {"repetition_penalty": 1.3, "frequency_penalty": 0.3},
    "logit_bias": {"logit_bias": {20: 3.0, 25: -2.0}},
    "allowed_token_ids": {"allowed_token_ids": [token for token in range(500) if token not in BANNED]},
    "temperature": {"temperature": 1.4, "top_k": 20},
    "prune_relative": {"prune_relative": 0.01, "max_candidates_per_parent": 3},
    "do_sample": {"do_sample": True, "seed": 3},
    "replacement": {"do_sample": True, "seed": 3, "replacement": True},
    "stochastic": {"do_sample": True, "seed": 3, "stochastic": True},
    "sample_first": {"sample_first": 4, "seed": 3},
    'speculation="off"': {"speculation": "off"},
    'speculation="exact"': {"speculation": "exact"},
    'speculation="sample"': {"speculation": "sample", "seed": 3},
    "memory_mode": {"do_sample": True, "seed": 3, "memory_mode": True},
    'accept="top_k"': {"do_sample": True, "seed": 3, "accept": "top_k"},
    "beam_widths": {"beam_widths": [2, 4, 3]},
    "compact": {"compact": True, "n": 1},
    "trace": {"trace": True},
    "beam_results": {"beam_results": True},
    "allowed_sequences": {"allowed_sequences": [[*item] for item in ITEMS]},
    "catalog_unique": {
        **{"allowed_sequences": [[*item] for item in ITEMS], "catalog_stop": True},
        **{"stop_token_ids": [OTHER_STOP], "catalog_unique": True},  # so an item may end in two ways
    },
    "structured_outputs": {"structured_outputs": structured("choice")},
    "num_beam_groups": {"num_beam_groups": 2, "diversity_penalty": 0.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": NGRAM},
    "phrase_boosts": {"phrase_boosts": [([20, 25], 2.0), ([30], 1.0), ([25], -1.0)]},
    "contrast": {"contrast": {"alpha": 0.05, "beta": 0.7}},
    'unit="step"': {
        **{"unit": "step", "step_stop": ["\n"], "scorer": score, "candidates": 2, "max_steps": 3},
        **{"allot": "rebase", "prefer_shared": 0.1, "order": "best", "pool": 1, "lookahead": 2},
    },
    "output_kind=DELTA": {"n": 1, "output_kind": RequestOutputKind.DELTA},
}
SAMPLED = {
    "do_sample",
    "replacement",
    "stochastic",
    "sample_first",
    'speculation="sample"',
    "memory_mode",
    'unit="step"',
}
SAMPLED |= {'accept="top_k"'}
ALTERS_LOGPROBS = SAMPLED | {"frequency_penalty", "logit_bias", "allowed_token_ids", "min_tokens", "temperature"}
ALTERS_LOGPROBS |= {"structured_outputs", "num_beam_groups"}


class Found(NamedTuple):
    """One hypothesis."""

    tokens: list[int]
    text: str
    sum_logprobs: float
    finish_reason: str


def repeats_no_ngram(tokens: list[int]) -> bool:
    """Whether no generated token ends an n-gram that was there before."""
    whole = PROMPT + [token for token in tokens if token != EOS]
    grams = [tuple(whole[start : start + NGRAM]) for start in range(len(whole) - NGRAM + 1)]
    new = grams[len(PROMPT) - NGRAM + 1 :]
    return not {*new} & {*grams[: len(PROMPT) - NGRAM + 1]} and len({*new}) == len(new)


STOPS = EOS, OTHER_STOP
PROMISES: dict[str, Callable[[Found], bool]] = {
    "stop": lambda found: "\n" not in found.text,
    "ignore_eos": lambda found: found.tokens[-1] != EOS or len(found.tokens) == MAX_TOKENS,
    "min_tokens": lambda found: len(found.tokens) >= LEAST,
    "allowed_token_ids": lambda found: not BANNED & {*found.tokens},
    "allowed_sequences": lambda found: tuple(token for token in found.tokens if token not in STOPS) in ITEMS,
    "catalog_unique": lambda found: (*found.tokens[:-1],) in ITEMS and found.tokens[-1] in STOPS,
    "structured_outputs": lambda found: found.finish_reason == "length" or MATCHES["choice"](found.text),
    "no_repeat_ngram_size": lambda found: repeats_no_ngram(found.tokens),
}
OF_TEXT = {"stop", "structured_outputs"}  # which hypotheses as arrays lack


def merged(pair: tuple[str, str]) -> dict[str, Any] | None:
    """What both ask for; None if they say different things of the same option."""
    one, other = (FEATURES[name] for name in pair)
    if any(one[option] != other[option] for option in one.keys() & other.keys()):
        return None
    return {"n": WIDTH, "beam_width": WIDTH, "max_tokens": MAX_TOKENS, **one, **other}


PAIRS = {pair: options for pair in combinations(FEATURES, 2) if (options := merged(pair)) is not None}
TOO_LONG = {"min_tokens", "allowed_sequences"}, {"min_tokens", "catalog_unique"}  # no item has so many tokens
NOT_WITH_DRAFTS = ("logit_bias", 'unit="step"')  # refused by vLLM, to each candidate of a step


def expected_refusal(options: dict[str, Any]) -> str | None:
    """What the matrix of options says of a request, if it is refused."""
    said = {name: value for name, value in options.items() if (name, value) != ("n", 1)}
    return options_refusal(said | {"output_kind": options.get("output_kind", RequestOutputKind.FINAL_ONLY).name})


def ask(
    engine: Engine, jobs: dict[str, Any], after_step: Callable[[], None] = lambda: None, prompt: Any = ASKED
) -> tuple[dict[str, Any], dict[str, str]]:
    """What requests are answered, and why others are refused; by their names."""
    core, answers, refused = engine.llm.llm_engine, dict[str, Any](), dict[str, str]()
    for name, options in jobs.items():
        try:
            params = beam_params(**{"output_kind": RequestOutputKind.FINAL_ONLY, **options})
            core.add_request(name, prompt, params)
        except (ValueError, VLLMValidationError) as error:
            refused[name] = str(error)
    while core.has_unfinished_requests():
        for output in core.step():
            if (before := answers.get(output.request_id)) is not None:
                before.add(output, aggregate=True)  # parts of a stream
            else:
                answers[output.request_id] = output
        after_step()
    return answers, refused


def found_in(output: Any) -> list[Found]:
    """The hypotheses of an answer, those that there are none of left out."""
    answer = (output.kv_transfer_params or {}).get("trie_beam", {})
    if "token_ids" in answer:  # compact
        return [
            Found(list(tokens), "", total, reason)
            for tokens, total, reason in zip(
                answer["token_ids"], answer["cumulative_logprobs"], answer["finish_reasons"], strict=True
            )
        ]
    return [
        Found(list(one.token_ids), one.text, one.cumulative_logprob, one.finish_reason)
        for one in output.outputs
        if one.cumulative_logprob is not None and one.token_ids
    ]


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines(TRAINED[0], **drafting(TRAINED[1], 3), async_scheduling=False)


@pytest.mark.parametrize("pairs", sweep({"all": [*PAIRS], "a seventh": [*PAIRS][::7]}, "a seventh"))
def test_each_pair_works_or_is_refused_as_the_matrix_says_and_is_never_wrong(
    engine: Engine, pairs: list[tuple[str, str]]
) -> None:
    assert {*chain(*pairs)} == {*FEATURES}
    jobs = {" + ".join(pair): PAIRS[pair] for pair in pairs if pair != NOT_WITH_DRAFTS}
    answers, refused = ask(engine, jobs)
    assert refused == {name: why for name, options in jobs.items() if (why := expected_refusal(options))}
    assert answers.keys() == jobs.keys() - refused.keys()
    unclear = {name: why for name, why in refused.items() if not names_an_option(name, why)}
    assert not unclear
    assert len(answers) > 0.7 * len(jobs)
    for name, output in answers.items():
        check_promises(name, output)

    steps = 0

    def disturb() -> None:
        nonlocal steps
        steps += 1
        if steps % 17 == 0:
            preempt_all(engine)

    alike = {name: options for name, options in jobs.items() if name in answers and not SAMPLED & {*name.split(" + ")}}
    again, _ = ask(engine, dict(reversed(alike.items())), disturb)
    ties = count_differing([again[name] for name in alike], [answers[name] for name in alike])
    assert ties <= MOST_TIES * sum(len(answers[name].outputs) for name in alike)


def test_what_vllm_refuses_with_drafts_works_without(engine: Engine, engines: Engines) -> None:
    jobs = {" + ".join(NOT_WITH_DRAFTS): PAIRS[NOT_WITH_DRAFTS]}
    answers, refused = ask(engine, jobs)
    assert not answers
    assert all("not yet supported with speculative decoding" in why for why in refused.values())
    answers, refused = ask(engines(TRAINED[0], async_scheduling=False), jobs)
    assert not refused
    for name, output in answers.items():
        check_promises(name, output)


def names_an_option(name: str, why: str) -> bool:
    """Whether a refusal is a sentence about what was asked for."""
    asked = [option for feature in name.split(" + ") for option in FEATURES[feature]]
    return "\n" not in why and any(option in why for option in asked)


def check_promises(name: str, output: Any) -> None:
    """Raise AssertionError where an answer is not what both features promise."""
    features, found = {*name.split(" + ")}, found_in(output)
    if "trace" in features:
        assert [Trace.of(output).hypothesis(n) for n in Trace.of(output).returned] == [one.tokens for one in found], (
            name
        )
    if "beam_results" in features:
        said = output.kv_transfer_params["trie_beam"]["beam_results"]
        assert [(one["output_ids"], one["text"]) for one in said] == [(one.tokens, one.text) for one in found], name
    assert output.finished, name
    assert bool(found) != (features in TOO_LONG), (name, "no hypothesis at all, or one that cannot be")
    assert all(one.finish_reason != "error" for one in output.outputs), (name, output.outputs[0].stop_reason)
    promised = PROMISES.keys() & features - (OF_TEXT if "compact" in features else set())
    for one in found:
        assert all(PROMISES[feature](one) for feature in promised), (name, one)
    if not {"replacement", "sample_first"} & features:
        groups_may_agree = features == {"num_beam_groups", "allowed_sequences"}  # on items
        most = FEATURES["num_beam_groups"]["num_beam_groups"] if groups_may_agree else 1
        counts = Counter(tuple(one.tokens) for one in found)
        assert all(count <= most for count in counts.values()), (name, "too often the same")
    if "catalog_unique" in features:
        assert len({(*one.tokens[:-1],) for one in found}) == len(found), (name, "an item twice")
    if not ALTERS_LOGPROBS & features:
        for one in found:
            difference = one.sum_logprobs - logprob_of(one.tokens)
            assert abs(difference) <= SCORE_TOLERANCE * len(one.tokens), (name, one)


def logprob_of(tokens: list[int]) -> float:
    """By transformers."""
    with torch.inference_mode():
        logits = reference()(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    return float(logits.log_softmax(-1)[torch.arange(len(tokens)), tokens].sum())


reference = cache(partial(load, TRAINED[0]))
