"""Which connectors an engine with beams refuses, also those that vLLM itself starts on GPUs alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from vllm_trie.kv_transfer_config import (
    UNSUPPORTED_CONNECTORS,
    connectors_reading_freed_blocks,
    unsupported_kv_transfer_config,
)


def config_of(*names: str, is_encoder_decoder: bool = False) -> Any:
    """What is read of an engine's configuration."""
    children = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
    transfer = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": children}
    )
    model = SimpleNamespace(is_encoder_decoder=is_encoder_decoder)
    return SimpleNamespace(kv_transfer_config=transfer if names else None, model_config=model)


@pytest.mark.parametrize("name", UNSUPPORTED_CONNECTORS)
def test_a_connector_that_beams_have_nothing_for_is_refused_by_its_name(name: str) -> None:
    found = unsupported_kv_transfer_config(config_of("ExampleConnector", name))
    assert [what for what, is_used in found.items() if is_used] == [
        f"kv_transfer_config with {name}, {UNSUPPORTED_CONNECTORS[name]}"
    ]


def test_encoder_decoder_models_have_no_connector() -> None:
    found = unsupported_kv_transfer_config(config_of("ExampleConnector", is_encoder_decoder=True))
    assert found["kv_transfer_config on an encoder-decoder model"]
    assert unsupported_kv_transfer_config(config_of(is_encoder_decoder=True)) == {}


def test_connectors_that_read_freed_blocks_are_known() -> None:
    names = ("ExampleConnector", "OffloadingConnector", "SimpleCPUOffloadConnector", "DecodeBenchConnector")
    assert connectors_reading_freed_blocks(config_of(*names)) == ["OffloadingConnector", "SimpleCPUOffloadConnector"]
    assert connectors_reading_freed_blocks(config_of()) == []
