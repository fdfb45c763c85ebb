"""Prompts of embeddings over HTTP: `/v1/completions` finds what it finds after the tokens that they embed."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import openai
import pytest
import torch

from benchmarks.common import TARGET
from benchmarks.server import serving
from tests.support.forks import Fork
from tests.support.reference import load
from tests.support.running import trained_prompts
from tests.support.served import beams, complete

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_beams_after_embeddings_are_those_after_their_tokens(tmp_path: Path) -> None:
    (tokens,) = trained_prompts([21])
    file = io.BytesIO()
    with torch.no_grad():
        torch.save(load(TARGET).get_input_embeddings()(torch.tensor(tokens)).clone(), file)
    embeds = base64.b64encode(file.getvalue()).decode()
    options = ["--plugin", "trie_beam", "--enable-prompt-embeds"]
    with serving(tmp_path / "log", *options, start=Fork) as server:
        expected = complete(server, tokens, n=3, logprobs=1, **beams(3))
        found = complete(server, None, n=3, logprobs=1, prompt_embeds=embeds, **beams(3))
        for one, other in zip(expected.choices, found.choices, strict=True):
            assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
            assert one.logprobs.token_logprobs == pytest.approx(other.logprobs.token_logprobs, abs=1e-4)
        with pytest.raises(openai.InternalServerError, match="not supported for beam search"):  # 501, as of vLLM
            complete(server, None, prompt_embeds=embeds, n=3, use_beam_search=True)
        assert complete(server, tokens, **beams(2)).choices[0].text
