"""When and how far a group speculates: whether the next step of a search may be several, by a forest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_trie.engine.group import BeamGroupForests
from vllm_trie.messages import MOST_DRAFTS
from vllm_trie.options import BeamParams
from vllm_trie.options.speculation import DRAFTS_PER_BEAM
from vllm_trie.speculation.search.forest_size import DraftAcceptance

if TYPE_CHECKING:
    from vllm_trie.engine.stats import GroupCounts


class GroupForests(BeamGroupForests):
    """The forests of a group that speculates: how large they are, and when the group takes plain steps instead.

    Args:
        params: The search's options.
        width: Beams of the search.
    """

    def __init__(self, params: BeamParams, width: int) -> None:
        self.width, self.is_adaptive = width, params.speculation == "auto"
        self.most_drafts = min(params.draft_width or MOST_DRAFTS, MOST_DRAFTS)  # of one layer
        self.draft_width = min(params.draft_width or DRAFTS_PER_BEAM * width, MOST_DRAFTS)  # unless it is adaptive
        self.acceptance: dict[int, DraftAcceptance] = {}  # by draft width, if the size is adaptive
        self._first_length = params.sample_first  # of beams, from which the group speculates
        self.restart()

    def restart(self) -> None:
        super().restart()
        self.first_length = self._first_length
        self.num_rested = self.num_failed = 0  # steps of the last rest; forests in a row that led nowhere

    def report(self, counts: GroupCounts) -> dict[str, Any]:
        return counts.as_dict()

    def rest(self, length: int, num_steps: int) -> None:
        """Postpones the next forest until `num_steps` plain steps after beams of this length."""
        self.first_length, self.num_rested = max(self._first_length, length + num_steps), num_steps
