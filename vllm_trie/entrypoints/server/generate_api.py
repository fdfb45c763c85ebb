"""Beams at /inference/v1/generate, which takes and returns tokens (`vllm serve --enable-scale-out`).

Clients send vLLM's `SamplingParams` as JSON, with the options of a search in `extra_args`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

from vllm_trie.compat.patch import wraps_vllm
from vllm_trie.entrypoints.requests.refusals import BeamRequestError
from vllm_trie.entrypoints.server.server import ALL_AT_ONCE, mark_as_server_request
from vllm_trie.entrypoints.server.streams import begun_stream
from vllm_trie.options import options_ask_for_beams
from vllm_trie.options.shown import shown_option
from vllm_trie.supported_engines import has_beams


@wraps_vllm("serve_tokens", "vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens")
async def serve_generate_endpoint(
    original: Callable[..., Awaitable[Any]], self: Any, request: GenerateRequest, *args: Any, **kwargs: Any
) -> Any:
    """Answer or refuse beam requests as the endpoints for completions do."""
    options = request.sampling_params.extra_args or {}
    if not options_ask_for_beams(options) or not has_beams(self.engine_client.vllm_config):
        return await original(self, request, *args, **kwargs)
    if request.stream and (whole := [name for name in ALL_AT_ONCE if options.get(name)]):
        raise BeamRequestError(
            f"{whole[0]}={shown_option(options[whole[0]])} is not supported in a stream here; leave stream out"
        )
    if options.get("unit") != "step":
        mark_as_server_request(request.sampling_params)
    response = await original(self, request, *args, **kwargs)
    return await begun_stream(response) if isinstance(response, AsyncGenerator) else response
