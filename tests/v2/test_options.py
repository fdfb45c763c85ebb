"""What the host must decide, on the V2 runner: text, random numbers, and rules that the device does not know."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.sampling_params import BeamSearchParams

from tests.conftest import TRAINED_TARGET, Engines
from tests.engine.test_parity import Case, trained_prompts
from tests.engine.test_preemption import count_ties
from vllm_trie import beam_params

ASKED: list[dict[str, Any]] = [
    {"stop": ["\n", ")", "th", "er"], "include_stop_str_in_output": True, "early_stopping": True},
    {"stop": ["self", " return"], "bad_words": ["None"]},
    {"prune_relative": 0.05, "max_candidates_per_parent": 2, "length_penalty": 0.3},
    {"semantics": "tridecode"},
    {"semantics": "vllm", "length_penalty": 2.0},
    {"top_p": 0.8, "temperature": 1.3},
    {"early_stopping": "never", "logprobs": 3},
    {"sample_first": 4, "seed": 5, "temperature": 0.9},
]
WIDTH, MAX_TOKENS = 4, 12


def test_options_mean_on_both_runners_the_same(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = trained_prompts([Case(WIDTH, 1.0, False, True, MAX_TOKENS)] * len(ASKED))
    params = [beam_params(WIDTH, n=WIDTH, max_tokens=MAX_TOKENS, **asked) for asked in ASKED]
    limits = {"max_model_len": 256, "max_num_batched_tokens": 64}
    calls = [{"prompt_token_ids": prompt} for prompt in prompts[:2]], BeamSearchParams(WIDTH, MAX_TOKENS)

    ours = engines(TRAINED_TARGET, **limits, async_scheduling=True)
    answers, beams = ours.generate(prompts, [one.clone() for one in params]), ours.llm.beam_search(*calls)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    theirs = engines(TRAINED_TARGET, **limits)
    assert type(theirs.runner).__name__ == "BeamCPUModelRunner"
    assert count_ties(answers, theirs.generate(prompts, params)) == 0
    assert any(output.finish_reason == "stop" for output in answers[0].outputs)
    for our, their in zip(beams, theirs.llm.beam_search(*calls), strict=True):
        assert [sequence.tokens for sequence in our.sequences] == [sequence.tokens for sequence in their.sequences]
    engines.close()  # while an engine lives, vLLM remembers the environment that it began in
