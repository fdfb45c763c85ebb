"""Pooling models score steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shutil import copy

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification

from tests.support.engine import TRAINED_TARGET, Engines
from vllm_trie import StepCandidate
from vllm_trie.step_search.scorers import PoolingStepScorer, step_scorer_of

pytestmark = pytest.mark.slow

CANDIDATES = [
    StepCandidate("2+2?", ("a\n", "b"), (5, 6, 7), (0.5,), is_finished=True),
    StepCandidate("2+2?", ("c\n",), (8,), (), is_finished=False, lookahead="d"),
]


def test_a_pooling_models_score_is_what_transformers_computes(engines: Engines, tmp_path: Path) -> None:
    from vllm import LLM

    engines.close()
    config = AutoConfig.from_pretrained(TRAINED_TARGET, num_labels=1, pad_token_id=0)
    torch.manual_seed(3)
    reward_model = LlamaForSequenceClassification(config).float().eval()
    reward_model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copy(TRAINED_TARGET / name, tmp_path)
    limits = {"max_model_len": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 24}
    llm = LLM(str(tmp_path), runner="pooling", dtype="float32", enforce_eager=True, **limits)
    chats = [replace(candidate, prompt=f"<s>{candidate.prompt}") for candidate in CANDIDATES]
    try:
        scores = PoolingStepScorer(llm)(CANDIDATES)
        assert PoolingStepScorer(llm)(chats) == pytest.approx(scores)
    finally:
        llm.llm_engine.engine_core.shutdown()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with torch.inference_mode():
        for candidate, score in zip(CANDIDATES, scores, strict=True):
            tokens = torch.tensor([tokenizer(candidate.prompt + candidate.text + candidate.lookahead).input_ids])
            assert score == pytest.approx(reward_model(tokens).logits.sigmoid().item(), abs=1e-5)


def test_a_model_that_does_not_pool_is_no_scorer(engines: Engines) -> None:
    llm = engines(TRAINED_TARGET, max_num_seqs=16).llm
    with pytest.raises(ValueError, match="is an LLM for 'generate'; pass one with a classifier or reward model"):
        step_scorer_of(llm, {}, is_offline=True)
