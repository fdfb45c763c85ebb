"""A draft model whose own position embeddings end before the target's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm import SamplingParams

from tests.support.engine import Engine, Engines
from tests.support.pairs import TRAINED, check_exact, count_differing, speculating, steps_per_forward
from tests.support.running import Job, run, trained_prompts
from vllm_trie import beam_params
from vllm_trie.compat.sources import minor_vllm_version

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        minor_vllm_version(vllm.__version__) != "0.32",
        reason="from vLLM 0.33 on no request may be longer than the draft model takes",
    ),
]

LENGTH = 64
OPTIONS: dict[str, Any] = {"beam_width": 2, "ignore_eos": True, "max_tokens": 20}
SHORT, LONG = trained_prompts([40, 100])


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = Path(shutil.copytree(TRAINED[1], tmp_path_factory.mktemp("pair") / "draft"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LENGTH}))
    return copy


@pytest.fixture
def engine(engines: Engines, draft: Path) -> Engine:
    return speculating(engines, (TRAINED[0], draft), 3)


def contrast(prompt: list[int], max_tokens: int = 8) -> Job:
    return prompt, beam_params(2, n=2, contrast={}, max_tokens=max_tokens, ignore_eos=True)


def test_what_is_longer_finds_what_plain_steps_find(engine: Engine) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    asked = [(LONG, OPTIONS), (SHORT, OPTIONS), (LONG[: LENGTH - 1], OPTIONS)]
    longer, shorter, _ = check_exact(engine, asked, ordinary=[(LONG, greedy), (SHORT, greedy)])
    assert steps_per_forward(longer) == 1.0 < steps_per_forward(shorter)


def test_contrast_finds_the_same_after_a_longer_prompt_with_the_same_beginning(engine: Engine) -> None:
    assert engine.llm.llm_engine.reset_prefix_cache()
    alone = run(engine, [contrast(LONG[:50])])
    assert engine.llm.llm_engine.reset_prefix_cache()
    run(engine, [(LONG, beam_params(**OPTIONS))])
    (cached,) = run(engine, [contrast(LONG[:50])])
    assert cached.num_cached_tokens > 0
    assert count_differing([cached], alone) == 0


def test_contrast_that_the_draft_model_cannot_follow_is_refused(engine: Engine) -> None:
    room = LENGTH - len(SHORT)
    (output,) = run(engine, [contrast(SHORT, room)])
    assert len(output.outputs[0].token_ids) == room
    for prompt, max_tokens in ((SHORT, room + 1), (LONG, 1)):
        with pytest.raises(
            ValueError, match=f"{len(prompt)} tokens and max_tokens={max_tokens} exceeds 64 tokens, .*lower max_tokens"
        ):
            run(engine, [contrast(prompt, max_tokens)])
