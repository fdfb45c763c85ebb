"""Fill `cumulative_logprob` of beam hypotheses whose request did not ask for log-probabilities.

vLLM adds them up only where it also decodes every token for `logprobs`, which costs a tenth of a
short search. The engine therefore sends the sum alone: log-probabilities without token ids.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from vllm_trie.patching import Patch

update_sample_logprobs = Patch("vllm.v1.engine.logprobs:LogprobsProcessor", "_update_sample_logprobs")


def accept_sums() -> None:
    """From now on, take sums of log-probabilities from the engines of this process."""
    if not update_sample_logprobs.is_applied:
        update_sample_logprobs.apply(_accepting_sums(LogprobsProcessor._update_sample_logprobs))


def _accepting_sums(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def update_sample_logprobs(self: LogprobsProcessor, logprobs_lists: LogprobsLists) -> None:
        if logprobs_lists.logprob_token_ids.size == 0:
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + float(logprobs_lists.logprobs.sum())
        else:
            original(self, logprobs_lists)

    return update_sample_logprobs
