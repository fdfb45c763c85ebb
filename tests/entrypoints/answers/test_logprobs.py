"""The log-probabilities of many tokens at once are those that vLLM's loop keeps."""

from __future__ import annotations

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from vllm_trie.compat.patch import wrap_vllm
from vllm_trie.entrypoints.answers.logprobs import update_answer_logprobs


@pytest.mark.parametrize("num_logprobs", [0, 1, 4, 5, 9, -1])
def test_a_request_keeps_its_own_number_of_logprobs_whatever_others_in_its_batch_ask_for(num_logprobs: int) -> None:
    wrap_vllm("vllm_trie.entrypoints.answers.logprobs")
    token_ids = np.array([[5, 7, 5, 9, 0, 0], [8, 8, 3, 4, 0, 0]])  # of a batch with 5, two of them padding
    logprobs = np.array([[-0.3, -0.1, -0.3, -2.0, -np.inf, -np.inf], [-0.7, -0.7, -1.1, -3.0, -np.inf, -np.inf]])
    rows = LogprobsLists(token_ids, logprobs.astype(np.float32), np.array([2, 1]))

    def processor() -> LogprobsProcessor:
        return LogprobsProcessor(None, FlatLogprobs(), None, 0.0, num_logprobs, None)

    vllms, own = processor(), processor()
    update_answer_logprobs.original(vllms, rows)
    own._update_sample_logprobs(rows)
    assert own == vllms
