"""Grammars of beam groups: a matcher per row, which forks with its beam, and the masks of all rows at once.

A matcher is vLLM's `StructuredOutputGrammar`. Those of xgrammar and guidance can be copied together with their state.
The front end refuses requests for other backends. But an engine has one backend, that of its first request with
structured outputs, so the scheduler checks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from vllm_trie.messages import RowMasks
from vllm_trie.options import BeamParams
from vllm_trie.search.constraints.grammar import GrammarConstraint

if TYPE_CHECKING:
    from typing_extensions import TypeIs
    from vllm.v1.request import Request
    from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
    from vllm.v1.structured_output.request import StructuredOutputRequest
    from xgrammar import BatchGrammarMatcher, GrammarMatcher


class GrammarError(ValueError):
    """A backend's matcher refuses a token that its mask allowed: a fault of the backend."""


def why_no_group_grammar(compiled: StructuredOutputGrammar | Exception) -> str | None:
    """Why a search cannot use the grammar that vLLM compiled for a request; None if it can."""
    if isinstance(compiled, Exception):
        return f"structured_outputs cannot be compiled: {compiled}"
    if isinstance(compiled, XgrammarGrammar) or _is_guidance_group_grammar(compiled):
        return None
    return (
        "structured_outputs cannot follow beams here: an earlier request has bound the engine to a backend whose state "
        f"cannot fork ({type(compiled).__name__}); start it with structured_outputs_config.backend=xgrammar or guidance"
    )


def _is_guidance_group_grammar(grammar: StructuredOutputGrammar) -> TypeIs[GuidanceGrammar]:
    from vllm.v1.structured_output.backend_guidance import GuidanceGrammar  # here: most engines never need it

    return isinstance(grammar, GuidanceGrammar)


class GroupGrammar:
    """The state of each row of a group in the group's grammar.

    Args:
        request: Has the grammar once vLLM has compiled it. That matcher is never advanced, only copied.
        num_seen: See `GrammarConstraint`.
    """

    def __init__(self, request: StructuredOutputRequest, num_seen: int | None) -> None:
        self._request = request
        self.constraint = GrammarConstraint(num_seen)
        self.restart()

    def restart(self) -> None:
        """Match from the beginning again, in one row."""
        self._rows: list[StructuredOutputGrammar | None] | None = None

    @property
    def rows(self) -> list[StructuredOutputGrammar | None]:
        """The matcher of each row; None for a row without a beam."""
        if self._rows is None:
            grammar = self._request.grammar
            assert isinstance(grammar, StructuredOutputGrammar), "no step is scheduled before the grammar is compiled"
            self._rows = [_fork_group_grammar(grammar)]
        return self._rows

    def advance(self, parents: np.ndarray, tokens: np.ndarray, scores: np.ndarray) -> None:
        """Follow one step of the search.

        Args:
            parents: [b] for each row, the row whose beam it continues.
            tokens: [b] for each row, its new token.
            scores: [b] for each row; -inf if it has no beam.

        Raises:
            GrammarError: the grammar refuses a token that its mask allowed.
        """
        before = self.rows
        of_rows = enumerate(zip(parents.tolist(), tokens.tolist(), scores.tolist(), strict=True))
        children = [(row, parent, token) for row, (parent, token, score) in of_rows if score > -np.inf]
        last_child = {parent: row for row, parent, _ in children}
        after: list[StructuredOutputGrammar | None] = [None] * len(parents)
        for row, parent, token in children:
            matcher = before[parent]
            assert matcher is not None, f"row {row} continues row {parent}, which has no beam"
            # The last child of a parent takes over the parent's matcher.
            after[row] = matcher = matcher if last_child[parent] == row else _fork_group_grammar(matcher)
            if not matcher.accept_tokens("", [token]):
                raise GrammarError(f"the grammar of structured_outputs refuses token {token}, which it allowed")
        self._rows = after


def group_grammar_of(request: Request, params: BeamParams) -> GroupGrammar | None:
    """The matchers of a group, if its request has a grammar."""
    if request.structured_output_request is None:
        return None
    return GroupGrammar(
        request.structured_output_request, 2 * params.beam_width if params.semantics == "vllm" else None
    )


def _fork_group_grammar(grammar: StructuredOutputGrammar) -> StructuredOutputGrammar:
    if isinstance(grammar, XgrammarGrammar):
        return replace(grammar, matcher=grammar.matcher.fork())
    assert _is_guidance_group_grammar(grammar), f"a search under {type(grammar).__name__} is refused before"
    return replace(grammar, ll_matcher=grammar.ll_matcher.deep_copy())


def fill_group_grammar_masks(backend: StructuredOutputBackend, groups: Mapping[str, GroupGrammar]) -> RowMasks:
    """Masks of the tokens that may come next in each row of these groups. A row without a beam may take any."""
    places, matchers = {}, list[StructuredOutputGrammar | None]()
    for group_id, of_group in groups.items():
        places[group_id] = slice(len(matchers), len(matchers) + len(of_group.rows))
        matchers += of_group.rows
    bits = backend.allocate_token_bitmask(len(matchers))
    bits.fill_(-1)
    together: list[tuple[int, GrammarMatcher]] = []
    for row, matcher in enumerate(matchers):
        if matcher is None:
            continue
        if matcher.is_terminated():  # the grammar is complete but the hypothesis has not finished: nothing may follow
            bits[row] = 0
        elif isinstance(matcher, XgrammarGrammar):
            together.append((row, matcher.matcher))
        else:
            matcher.fill_bitmask(bits, row)
    if together:
        rows, of_xgrammar = map(list, zip(*together, strict=True))
        _xgrammar_group_batch().batch_fill_next_token_bitmask(of_xgrammar, bits, rows)
    return RowMasks(places, bits.numpy())


@cache
def _xgrammar_group_batch() -> BatchGrammarMatcher:
    from xgrammar import BatchGrammarMatcher

    return BatchGrammarMatcher()
