"""Requests for tokens reach an engine as those of a server."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.sampling_params import SamplingParams

from vllm_trie.entrypoints.server import generate_api
from vllm_trie.entrypoints.server.server import is_server_request


def reaches_the_engine(monkeypatch: pytest.MonkeyPatch, **extra_args: Any) -> SamplingParams:
    """The parameters with which vLLM's endpoint goes on."""
    monkeypatch.setattr(generate_api, "has_beams", lambda _: True)
    request = GenerateRequest.model_validate({"token_ids": [5], "sampling_params": {"extra_args": extra_args}})

    async def original(self: Any, request: GenerateRequest) -> SamplingParams:
        return request.sampling_params

    server = SimpleNamespace(engine_client=SimpleNamespace(vllm_config=None))
    return asyncio.run(generate_api.serve_generate_endpoint.function(original, server, request))


def test_a_search_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_server_request(reaches_the_engine(monkeypatch, beam_width=2))


def test_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {"beam_width": 2, "unit": "step"}
    for others in ({}, {"foo": 1}, steps):
        assert reaches_the_engine(monkeypatch, **others).extra_args == others
