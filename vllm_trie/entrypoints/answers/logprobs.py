"""Lets vLLM's `LogprobsProcessor` take the log-probabilities of a whole hypothesis at once.

vLLM fills `cumulative_logprob` only if it also decodes every token for `logprobs`, which costs a tenth of a short
search. So for requests with one output and without log-probabilities, the engine sends only their sum: a
log-probability without token ids. `LLM.beam_search` returns so many log-probabilities that vLLM's loop over them would
cost more than the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from vllm_trie.compat.patch import wraps_vllm


@wraps_vllm("_update_sample_logprobs", LogprobsProcessor)
def update_answer_logprobs(
    original: Callable[..., None], self: LogprobsProcessor, logprobs_lists: LogprobsLists
) -> None:
    if logprobs_lists.logprob_token_ids.size == 0:
        total = (self.cumulative_logprob or 0.0) + float(logprobs_lists.logprobs.sum())
        self.cumulative_logprob = None if math.isnan(total) else total  # NaN: no hypothesis
    elif isinstance(self.logprobs, FlatLogprobs) and self.tokenizer is None:
        self.cumulative_logprob = sum(logprobs_lists.logprobs[:, 0].tolist(), self.cumulative_logprob or 0.0)
        assert self.num_logprobs is not None
        _extend_answer_logprobs(self.logprobs, logprobs_lists, self.num_logprobs)
    else:
        original(self, logprobs_lists)


def _extend_answer_logprobs(flat: FlatLogprobs, new: LogprobsLists, num_logprobs: int) -> None:
    """`FlatLogprobs.append_fast` for many tokens: at each position the token itself, then the best, by rank.

    Args:
        num_logprobs: Of this request, -1 for all: `new` has as many columns as the request of its batch with the most.
    """
    width = None if num_logprobs == -1 else num_logprobs + 1
    token_ids, logprobs = new.logprob_token_ids[:, :width], new.logprobs[:, :width]
    count, per_token = token_ids.shape
    ranks = np.tile(np.arange(per_token), (count, 1))
    ranks[:, 0] = new.sampled_token_ranks
    starts = len(flat.logprobs) + per_token * np.arange(count)
    flat.start_indices += starts.tolist()
    flat.end_indices += (starts + per_token).tolist()
    flat.token_ids += token_ids.ravel().tolist()
    flat.logprobs += logprobs.ravel().tolist()
    flat.ranks += ranks.ravel().tolist()
    flat.decoded_tokens += [None] * ranks.size
