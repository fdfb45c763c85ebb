"""The `AsyncLLM` that the tests of this folder share, and what a server makes of it in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from unittest import mock

import httpx
import pytest
from openai import AsyncOpenAI
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import utils
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.server import CHAT_TEMPLATE
from tests.support import forks
from tests.support.engine import BLOCK_SIZE, KV_CACHE_BYTES, TRAINED_TARGET

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:  # vLLM 0.33
    from vllm.entrypoints.common.cli_args import make_arg_parser

TASKS = ("generate",)


@pytest.fixture(scope="package")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="package")
def llm(loop: asyncio.AbstractEventLoop) -> Iterator[AsyncLLM]:
    args = AsyncEngineArgs(
        str(TRAINED_TARGET),
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_SIZE,
        max_model_len=512,
        max_num_seqs=64,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        additional_config={"trie_beam": {"check_invariants": True}},
    )

    async def start() -> AsyncLLM:
        with mock.patch.object(utils, "get_mp_context", forks.context):
            return AsyncLLM.from_engine_args(args)

    llm = loop.run_until_complete(start())
    yield llm
    llm.shutdown()
    loop.run_until_complete(asyncio.sleep(0.1))  # its tasks end


@pytest.fixture(scope="package")
def serve(llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> Callable[..., AsyncOpenAI]:
    """`serve(*options)` gives a client of a server of this engine, by its options for the front end."""

    def make(*options: str) -> AsyncOpenAI:
        parser = make_arg_parser(FlexibleArgumentParser())
        common = ["--model", str(TRAINED_TARGET), "--served-model-name", "target", "--chat-template", CHAT_TEMPLATE]
        args = parser.parse_args([*common, *options])
        args.structured_outputs_config.reasoning_parser = args.reasoning_parser  # as engines do with their arguments
        app = build_app(args, TASKS, llm.model_config)
        loop.run_until_complete(init_app_state(llm, app.state, args, TASKS))
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        return AsyncOpenAI(base_url="http://engine/v1", api_key="none", http_client=client, max_retries=0)

    return make
