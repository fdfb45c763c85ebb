"""What one engine can hold, and whether a request fits: checked before anything is scheduled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_trie.options import BeamParams, TrieBeamConfig
from vllm_trie.sampling_params import refuse_unsupported, stop_tokens
from vllm_trie.search.rules import num_candidates
from vllm_trie.trie.blocks import least_blocks_to_start

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class EngineLimits:
    """What one engine can hold."""

    max_num_seqs: int
    vocab_size: int
    block_size: int
    num_blocks: int | None  # None while the engine has not sized its KV cache
    max_beam_width: int | None = None  # what the engine's user allows
    has_window: bool = False  # attention layers may forget the prompt's first blocks


def engine_limits(vllm_config: VllmConfig) -> EngineLimits:
    """What this engine can hold."""
    cache = vllm_config.cache_config
    return EngineLimits(
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        vocab_size=vllm_config.model_config.get_vocab_size(),
        block_size=cache.block_size,
        num_blocks=cache.num_gpu_blocks - 1 if cache.num_gpu_blocks else None,
        max_beam_width=TrieBeamConfig.from_additional_config(vllm_config.additional_config).max_beam_width,
        has_window=vllm_config.model_config.get_sliding_window() is not None,
    )


def validate(params: SamplingParams, beam: BeamParams, prompt_len: int, limits: EngineLimits) -> None:
    """Check one request against its engine, before anything is scheduled.

    Args:
        params: The request's own copy, `max_tokens` and stop tokens filled in.
        beam: Its beam options.
        prompt_len: Tokens of the prompt.

    Raises:
        ValueError: naming the option, its value and what would work.
    """
    refuse_unsupported(params, beam)
    check_n(params.n, beam)
    width = beam.beam_width
    if width > limits.max_num_seqs and not beam.memory_mode:
        raise ValueError(
            f"beam_width={width} exceeds max_num_seqs={limits.max_num_seqs}; lower it, or raise --max-num-seqs"
        )
    if limits.max_beam_width is not None and width > limits.max_beam_width:
        raise ValueError(
            f"beam_width={width} exceeds max_beam_width={limits.max_beam_width}, which this engine was started with"
        )
    if params.max_tokens is not None and beam.sample_first > params.max_tokens:
        raise ValueError(f"sample_first={beam.sample_first} exceeds max_tokens={params.max_tokens}; lower it")
    needed = num_candidates(width, len(stop_tokens(params)))
    if needed > limits.vocab_size:
        widest = limits.vocab_size // num_candidates(1, len(stop_tokens(params)))
        raise ValueError(
            f"beam_width={width} ranks {needed} candidates but the vocabulary has {limits.vocab_size} tokens; "
            f"use beam_width <= {widest}"
        )
    if beam.draft_width is not None and beam.draft_width > limits.vocab_size:
        raise ValueError(
            f"draft_width={beam.draft_width} exceeds the vocabulary of {limits.vocab_size} tokens; lower it"
        )
    if limits.num_blocks is not None:
        rows = 1 if beam.memory_mode else width
        blocks = least_blocks_to_start(0 if limits.has_window else prompt_len, rows, limits.block_size)
        if blocks > limits.num_blocks:
            raise ValueError(
                f"beam_width={width} with a prompt of {prompt_len} tokens needs at least {blocks} KV blocks, the "
                f"engine has {limits.num_blocks}; lower it or give the KV cache more memory"
            )


def check_n(n: int, beam: BeamParams) -> None:
    """Refuse to return more hypotheses than there are beams."""
    if n > beam.beam_width:
        raise ValueError(
            f"n={n} exceeds beam_width={beam.beam_width}; a search returns at most one hypothesis per beam"
        )
