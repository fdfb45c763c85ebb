"""Which KV connectors an engine with beams supports, and why not the others; checked when an engine is configured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig

UNSUPPORTED_CONNECTORS = {  # connectors of vLLM, and why
    "HiSparseConnector": "which moves the KV of decoding rows to the host, and only for ordinary requests",
    "ExampleHiddenStatesConnector": "which saves hidden states of requests that do not generate",
}


def unsupported_kv_transfer_config(vllm_config: VllmConfig) -> dict[str, bool]:
    """Which uses of KV connectors make beams impossible, and whether this engine has them.

    A connector sees only the prompt of a search (`engine.kv_transfer`), which is all that most connectors need.
    """
    if (config := vllm_config.kv_transfer_config) is None:
        return {}
    names = {connector.kv_connector for connector in _connectors_of(config)}
    return {
        **{f"kv_transfer_config with {name}, {why}": name in names for name, why in UNSUPPORTED_CONNECTORS.items()},
        "kv_transfer_config on an encoder-decoder model": vllm_config.model_config.is_encoder_decoder,
    }


def connectors_reading_freed_blocks(vllm_config: VllmConfig) -> list[str]:
    """Connectors that save blocks before others overwrite them, and so must learn of it in time."""
    if (config := vllm_config.kv_transfer_config) is None:
        return []
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    found = {str(one.kv_connector): KVConnectorFactory.get_connector_class(one) for one in _connectors_of(config)}
    stock = KVConnectorBase_V1.handle_preemptions
    return [name for name, connector in found.items() if connector.handle_preemptions is not stock]


def _connectors_of(config: KVTransferConfig) -> Iterator[KVTransferConfig]:
    """The connector, or those inside vLLM's `MultiConnector`."""
    if config.kv_connector != "MultiConnector":
        yield config
        return
    children: list[dict[str, Any]] = config.kv_connector_extra_config.get("connectors", [])
    for child in children:
        yield from _connectors_of(type(config)(**{"engine_id": config.engine_id, **child}))
