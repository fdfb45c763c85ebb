"""Prompts that beams do not work on are known by their kind; numbers of tokens fit into what a worker holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm import SamplingParams

from vllm_trie.entrypoints.requests import _fit_lengths, why_not_behind


@pytest.mark.parametrize(
    ("kind", "speculates", "is_mm_prefix_lm", "reason"),
    [
        ("token", True, True, None),
        ("enc_dec", False, False, None),
        ("embeds", False, False, "works on prompts of text or tokens, not on prompt_embeds"),
        ("multimodal", False, False, None),
        ("multimodal", True, False, "works on multimodal prompts only without a draft model, which does not see them"),
        ("multimodal", False, True, "does not work on multimodal prompts of a model whose images are attended in both"),
    ],
)
def test_prompts_that_beams_do_not_work_on_are_known_by_their_kind(
    kind: str, speculates: bool, is_mm_prefix_lm: bool, reason: str | None
) -> None:
    model_config = SimpleNamespace(is_mm_prefix_lm=is_mm_prefix_lm)
    drafts = SimpleNamespace(use_ngram=lambda: False) if speculates else None
    config = SimpleNamespace(speculative_config=drafts, model_config=model_config)
    found = why_not_behind({"type": kind}, config)
    assert found is None if reason is None else found is not None and found.startswith(reason)


def test_numbers_of_tokens_that_no_sequence_reaches_fit_into_32_bits() -> None:
    params = SamplingParams(min_tokens=1 << 40, max_tokens=1 << 41)
    _fit_lengths(params, 512)
    assert (params.min_tokens, params.max_tokens) == (512, 512)
    short = SamplingParams(min_tokens=2, max_tokens=9)
    _fit_lengths(short, 512)
    assert (short.min_tokens, short.max_tokens) == (2, 9)
