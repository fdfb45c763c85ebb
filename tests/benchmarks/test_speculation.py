"""The benchmark's first claim: what speculation is for."""

from __future__ import annotations

import pytest

from benchmarks.stdlib_pair.corpus import held_out_prompts
from benchmarks.watch import total_counts
from tests.support.engine import Engines
from tests.support.pairs import TRAINED, speculating
from vllm_trie import beam_params

pytestmark = pytest.mark.slow


@pytest.mark.nightly
def test_the_trained_pair_commits_about_three_steps_per_forward(engines: Engines) -> None:
    """4 beams, 16 drafts in each of 4 layers, on the first of the prompts that are measured."""
    engine = speculating(engines, TRAINED, 4)
    params = beam_params(4, speculation="exact", draft_width=16, max_tokens=48)
    outputs = [engine.llm.generate([prompt], params, use_tqdm=False)[0] for prompt in held_out_prompts(4)]
    assert total_counts(outputs).steps_per_forward >= 2.7
