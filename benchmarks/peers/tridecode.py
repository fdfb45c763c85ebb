"""The trie paper's beam search as published, on a transformers model.

All beams of a prompt are one trie, flat in a KV cache of batch size 1: the prompt's nodes, then one per beam and step.
A step feeds the newest tokens as one sequence, at the positions of their depth, under a dense mask that lets each see
its ancestors and itself. Every few steps a garbage collection copies the cache without what no beam leads to.

Written from the description in Efficient Beam Search for LLMs Using Trie-Based Decoding,
https://arxiv.org/abs/2502.00085. Candidates are ranked, and a search ends, as ours do with semantics="tridecode".
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.stops import StopConstraints
from vllm_trie.search.rules import SearchRules
from vllm_trie.search.step import take_packed_search_step
from vllm_trie.search.step_result import SearchStepResult, unpack_search_steps
from vllm_trie.search.stopping import EndedSearchHypotheses, TridecodeSearchPool
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.trie.hypotheses import HypothesisTrie

PAPERS_INTERVAL = 15  # steps


class Found(NamedTuple):
    """The best hypothesis of a search, and what the search took.

    The prompt's forward chooses the first tokens and is the first step; every other step feeds one token per beam.
    """

    tokens: list[int]  # without the prompt, with the EOS if it ended so
    score: float  # sum of log-probabilities per token
    nodes: list[int]  # KV entries held after each step, garbage included
    reclaim_seconds: list[float]  # of each reclamation
    step_seconds: list[float]  # of each step but the first, reclamation included
    steps: int


class FlatTrie:
    """The nodes of all beams of one prompt in one KV cache.

    The mask of the newest tokens is all there is of the trie: a beam's row of it marks the beam's path. Carrying rows
    over from parent to child spares the walk from each leaf to the root, so this is no slower than the paper's trie.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = DynamicCache()
        self._paths = torch.empty(1, 0, dtype=torch.bool, device=model.device)  # [b, nodes]

    @property
    def num_nodes(self) -> int:
        """KV entries held, garbage included."""
        return self._paths.shape[1]

    def begin(self, prompt: list[int]) -> torch.Tensor:
        """Feed the prompt. Returns the logits after its last token, [1, V]."""
        self._paths = self._paths.new_ones(1, len(prompt))
        tokens = torch.tensor([prompt], device=self._paths.device)
        return self._model(tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1).logits[0]

    def extend(self, tokens: np.ndarray) -> torch.Tensor:
        """Feed each beam's newest token, [b], as one sequence. Returns the logits after each, [b, V]."""
        themselves = torch.eye(len(tokens), dtype=torch.bool, device=self._paths.device)
        self._paths = torch.cat([self._paths, themselves], dim=1)
        hidden = torch.finfo(self._model.dtype).min
        mask = torch.zeros(self._paths.shape, dtype=self._model.dtype, device=self._paths.device)
        return self._model(
            torch.from_numpy(tokens).to(self._paths.device)[None],
            position_ids=self._paths.sum(dim=1)[None] - 1,
            attention_mask=mask.masked_fill(~self._paths, hidden)[None, None],
            past_key_values=self._cache,
            use_cache=True,
        ).logits[0]

    def fork(self, parents: np.ndarray) -> None:
        """Replace the beams by continuations of those at `parents`, [b]."""
        self._paths = self._paths[torch.from_numpy(parents).to(self._paths.device)]

    def reclaim(self) -> float:
        """Keep only nodes that some beam leads to. Returns the seconds it took."""
        start = time.perf_counter()
        live = self._paths.any(dim=0).nonzero().flatten()
        self._paths = self._paths[:, live]
        for layer in self._cache.layers:
            layer.keys = layer.keys.index_select(2, live)
            layer.values = layer.values.index_select(2, live)
        if live.device.type != "cpu":
            torch.accelerator.synchronize(live.device)
        return time.perf_counter() - start


class PublishedTrieSearch:
    """Beam search of one prompt at a time.

    Args:
        model: A causal language model of transformers with full attention, computed by "eager" or "sdpa".
        reclaim_interval: Steps from one reclamation to the next; None: never.

    Raises:
        ValueError: The model's attention takes no such mask or is not full, or the interval is less than 1.
    """

    def __init__(self, model: Any, reclaim_interval: int | None = PAPERS_INTERVAL) -> None:
        attention = model.config._attn_implementation
        if attention not in ("eager", "sdpa"):
            raise ValueError(f'attn_implementation="{attention}" takes no such mask; load the model with "sdpa"')
        if others := [layer for layer in DynamicCache(config=model.config).layers if type(layer) is not DynamicLayer]:
            raise ValueError(f"the model caches a {others[0]}; take one whose layers all have full attention")
        if reclaim_interval is not None and reclaim_interval < 1:
            raise ValueError(f"reclaim_interval={reclaim_interval} must be at least 1, or None for never")
        self._model = model
        self._reclaim_interval = reclaim_interval

    @torch.inference_mode()
    def search(self, prompt: list[int], width: int, max_new_tokens: int, eos_token_id: int | None) -> Found:
        """The best of `width` beams.

        Args:
            prompt: Its token ids.
            width: Beams.
            max_new_tokens: The most tokens of a hypothesis.
            eos_token_id: What ends a hypothesis before; None: nothing does.

        Raises:
            ValueError: There is no prompt, no beam or nothing to generate.
        """
        if min(len(prompt), width, max_new_tokens) < 1:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens, {width=} and {max_new_tokens=} must be at least 1 each"
            )
        trie, hypotheses, pool = (
            FlatTrie(self._model),
            HypothesisTrie(),
            TridecodeSearchPool(width, 1.0, max_new_tokens),
        )
        logits, scores = trie.begin(prompt), np.zeros(1, dtype=np.float32)
        nodes, reclaim_seconds, times = list[int](), list[float](), list[float]()
        for length in range(1, max_new_tokens + 1):
            stop = None if length == 1 else eos_token_id  # in the first step the paper's code looks for none
            step = choose(logits, scores, stop, width, length == max_new_tokens)
            keep_finished(step, hypotheses, pool, length)
            is_over = length == max_new_tokens or pool.is_done(float(step.scores.max()), length)
            if not is_over:
                trie.fork(step.parents)
                hypotheses.advance(*step[:3])
                if self._is_due(length - 1):
                    reclaim_seconds.append(trie.reclaim())
            nodes.append(trie.num_nodes)
            times.append(time.perf_counter())
            if is_over:
                break
            logits, scores = trie.extend(step.tokens), step.scores
        scores_of_best, leaves = pool.best(1)
        (tokens,) = hypotheses.tokens(leaves)
        step_seconds = [after - before for before, after in pairwise(times)]
        return Found(tokens, float(scores_of_best[0]), nodes, reclaim_seconds, step_seconds, length)

    def _is_due(self, num_fed: int) -> bool:
        """Whether to reclaim after the beams were fed that many times."""
        return self._reclaim_interval is not None and num_fed > 0 and num_fed % self._reclaim_interval == 0


def choose(
    logits: torch.Tensor, scores: np.ndarray, eos_token_id: int | None, width: int, is_last: bool
) -> SearchStepResult[np.ndarray]:
    """The next beams, and those that finish. `logits`: [b, V], `scores`: [b]."""
    stops = StopConstraints(() if eos_token_id is None else (eos_token_id,))
    rules = SearchRules(width, BestStrategy("tridecode"), stops, is_last=is_last)
    beams = SearchBeams(torch.from_numpy(scores).to(logits.device)[None])
    _, words, layout = take_packed_search_step(rules, logits[None], beams)
    (step,) = unpack_search_steps(words.cpu().numpy(), layout)
    return step


def keep_finished(
    step: SearchStepResult[np.ndarray], hypotheses: HypothesisTrie, pool: TridecodeSearchPool, length: int
) -> None:
    """Offer the pool what ends in this step, and forget what it has no place for."""
    parents, tokens, scores = step.finished
    hypotheses.drop(
        pool.add(EndedSearchHypotheses.of(scores, tokens, hypotheses.finish(*step.finished), parents), length)
    )
