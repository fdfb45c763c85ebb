"""All that the plugin does differently for different supported versions of vLLM."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_trie.compat.sources import installed_vllm, minor_vllm_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import BeamSearchParams
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec


class OwnBeamsOfVLLM(NamedTuple):
    """The rules of vLLM's own beam search, which semantics="vllm" reproduces."""

    counts_prompt: bool  # in the length by which hypotheses compete; a final stop token then does not count
    stops_by_generation_config: bool  # at the EOS tokens of generation_config.json, as well as the tokenizer's
    has_allowlist: bool  # `allowed_token_ids` removes tokens without renormalizing the rest


_OWN_BEAMS = {
    "0.32": OwnBeamsOfVLLM(counts_prompt=True, stops_by_generation_config=False, has_allowlist=False),
    "0.33": OwnBeamsOfVLLM(counts_prompt=False, stops_by_generation_config=True, has_allowlist=True),
}


def vllm_beams_have_allowlist(params: BeamSearchParams) -> bool:
    """Whether a request to vLLM's own beam search restricts tokens by `allowed_token_ids`."""
    return own_vllm_beams().has_allowlist and params.allowed_token_ids is not None


def is_refusal_of_paused_vllm(error: Exception) -> bool:
    """Whether an engine refused a request because it is paused; 0.32 lets requests wait."""
    if minor_vllm_version(installed_vllm().version) == "0.32":
        return False
    from vllm.exceptions import RetryableRequestError

    return isinstance(error, RetryableRequestError)


def vllm_beams_eos_ids(generation_config: dict[str, Any], eos_token_id: int | None) -> set[int]:
    """The tokens that end a beam in vLLM's own beam search.

    Args:
        generation_config: The fields of generation_config.json.
        eos_token_id: Of the tokenizer.
    """
    if not own_vllm_beams().stops_by_generation_config:
        return set() if eos_token_id is None else {eos_token_id}
    from vllm.entrypoints.generate.beam_search.utils import get_beam_search_eos_token_ids

    return get_beam_search_eos_token_ids(generation_config, eos_token_id)


def vllm_workers_ask_triton() -> bool:
    """Whether vLLM's workers, not only its configuration, refuse Model Runner V2 without Triton."""
    return minor_vllm_version(installed_vllm().version) != "0.32"


def planned_vllm_kv_cache(vllm_config: VllmConfig, specs: dict[str, KVCacheSpec]) -> tuple[list[KVCacheGroupSpec], int]:
    """The KV cache groups that an engine will have, and the bytes of a block, before it has a KV cache.

    Args:
        vllm_config: Of the engine, for a single pipeline stage.
        specs: The KV cache spec of each layer.
    """
    if minor_vllm_version(installed_vllm().version) == "0.32":
        from vllm.v1.core.kv_cache_utils import _pool_bytes_per_block, get_kv_cache_groups

        groups = get_kv_cache_groups(vllm_config, specs)
        return groups, _pool_bytes_per_block(vllm_config, groups)
    from vllm.v1.core import kv_cache_planning as planning
    from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder

    builder = get_kv_cache_config_builder(vllm_config)
    groups = planning.get_kv_cache_groups_from_builder(builder, vllm_config, specs)
    return groups, planning._pool_bytes_per_block_from_builder(builder, vllm_config, groups)


@cache
def own_vllm_beams() -> OwnBeamsOfVLLM:
    """The rules of the installed vLLM."""
    return _OWN_BEAMS[minor_vllm_version(installed_vllm().version)]
