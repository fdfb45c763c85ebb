"""Checks the numbers of a request against the limits of its engine, before anything is scheduled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm_trie.messages import MOST_DRAFTS
from vllm_trie.options.contrast import check_contrast_length
from vllm_trie.options.parts import MOST_STOP_CHARACTERS, MOST_STOP_LENGTH, MOST_STOPS
from vllm_trie.options.request import BeamParams, SearchParams, StepOptions
from vllm_trie.options.shown import shown_option
from vllm_trie.options.speculation import check_draft_width_option
from vllm_trie.speculative_config import (
    most_speculative_config_drafts,
    speculative_config_layers,
    speculative_config_shorter_length,
)
from vllm_trie.supported_engines import plugin_config_of
from vllm_trie.trie.blocks import least_trie_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

MOST_OPEN = 1 << 16  # candidates of a search by steps that remembers those of all rounds
MOST_TRACED = 1 << 18  # tokens of beams and drafts in the trace of one search
MOST_IN_ONE_ROW = MOST_DRAFTS  # beams with memory_mode: no forest has a wider layer
MOST_WAITING = 16  # candidates of a round of steps, per row of the engine


@dataclass(frozen=True)
class RequestLimits:
    """The limits of one engine."""

    max_num_seqs: int
    vocab_size: int
    block_size: int
    num_blocks: int | None  # None while the engine has not sized its KV cache
    max_beam_width: int | None = None  # the engine's option
    has_window: bool = False  # some layers have window attention, and may free the prompt's first blocks
    num_draft_layers: int = 0  # layers of drafts that one forward pass can verify
    most_contrasted: int | None = None  # tokens that the draft model takes, where these are fewer than the target's


def request_limits_of_engine(vllm_config: VllmConfig) -> RequestLimits:
    """The limits of the engine with this configuration."""
    cache = vllm_config.cache_config
    return RequestLimits(
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        vocab_size=vllm_config.model_config.get_vocab_size(),
        block_size=cache.block_size,
        num_blocks=cache.num_gpu_blocks - 1 if cache.num_gpu_blocks else None,
        max_beam_width=plugin_config_of(vllm_config).max_beam_width,
        has_window=vllm_config.model_config.get_sliding_window() is not None,
        num_draft_layers=speculative_config_layers(vllm_config),
        most_contrasted=speculative_config_shorter_length(vllm_config),
    )


class BlocksNeeded(NamedTuple):
    """The numbers that determine how many KV blocks a request needs at least."""

    prompt_length: int
    num_beams: int  # different ones that there can be
    num_encoded: int = 0  # outputs of the encoder, in encoder-decoder models


def validate_request(
    params: SamplingParams, beam: BeamParams, limits: RequestLimits, needed: BlocksNeeded, name: str = "beam_width"
) -> None:
    """Check the numbers of one request against its engine, before anything is scheduled.

    Args:
        params: The request's own copy, with `max_tokens` and stop tokens filled in.
        beam: Its beam options.
        name: The user's name for the width, in refusals.

    Raises:
        ValueError: names the option, its value and what would work.
    """
    check_request_widths(params.n, beam, limits, name)
    check_request_stops(params)
    if params.max_tokens is not None and beam.sample_first > params.max_tokens:
        raise ValueError(f"sample_first={beam.sample_first} exceeds max_tokens={params.max_tokens}; lower it")
    check_draft_width_option(beam, limits.vocab_size)
    _check_request_trace(beam, params.max_tokens or 1, limits.num_draft_layers)
    check_contrast_length(beam.contrast, needed.prompt_length, params.max_tokens or 1, limits.most_contrasted)
    if limits.num_blocks is None:
        return
    prompt_length, rows, num_encoded = needed
    if beam.memory_mode or params.max_tokens == 1:  # in the step of its prompt, a search is one row
        rows = 1
    shared_length = 0 if limits.has_window else prompt_length
    blocks = least_trie_blocks(shared_length, rows, limits.block_size) + -(-num_encoded // limits.block_size)
    if blocks > limits.num_blocks:
        encoded = f" and {num_encoded} encoder outputs" if num_encoded else ""
        raise ValueError(
            f"{name}={beam.beam_width} with a prompt of {prompt_length} tokens{encoded} needs at least {blocks} KV "
            f"blocks, and the engine has {limits.num_blocks}; lower it or give the KV cache more memory"
        )


def check_request_widths(n: int, beam: SearchParams, limits: RequestLimits, name: str = "beam_width") -> None:
    """Refuse more beams or candidates than this engine allows, and `n` above the number of beams."""
    check_request_n(n, beam, name)
    width, rows = beam.beam_width, limits.max_num_seqs
    if limits.max_beam_width is not None and width > limits.max_beam_width:
        raise ValueError(
            f"{name}={width} exceeds max_beam_width={limits.max_beam_width}, the limit of this engine; lower it"
        )
    if isinstance(beam, BeamParams) and beam.memory_mode:
        if width > MOST_IN_ONE_ROW:
            raise ValueError(f"{name}={width} exceeds {MOST_IN_ONE_ROW}, the most with memory_mode; lower it")
    elif width > rows:
        raise ValueError(f"{name}={width} exceeds max_num_seqs={rows}; lower it, or raise --max-num-seqs")
    if isinstance(beam, StepOptions) and width * beam.candidates > MOST_WAITING * rows:
        raise ValueError(
            f"candidates={beam.candidates} for each of {name}={width} exceed {MOST_WAITING} times "
            f"max_num_seqs={rows} in all; lower one of them, or raise --max-num-seqs"
        )
    if isinstance(beam, StepOptions) and beam.order != "breadth":  # what is not expanded stays open
        num_open = width * beam.candidates * (beam.max_steps or 1)
        if num_open > MOST_OPEN:
            raise ValueError(
                f"max_steps={shown_option(beam.max_steps)} with {width * beam.candidates} candidates each and "
                f'order="{beam.order}" might keep more than {MOST_OPEN:,} open; lower one of them'
            )


def check_request_stops(params: SamplingParams) -> None:
    """Refuse more or longer stop strings than a search can look for in each step of each beam."""
    strings, size = params.stop or (), sum(map(len, params.stop or ()))
    if len(strings) > MOST_STOPS:
        raise ValueError(
            f"stop has {len(strings):,} strings, and in a beam search may have {MOST_STOPS}; leave some out"
        )
    if (longest := max(map(len, strings), default=0)) > MOST_STOP_LENGTH:
        raise ValueError(
            f"stop has a string of {longest:,} characters, and in a beam search may have {MOST_STOP_LENGTH}; shorten it"
        )
    if size > MOST_STOP_CHARACTERS:
        raise ValueError(
            f"stop has {size:,} characters in all, and in a beam search may have {MOST_STOP_CHARACTERS:,}; leave some "
            "strings out"
        )


def _check_request_trace(beam: BeamParams, max_tokens: int, num_layers: int) -> None:
    """Refuse a trace that might be too large to send and to draw."""
    num_nodes = beam.beam_width + most_speculative_config_drafts(beam, num_layers)  # of a step, at most
    most = max_tokens * num_nodes
    if beam.trace and most > MOST_TRACED:
        instead = 'lower one of them, or pass speculation="off"' if num_nodes > beam.beam_width else "lower one of them"
        raise ValueError(
            f"trace=True with {beam.beam_width} beams, {num_nodes - beam.beam_width} drafts per step and "
            f"max_tokens={max_tokens} might hold {most:,} tokens, and at most {MOST_TRACED:,} are allowed; {instead}"
        )


def check_request_n(n: int, beam: SearchParams, name: str = "beam_width") -> None:
    """Refuse `n` that is not an integer, or above the number of beams."""
    if type(n) is not int:
        raise ValueError(f"n={shown_option(n)} is not a number of hypotheses; pass an integer from 1 to {name}")
    if n > beam.beam_width:
        raise ValueError(f"n={n} exceeds {name}={beam.beam_width}; a search returns at most one hypothesis per beam")
