"""Logits of few tokens, for searches along catalogs that need no others.

In a step with such searches, `runner.sample` puts `NarrowSelectionHead.project` in place of vLLM's computation of
logits. vLLM passes its result to our sampler unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from vllm_trie.worker.select.cohort import SelectionBatchPlan, selection_index_of

logger = init_logger("vllm.trie_beam.narrow")

# A level has at most one of this many parts of the vocabulary: such steps take less memory than is measured for as many
# rows with all logits, see `startup.widest_steps`.
PARTS = 5
TOKENS_AT_A_TIME = 2048  # whose rows of the head's weights are copied at a time
ROWS_TO_COMPARE = 4
TOLERANCE = 8  # units in the last place of the greatest logit, besides what sums in another order may differ by
OF_SUMS = 1e-5


class NarrowLogits(NamedTuple):
    """Logits of the rows of a cohort."""

    tokens: torch.Tensor  # [K] int64, ascending
    values: torch.Tensor  # [G * r, K]


class SelectionLogits(NamedTuple):
    """The logits of a step in which some rows need few of them."""

    whole: torch.Tensor  # [N', V], of the other rows
    narrow: list[NarrowLogits]  # of each cohort that narrows


class NarrowSelectionHeadError(Exception):
    """The reason why logits of few tokens cannot be computed alone."""


@dataclass
class _SelectionHeadRows:
    """Some rows of a head, with the attributes that `LogitsProcessor` reads of a head."""

    weight: torch.Tensor
    quant_method: Any
    tp_size: int = 1
    cpu_linear = staticmethod(linear)


class NarrowSelectionHead:
    """Computes logits of some tokens alone, by the model's own code, which gets only some rows of its head.

    A model may do anything with its logits. So before the first step that needs few, some are compared with those that
    the model computes as usual. If they differ, steps compute all logits, and the log reports it once.

    Args:
        model: vLLM's.
        vllm_config: The engine's.
        counts_nans: vLLM counts NaNs in all logits of a step.
    """

    def __init__(self, model: Any, vllm_config: VllmConfig, counts_nans: bool) -> None:
        self._model, self._config, self._counts_nans = model, vllm_config, counts_nans
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self._most: int | None = None  # once it is known
        self._processor: Any = None

    def most_tokens(self, hidden: torch.Tensor) -> int:
        """How many tokens a level may have for its logits to be computed alone; 0: all logits are always computed.

        Args:
            hidden: [T, H], from which logits are computed.
        """
        if self._most is None:
            self._most = self._vocab_size // PARTS
            try:
                with gpu_sync_allowed():
                    self._compare(hidden)
            except Exception as error:  # whatever the model's own code raises
                self._most = 0
                logger.info("searches with catalog_renormalize compute the logits of all tokens: %s", error)
            else:
                text = "searches with catalog_renormalize compute only a level's logits if it has at most %d tokens"
                logger.info(text, self._most)
        return self._most

    def project(
        self, plan: SelectionBatchPlan, levels: Sequence[torch.Tensor], hidden: torch.Tensor
    ) -> SelectionLogits:
        """Computes the logits of a step; for cohorts that narrow, only those of their levels.

        Args:
            plan: The step's.
            levels: Of these cohorts.
            hidden: [N, H], of all rows.
        """
        narrow = [
            NarrowLogits(tokens, self.logits_of(hidden[cohort.of_hidden_states], tokens))
            for cohort, tokens in zip(plan.narrow, levels, strict=True)
        ]
        if len(plan.whole):
            whole = self._model.compute_logits(hidden[selection_index_of(plan.whole, hidden.device)])
        else:
            whole = hidden.new_empty(0, self._vocab_size)
        return SelectionLogits(whole, narrow)

    def logits_of(self, hidden: torch.Tensor, tokens: torch.Tensor, on_host: bool = False) -> torch.Tensor:
        """[N, K] logits of tokens [K] from hidden states [N, H]; with `on_host`, the model gets them on the host."""
        parts = []
        for some in torch.split(tokens, TOKENS_AT_A_TIME):
            with self._head_of(some, on_host):
                parts.append(self._model.compute_logits(hidden))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    @contextmanager
    def _head_of(self, tokens: torch.Tensor, on_host: bool) -> Iterator[None]:
        """A context in which the model only has these rows of its head."""
        processor = self._processor

        def forward(
            lm_head: Any, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None = None, *args: Any
        ) -> torch.Tensor | None:
            if not isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod | UnquantizedLinearMethod):
                raise NarrowSelectionHeadError(f"its head is quantized, by {type(lm_head.quant_method).__name__}")
            rows = _SelectionHeadRows(lm_head.weight[tokens], lm_head.quant_method)
            bias = embedding_bias if embedding_bias is None else embedding_bias[tokens]
            logits = type(processor).forward(processor, rows, hidden_states, bias, *args)
            return logits.cpu() if on_host and logits is not None else logits

        vars(processor)["forward"] = forward
        try:
            yield
        finally:
            del vars(processor)["forward"]

    def _compare(self, hidden: torch.Tensor) -> None:
        """Raises an error unless logits of few tokens equal those that the model computes as usual."""
        config = self._config
        for is_so, reason in (
            (config.lora_config is not None, "adapters may change its head"),
            (config.parallel_config.tensor_parallel_size > 1, "tensor-parallel ranks have parts of its head"),
            (self._counts_nans, "VLLM_COMPUTE_NANS_IN_LOGITS counts NaNs in all logits"),
        ):
            if is_so:
                raise NarrowSelectionHeadError(reason)
        processors = [module for module in self._model.modules() if isinstance(module, LogitsProcessor)]
        if len(processors) != 1:
            raise NarrowSelectionHeadError(f"the model has {len(processors)} layers that compute logits, not one")
        (self._processor,) = processors
        random = torch.Generator(hidden.device).manual_seed(0)
        shape = ROWS_TO_COMPARE, hidden.shape[-1]
        rows = torch.randn(shape, generator=random, dtype=hidden.dtype, device=hidden.device)
        expected = self._model.compute_logits(rows).float()
        # Not all of a small vocabulary: an operation that depends on a logit's place would find it in place.
        last = expected.shape[-1] - 1
        count = min(TOKENS_AT_A_TIME, expected.shape[-1] // 2)
        tokens = torch.arange(count, device=hidden.device) * last // max(count - 1, 1)
        # First on the host, where an index out of range raises an error: a GPU would be lost with it.
        self.logits_of(rows, tokens, on_host=True)
        expected, found = expected[:, tokens], self.logits_of(rows, tokens)
        if found.shape != expected.shape:
            raise NarrowSelectionHeadError("the model computes logits of all tokens, even from a part of its head")
        greatest = float(expected[expected.isfinite()].abs().max())
        tolerance = (TOLERANCE * torch.finfo(found.dtype).eps + OF_SUMS) * greatest
        if not torch.allclose(found.float(), expected, rtol=0.0, atol=tolerance):
            raise NarrowSelectionHeadError("logits of a few tokens differ when they are computed alone")
