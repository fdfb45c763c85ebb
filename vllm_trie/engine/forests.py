"""What the next step of a search may be, as far as one goes that takes plain steps alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_trie.engine.stats import SearchCounts


class Forests:
    """When the next step of a search may be several: of one that does not speculate."""

    def __init__(self) -> None:
        self.drafted_length = 0  # generated tokens of every beam that a draft model, if there is one, has computed

    def restart(self) -> None:
        """The search begins anew."""
        self.drafted_length = 0

    def may_grow(self, length: int) -> bool:
        """Whether the step from beams of this length may be several."""
        return False

    def report(self, counts: SearchCounts) -> dict[str, Any]:
        """What the answer says of them."""
        return {}
