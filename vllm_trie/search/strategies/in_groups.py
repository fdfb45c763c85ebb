"""Group beam search: the beams are in groups, each of which avoids the tokens that earlier groups took in this step.

Source: Vijayakumar et al. 2016, Diverse Beam Search, with the Hamming distance, as in transformers 4.56
`_group_beam_search`: the penalty stays in the scores of hypotheses, and a done group is padded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_trie.search.beams import STATELESS, SearchBeams
from vllm_trie.search.devices import NEVER
from vllm_trie.search.rank import SearchCandidates
from vllm_trie.search.rules import SearchDecision, SearchInputs, SearchPhase, SearchRules, SearchSizes, SearchStrategy
from vllm_trie.search.step_result import SearchStepResult, filled_up_search_candidates
from vllm_trie.search.strategies.best import BestStrategy


class _DiverseGroupsStrategy(NamedTuple):
    number: int
    penalty: float
    padding: int | None
    done: tuple[int, ...] = ()


class DiverseGroupsStrategy(_DiverseGroupsStrategy, SearchStrategy):
    """Group beam search: each group of beams avoids the tokens that earlier groups took in the same step.

    Args:
        number: Groups of beams.
        penalty: What each beam of an earlier group that took a token subtracts from its log-probability.
        padding: The token that beams of a done group take; None: none.
        done: The groups that are done.
    """

    def in_phase(self, phase: SearchPhase) -> DiverseGroupsStrategy:
        """See `SearchStrategy`."""
        return self._replace(done=phase.done)

    def sizes(self, rules: SearchRules, num_rows: int) -> SearchSizes:
        """See `SearchStrategy`."""
        width = rules.width // self.number
        of_group = BestStrategy().sizes(rules._replace(width=width), min(num_rows, width))
        return SearchSizes(rules.width, self.number * of_group.num_finished, rules.width)

    def choose(
        self, rules: SearchRules, logprobs: torch.Tensor, beams: SearchBeams, inputs: SearchInputs
    ) -> SearchDecision:
        """One step of N searches, group after group.

        Returns:
            The step, and the log-probabilities [N, b, V] of slots, less penalties, if they are reported. If the prompt
            is the only row, it counts as the first slot of each group, so that every parent identifies its group.
        """
        num_searches, num_rows, vocab_size = logprobs.shape
        width = rules.width // self.number
        rules_of_group = rules._replace(width=width)
        counts = torch.zeros(num_searches, vocab_size, dtype=torch.int32, device=logprobs.device)
        steps, penalised = list[SearchStepResult[torch.Tensor]](), list[torch.Tensor]()
        for first in range(0, rules.width, width):
            is_done = first // width in self.done
            at = slice(0, 1) if num_rows == 1 else slice(first, first + width)
            penalties, of_group = self.penalty * counts, beams.rows(at)
            if is_done:
                of_group = of_group._replace(scores=torch.full_like(of_group.scores, NEVER))
            completes = inputs.completes and inputs.completes.of_rows(first if num_rows > 1 else 0)
            own = inputs._replace(boosts=-penalties[:, None], completes=completes)
            step, _ = BestStrategy().choose(rules_of_group, logprobs[:, at], of_group, own)
            if is_done and self.padding is not None:  # so this group keeps all its beams: fewer never fill a pool
                counts[:, self.padding] += width
            counts.scatter_add_(1, step.tokens, (step.scores > NEVER).int())
            finished = step.finished._replace(parents=step.finished.parents + first)
            if rules.num_ending is not None:  # positions give the group and the rank in it
                finished = filled_up_search_candidates(finished, rules.num_ending - finished.scores.shape[1])
            steps.append(step._replace(parents=step.parents + first, finished=finished))
            if rules.num_logprobs is not None:
                penalised.append((logprobs[:, at] - penalties[:, None]).expand(-1, width, -1))
        by_slot = SearchCandidates.join([SearchCandidates(*step[:3]) for step in steps])
        finished = SearchCandidates.join([step.finished for step in steps])
        of_groups = [step.states or STATELESS for step in steps]
        states = {key: torch.cat([states[key] for states in of_groups], dim=1) for key in of_groups[0]}
        step = SearchStepResult(*by_slot, finished, states=states)
        return SearchDecision(step, torch.cat(penalised, dim=1) if penalised else logprobs)
