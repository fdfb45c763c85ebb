"""What vLLM's runner stores per row, and whether all of it is known, so that rows may become copies of others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.encoder_decoder import EncoderDecoderModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState


def refuse_own_row_state(model_state: ModelState) -> None:
    """Refuses a model with its own per-row state, which rows could not take over when they fork.

    Raises:
        ValueError: naming the state.
    """
    kind = type(model_state)
    if kind not in (DefaultModelState, EncoderDecoderModelState, MambaHybridModelState):
        raise ValueError(
            f"trie_beam does not support models with a state of their own, as this one has ({kind.__name__}); start "
            "vLLM without the plugin"
        )


def may_copy_rows(runner: GPUModelRunner) -> bool:
    """Whether `Rows.add_copies` copies everything that a runner stores of a request."""
    sampler = runner.sampler
    has_budgets = sampler is not None and sampler.thinking_budget_state.enabled
    return not any((has_budgets, runner.adaptive_verification is not None))


def row_arrays_by_slot(runner: GPUModelRunner) -> Iterator[np.ndarray]:
    """vLLM's host arrays by slot, in any version: sampling options, numbers of tokens and the like."""
    sampler, num_slots = runner.sampler, runner.max_num_reqs
    of_sampler = () if sampler is None else (sampler, *sampler.logits_processors, *vars(sampler).values())
    embeds = getattr(runner.model_state, "prompt_embeds_state", None)  # where `prompt_embeds` are, and how many
    for owner in (*of_sampler, runner.req_states, runner.prompt_logprobs_worker, runner.lora_state, embeds):
        values = vars(owner).values() if type(owner).__module__.startswith("vllm.v1.worker.gpu.") else ()
        for value in values:
            array = value.np if isinstance(value, UvaBackedTensor) else value
            if isinstance(array, np.ndarray) and array.shape[:1] == (num_slots,):
                yield array
