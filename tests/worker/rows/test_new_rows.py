"""Models whose rows cannot be copied are refused."""

from __future__ import annotations

import pytest
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from vllm_trie.worker.rows.new_rows import refuse_own_row_state


def test_a_model_with_a_state_of_its_own_is_refused() -> None:
    class NgramModelState(DefaultModelState):
        """Holds the newest tokens of each slot, as that of LongCat-Flash-Lite does."""

    with pytest.raises(
        ValueError, match=r"models with a state of their own, as this one has \(NgramModelState\); start"
    ):
        refuse_own_row_state(object.__new__(NgramModelState))
    refuse_own_row_state(object.__new__(DefaultModelState))
