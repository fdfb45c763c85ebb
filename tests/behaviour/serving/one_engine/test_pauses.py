"""While vLLM 0.33 is paused it refuses requests; searches by steps that need candidates then are refused, too."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import vllm
from vllm import SamplingParams
from vllm.exceptions import GenerationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from tests.support.served import PROMPTS, all_of
from vllm_trie import beam_params, supported_engines
from vllm_trie.compat.sources import minor_vllm_version
from vllm_trie.step_search import online, opening

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        minor_vllm_version(vllm.__version__) == "0.32", reason="vLLM 0.32 lets requests wait while it is paused"
    ),
]

REFUSAL = "Generation is paused"


@pytest.fixture
def scored(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of candidates that the scorer "short" has got; after the second time it pauses the engine."""
    config = supported_engines.plugin_config_of(llm.vllm_config)
    config = config.model_copy(update={"scorers": {"short": "http://127.0.0.1:9"}})
    monkeypatch.setattr(opening, "plugin_config_of", lambda _: config)
    counts = list[int]()

    async def scores(_: Any, candidates: list[Any]) -> list[float]:
        counts.append(len(candidates))
        if len(counts) == 2:
            await llm.pause_generation(mode="wait")
        return [-float(len(candidate.text)) for candidate in candidates]

    monkeypatch.setattr(online, "_step_scores", scores)
    return counts


def by_steps(max_tokens: int = 480) -> SamplingParams:
    options = {"unit": "step", "step_stop": [" "], "scorer": "short", "seed": 0, "temperature": 1.0}
    params = beam_params(2, n=2, max_tokens=max_tokens, ignore_eos=True, **options)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def test_a_search_by_steps_answers_with_the_best_before_the_pause_and_is_refused_within_it(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop, scored: list[int]
) -> None:
    async def check() -> None:
        (answer,) = await all_of(llm.generate(PROMPTS[0], by_steps(), "begun"))
        assert await llm.is_paused()
        assert len(scored) == 2
        assert [found.finish_reason for found in answer.outputs] == ["abort"] * 2
        assert all(found.text and found.token_ids for found in answer.outputs)
        first, second = answer.kv_transfer_params["trie_beam"]["scores"]
        assert first >= second
        for name, params in {"steps": by_steps(), "beams": beam_params(2), "ordinary": SamplingParams()}.items():
            with pytest.raises(GenerationError, match=REFUSAL):
                await all_of(llm.generate(PROMPTS[0], params, name))
        await llm.resume_generation()
        assert not llm.output_processor.has_unfinished_requests()
        (after,) = await all_of(llm.generate(PROMPTS[0], by_steps(max_tokens=6), "after"))
        assert {found.finish_reason for found in after.outputs} == {"length"}

    loop.run_until_complete(asyncio.wait_for(check(), 120))
