"""What clients of a server's catalogs know it by stays."""

from __future__ import annotations

from fastapi import FastAPI

from vllm_trie.entrypoints.server.catalog_api import router


def test_clients_made_from_the_schema_go_on() -> None:
    app = FastAPI()
    app.include_router(router)
    schema = app.openapi()
    operations = {of_path[how]["operationId"] for of_path in schema["paths"].values() for how in of_path}
    assert operations == {"list_catalogs_v1_catalogs_get", "load_v1_catalogs__name__post"}
    assert "NewVersion" in schema["components"]["schemas"]
