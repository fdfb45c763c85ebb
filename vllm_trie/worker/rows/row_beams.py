"""Gathers what the rows of groups carry: from the groups, the runner, and the scheduler's message.

Everything that depends on which constraints there are is here; `select`, `draft` and `verify` know none of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from vllm_trie.messages import Resumed
from vllm_trie.search.beams import SearchBeams, States
from vllm_trie.search.constraints.catalog import ConstraintAlongItems
from vllm_trie.search.constraints.constraint import NOTHING, Constraint, ConstraintSource
from vllm_trie.search.constraints.grammar import unpacked_constraint_mask
from vllm_trie.search.devices import uploaded_for_search
from vllm_trie.search.rules import SearchRules
from vllm_trie.search.step import search_log_probabilities
from vllm_trie.worker.rows.catalogs import RowCatalogs
from vllm_trie.worker.rows.rows import GroupRows, Rows, beams_of_rows


class RowBeams:
    """What the rows of one runner carry.

    Args:
        rows: The runner's rows, for their tokens.
        catalogs: On its device.
    """

    def __init__(self, rows: Rows, catalogs: RowCatalogs) -> None:
        self._rows = rows
        self._catalogs = catalogs

    def begin(self, rules: SearchRules, resumed: Resumed | None, excludes: str | None = None) -> States:
        """The states of rows that enter: one row without tokens, or all rows that continue after a preemption.

        Args:
            excludes: The digest of the search's closed nodes, if there are any.
        """
        device, num_rows = self._rows.device, 1 if resumed is None else len(resumed.histories)
        keys = [key for key in self._constraints(rules) if key.source is ConstraintSource.LAST_STEP]
        states = {key: key.begin(num_rows, device) for key in keys}
        if excludes is not None:
            part = self._catalogs.closed.part(excludes)
            states = {
                key: key.closing(state, part) if isinstance(key, ConstraintAlongItems) else state
                for key, state in states.items()
            }
        if resumed is None:
            return states
        for tokens in uploaded_for_search(resumed.histories.astype(np.int64), device).T if keys else ():
            states = {key: key.advance(state, tokens[None]) for key, state in states.items()}
        return states

    def before_step(
        self,
        rules: SearchRules,
        groups: Sequence[GroupRows],
        num_tokens: np.ndarray,
        masks: Sequence[torch.Tensor],
        vocab_size: int,
        amateur: torch.Tensor | None,
    ) -> SearchBeams:
        """What the rows of groups with these rules, which have constraints, carry before they select.

        Args:
            rules: The rules of all groups.
            groups: G of them.
            num_tokens: [G], tokens of each row of a group.
            masks: By group: [r, V / 32], the tokens that its rows may take, packed; empty without a grammar, or if the
                step was scheduled before the end of the search was known.
            vocab_size: V.
            amateur: [G, r, V] logits of a draft model, if the rules contrast it.
        """
        beams = beams_of_rows(groups)
        states, keys = dict(beams.states), self._constraints(rules)
        for key in keys:
            if key.source is ConstraintSource.TOKENS:
                states[key] = self._tokens(np.array([group.slots for group in groups]), num_tokens)
            elif key.source is ConstraintSource.MASKS and masks:
                states[key] = unpacked_constraint_mask(torch.stack([*masks]), vocab_size)
            elif key.source is ConstraintSource.AMATEUR:
                assert amateur is not None, "the front end refuses contrast without a draft model"
                states[key] = search_log_probabilities(amateur, temperature=rules.filters.temperature)
        return beams._replace(states={key: states[key] for key in keys if key in states})  # in the order of the rules

    def before_drafts(self, rules: SearchRules, group: GroupRows, num_tokens: int, num_layers: int) -> SearchBeams:
        """What the rows of one group carry, before `num_layers` layers of drafts grow from them."""
        states = dict(group.beams.states)
        for key in self._constraints(rules):
            if key.source is ConstraintSource.TOKENS:
                tokens = self._tokens(group.slots[None], np.array([num_tokens]))
                states[key] = pad(tokens, (num_layers, 0), value=NOTHING)
        return group.beams._replace(states=states)

    def _constraints(self, rules: SearchRules) -> list[Constraint]:
        """The constraints of these rules, on this device."""
        return [key.on(self._catalogs.tries, rules.stops.token_ids) for key in rules.constraints]

    def _tokens(self, slots: np.ndarray, num_tokens: np.ndarray) -> torch.Tensor:
        """[G, r, L] int32, the tokens of rows in `slots` [G, r]; each group's rows have `num_tokens` [G]."""
        return row_tokens_flush_right(self._rows.tokens(slots, 0, int(num_tokens.max())), num_tokens)


def row_tokens_flush_right(tokens: torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
    """Right-aligned histories of different lengths, with `NOTHING` before the shorter ones.

    Args:
        tokens: [G, r, L], left-aligned; L is the greatest length.
        lengths: [G], of all rows of each group.
    """
    longest = tokens.shape[-1]
    if (lengths == longest).all():
        return tokens
    missing = uploaded_for_search(longest - lengths, tokens.device)[:, None, None]
    at = (torch.arange(longest, device=tokens.device) - missing).expand(tokens.shape)
    return tokens.gather(-1, at.clamp(min=0)).where(at >= 0, NOTHING)
