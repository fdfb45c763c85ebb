"""Beams that repeat no n-gram are those of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.support.engine import BLOCK_SIZE, TRAINED_TARGET, Engine, Engines
from tests.support.letters import Letters
from tests.support.pairs import NOISE, TRAINED, Asked, Pair, check_exact, looking_up, speculating, steps_per_forward
from tests.support.reference import agree, engine_answers, is_greedy, load, transformers_beams
from tests.support.running import MOST_TIES, prompt_of, run, trained_prompts
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

MAX_TOKENS = BLOCK_SIZE + 6
SIZES = [1, 2, 3, 5]
EVERYTHING = [("et", 3, 1, 9), ("tx", 5, 2, 9), ("kx", 5, 2, 5)]  # letters, how many, tokens of an n-gram, and of all


def repetitive(length: int, seed: int, num_different: int = 6) -> list[int]:
    """A prompt of a few tokens, so that it has many n-grams more than once."""
    words = prompt_of(num_different, seed)
    return [words[token % num_different] for token in prompt_of(length, seed + 1)]


def has_repeats(prompt: list[int], answer: list[int], size: int) -> bool:
    """Whether the answer completes an n-gram that stands before."""
    text = prompt + answer
    ngrams = [tuple(text[at : at + size]) for at in range(len(text) - size + 1)]
    return any(ngram in ngrams[:at] for at, ngram in enumerate(ngrams) if at + size > len(prompt))


def asked() -> list[tuple[list[int], int, int, dict[str, Any]]]:
    """Prompts, widths, sizes and other options."""
    others = [{}, {"length_penalty": 0.0}, {"early_stopping": True}, {"early_stopping": "never"}]
    lengths = [1, 2, BLOCK_SIZE - 2, BLOCK_SIZE + 9]
    return [
        (repetitive(lengths[(at + width) % 4], at), width, size, others[(at + size) % 4])
        for at, (width, size) in enumerate((width, size) for width in (2, 3, 8) for size in SIZES)
    ]


def check(engine: Engine, model: Path, cases: list[tuple[list[int], int, int, dict[str, Any]]]) -> None:
    """All in one batch with ordinary requests."""
    jobs = []
    for prompt, width, size, options in cases:
        own = beam_params(width, n=width, no_repeat_ngram_size=size, max_tokens=MAX_TOKENS, **options)
        jobs += [(prompt, own), (prompt, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))]
    outputs, in_full, num_changed = run(engine, jobs), 0, 0
    for (prompt, width, size, options), output, ordinary in zip(cases, outputs[::2], outputs[1::2], strict=True):
        common = {"width": width, "n": width, "max_tokens": MAX_TOKENS, **options}
        theirs = transformers_beams(model, prompt, no_repeat_ngram_size=size, **common)
        ours = engine_answers(output, options.get("length_penalty", 1.0))
        in_full += agree(ours, theirs)
        num_changed += [a.token_ids for a in theirs] != [
            a.token_ids for a in transformers_beams(model, prompt, **common)
        ]
        assert not any(has_repeats(prompt, answer.token_ids, size) for answer in ours)
        assert is_greedy(model, prompt, list(ordinary.outputs[0].token_ids), MAX_TOKENS)
    assert in_full >= (1 - MOST_TIES) * len(cases)
    assert num_changed > len(cases) // 3, "what must not be repeated would have been"


def test_a_random_model_finds_the_beams_of_transformers(engines: Engines, random_model: Callable[[str], Path]) -> None:
    check(engines(random_model("gqa")), random_model("gqa"), asked())


@pytest.mark.nightly
def test_the_trained_model_finds_the_beams_of_transformers(engines: Engines) -> None:
    prompts = trained_prompts([1, 20, BLOCK_SIZE, 70, 90, 100])
    sizes, widths = [1, 2, 2, 3, 4, 3], [4, 2, 5, 3, 4, 8]
    cases = [(prompt, width, size, {}) for prompt, width, size in zip(prompts, widths, sizes, strict=True)]
    check(engines(TRAINED_TARGET), TRAINED_TARGET, cases)


def test_one_beam_is_greedy_search(engines: Engines, random_model: Callable[[str], Path]) -> None:
    model, prompt = random_model("gqa"), repetitive(40, 3)
    params = beam_params(1, no_repeat_ngram_size=1, max_tokens=MAX_TOKENS, ignore_eos=True)
    (output,) = engines(model).generate([prompt], params)
    search = {"width": 1, "n": 1, "max_tokens": MAX_TOKENS, "eos_token_id": None}
    (theirs,) = transformers_beams(model, prompt, **search, no_repeat_ngram_size=1)
    assert output.outputs[0].token_ids == theirs.token_ids
    assert theirs.token_ids != transformers_beams(model, prompt, **search)[0].token_ids


def test_where_nothing_is_left_to_take_hypotheses_are_fewer(
    engines: Engines, random_model: Callable[[str], Path]
) -> None:
    """Each of the 16 tokens may come once."""
    for logprobs in (None, 1):
        params = beam_params(3, n=3, no_repeat_ngram_size=1, max_tokens=20, ignore_eos=True, logprobs=logprobs)
        (output,) = engines(random_model("toy")).generate([[*range(14)]], params)
        assert [o.stop_reason for o in output.outputs] == ["no further hypothesis"] * 3
        assert [o.cumulative_logprob for o in output.outputs] == [None] * 3
    params = beam_params(3, n=3, no_repeat_ngram_size=1, max_tokens=2, ignore_eos=True)
    (output,) = engines(random_model("toy")).generate([[*range(14)]], params)
    assert sorted(o.token_ids for o in output.outputs) == [[], [14, 15], [15, 14]]


# Under grammars.


def matching(letters: Letters, width: int, max_tokens: int, **options: Any) -> SamplingParams:
    pattern = StructuredOutputsParams(regex=letters.regex)
    own = {"no_repeat_ngram_size": letters.size, "max_tokens": max_tokens, **options}
    return beam_params(width, n=width, structured_outputs=pattern, **own)


@pytest.mark.parametrize(("chosen", "length", "size", "max_tokens"), EVERYTHING)
def test_a_search_as_wide_as_what_a_grammar_and_ngrams_leave_finds_all_of_it(
    engines: Engines, chosen: str, length: int, size: int, max_tokens: int
) -> None:
    letters = Letters(TRAINED_TARGET, trained_prompts([20])[0], chosen, length, length, size)
    expected, num_stuck = letters.all(max_tokens)
    params = matching(letters, 60, max_tokens, length_penalty=0.0)
    (output,) = engines(TRAINED_TARGET).generate([letters.prompt], params)
    output.outputs = [hypothesis for hypothesis in output.outputs if hypothesis.token_ids]
    assert agree(engine_answers(output, 0.0), expected)
    assert 3 < len(expected) < 60
    assert num_stuck > 0, "beams that can take no token at all"
    assert len(letters._replace(size=99).all(max_tokens)[0]) > len(expected), "some would repeat n-grams"


def test_under_grammars_beams_are_those_of_a_search_that_tries_every_token(engines: Engines) -> None:
    prompts = trained_prompts([1, 20, BLOCK_SIZE, 70])
    cases = [
        (Letters(TRAINED_TARGET, prompt, letters, 2, longest, size), width)
        for prompt, letters in zip(prompts, ["et", "sel", "aeinrst", "et"], strict=True)
        for width, longest, size in [(2, 9, 1), (3, 6, 2), (5, 7, 1), (8, 12, 2)]
    ]
    jobs = [(letters.prompt, matching(letters, width, 10)) for letters, width in cases]
    in_full = num_changed = 0
    for (letters, width), output in zip(cases, run(engines(TRAINED_TARGET), jobs), strict=True):
        output.outputs = [hypothesis for hypothesis in output.outputs if hypothesis.token_ids]
        theirs = letters.beams(width, 10)
        in_full += agree(engine_answers(output, 1.0), theirs)
        num_changed += theirs != letters._replace(size=99).beams(width, 10)
    assert in_full >= (1 - MOST_TIES) * len(cases)
    assert num_changed > len(cases) // 3, "what must not be repeated would have been"


def drafted(num: int) -> list[Asked]:
    options = [{"beam_width": width, "no_repeat_ngram_size": size} for width in (1, 3, 5) for size in (1, 2, 3)]
    return [(repetitive(40, at), options[at % len(options)] | {"max_tokens": MAX_TOKENS}) for at in range(num)]


def test_speculation_by_a_draft_model_finds_what_plain_steps_find(
    engines: Engines, random_pair: Callable[[str, float], Pair]
) -> None:
    engine = speculating(engines, random_pair("gqa", NOISE), 3, max_num_seqs=128)
    outputs = check_exact(engine, drafted(9))
    assert max(map(steps_per_forward, outputs)) > 2


@pytest.mark.nightly
def test_speculation_by_ngrams_finds_what_plain_steps_find(engines: Engines) -> None:
    engine = engines(TRAINED[0], **looking_up(3), max_num_seqs=128)
    asked = [
        (prompt, {"beam_width": 3, "no_repeat_ngram_size": size, "max_tokens": 60})
        for prompt, size in zip(trained_prompts([90, 90, 90]), [3, 4, 5], strict=True)
    ]
    outputs = check_exact(engine, asked)
    assert max(map(steps_per_forward, outputs)) > 1


@pytest.mark.parametrize("speculation", ["off", "sample"])
def test_beams_that_are_sampled_repeat_nothing_and_keep_the_models_log_probabilities(
    engines: Engines, random_pair: Callable[[str, float], Pair], speculation: str
) -> None:
    pair, size = random_pair("gqa", NOISE), 1
    options = {"max_tokens": 16, "do_sample": True, "temperature": 2.0, "ignore_eos": True, "speculation": speculation}
    prompts = [repetitive(60, seed, num_different=3) for seed in range(6)]
    params = [beam_params(4, n=4, no_repeat_ngram_size=size, seed=seed, **options) for seed in range(6)]
    engine = speculating(engines, pair, 3, max_num_seqs=128)
    without = [beam_params(4, n=4, seed=seed, **options) for seed in range(6)]
    outputs, free = engine.generate(prompts, params), engine.generate(prompts, without)
    repeats = [
        has_repeats(p, list(o.token_ids), size) for p, one in zip(prompts, free, strict=True) for o in one.outputs
    ]
    assert sum(repeats) > len(repeats) // 4, "what must not be repeated would have been"
    assert speculation == "off" or any(steps_per_forward(output) > 1 for output in outputs)
    for prompt, output in zip(prompts, outputs, strict=True):
        for hypothesis in output.outputs:
            tokens = list(hypothesis.token_ids)
            assert not has_repeats(prompt, tokens, size)
            with torch.inference_mode():
                logits = load(pair[0])(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            total = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).sum().item()
            assert hypothesis.cumulative_logprob == pytest.approx(total, abs=1e-3)
