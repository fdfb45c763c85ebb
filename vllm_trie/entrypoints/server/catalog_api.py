"""Loads new versions of catalogs and lists of items into a running engine.

In the server these are `/v1/catalogs` and `/v1/exclude`; offline `vllm_trie.load_catalog` and `load_item_list`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict

from vllm_trie.catalog import Catalog
from vllm_trie.compat.patch import wraps_vllm
from vllm_trie.engine.catalogs import LOAD_CATALOG, LOAD_ITEM_LIST
from vllm_trie.entrypoints.requests.catalogs import (
    catalogs_for_requests,
    item_lists_for_requests,
    new_catalog_for_requests,
    new_item_list_for_requests,
)
from vllm_trie.supported_engines import has_beams

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.config import VllmConfig

Read = TypeVar("Read")

# The server requires its API key for all paths under /v1.
router, list_router = APIRouter(prefix="/v1/catalogs"), APIRouter(prefix="/v1/exclude")


@wraps_vllm("register_vllm_serve_api_routers", "vllm.entrypoints.serve")
def register_server_routers(original: Callable[[FastAPI], None], app: FastAPI) -> None:
    """Add the routes below to a server."""
    original(app)
    app.include_router(router)
    app.include_router(list_router)


def load_catalog(llm: LLM, name: str, file: str) -> dict[str, Any]:
    """Load a new version of a catalog into an engine; running searches keep the old one.

    Args:
        llm: Its engine was started with `catalogs` and a `catalog_folder`.
        name: The name of the catalog.
        file: The name of a file in that folder.

    Returns:
        The new version: name, items, bytes, digest.

    Raises:
        ValueError: there is no such catalog, or the engine may not take this file.
    """
    vllm_config = llm.llm_engine.vllm_config
    path, catalog = new_catalog_for_requests(vllm_config, name, file)
    llm.collective_rpc(LOAD_CATALOG, args=(name, path, catalog.digest))
    catalogs_for_requests(vllm_config).name(name, catalog)
    return _catalog_served_as(name, catalog)


def load_item_list(llm: LLM, name: str, file: str) -> dict[str, Any]:
    """Load a new version of a list of items to exclude into an engine; running searches keep the old one.

    Args:
        llm: Its engine was started with `exclude` and a `catalog_folder`.
        name: The name of the list.
        file: The name of a file in that folder.

    Returns:
        The new version: name, items, digest.

    Raises:
        ValueError: there is no such list, or the engine may not take this file.
    """
    vllm_config = llm.llm_engine.vllm_config
    path, version = new_item_list_for_requests(vllm_config, name, file)
    llm.collective_rpc(LOAD_ITEM_LIST, args=(name, path, version.digest))
    item_lists_for_requests(vllm_config)[name] = version
    return {"name": name, **version._asdict()}


# OpenAPI's names of these routes come from the names below.
class NewVersion(BaseModel):
    """The body of a request to load a file."""

    model_config = ConfigDict(extra="forbid")
    file: str


@router.get("")
async def list_catalogs(request: Request) -> list[dict[str, Any]]:
    """List the catalogs of this engine."""
    vllm_config = request.app.state.vllm_config
    if not has_beams(vllm_config):
        return []
    catalogs = catalogs_for_requests(vllm_config)
    return [_catalog_served_as(name, catalogs[name]) for name in catalogs.names]


@router.post("/{name}")
async def load(name: str, version: NewVersion, request: Request) -> dict[str, Any]:
    """Load a new version of a catalog."""
    state = request.app.state
    path, catalog = await _read(new_catalog_for_requests, state.vllm_config, name, version)
    await state.engine_client.collective_rpc(LOAD_CATALOG, args=(name, path, catalog.digest))
    catalogs_for_requests(state.vllm_config).name(name, catalog)
    return _catalog_served_as(name, catalog)


@list_router.get("")
async def list_item_lists(request: Request) -> list[dict[str, Any]]:
    """List the lists of items that requests may exclude."""
    vllm_config = request.app.state.vllm_config
    if not has_beams(vllm_config):
        return []
    return [{"name": name, **version._asdict()} for name, version in item_lists_for_requests(vllm_config).items()]


@list_router.post("/{name}")
async def load_list(name: str, version: NewVersion, request: Request) -> dict[str, Any]:
    """Load a new version of a list."""
    state = request.app.state
    path, read = await _read(new_item_list_for_requests, state.vllm_config, name, version)
    await state.engine_client.collective_rpc(LOAD_ITEM_LIST, args=(name, path, read.digest))
    item_lists_for_requests(state.vllm_config)[name] = read
    return {"name": name, **read._asdict()}


async def _read(
    read: Callable[[VllmConfig, str, str], tuple[str, Read]], vllm_config: VllmConfig, name: str, version: NewVersion
) -> tuple[str, Read]:
    """Read a file that a client has named, in a thread."""
    try:
        return await asyncio.to_thread(read, vllm_config, name, version.file)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None


def _catalog_served_as(name: str, catalog: Catalog) -> dict[str, Any]:
    num_bytes = catalog.num_bytes_on_device
    return {"name": name, "items": catalog.num_items, "bytes": num_bytes, "digest": catalog.digest}
