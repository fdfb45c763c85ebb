"""SpecInfer: one sequence, sampled by speculating on a tree of drafts and verifying it in one forward of the target.

Miao et al., "SpecInfer: Accelerating Generative LLM Serving with Tree-based Speculative Inference and Verification",
ASPLOS 2024: a tree by expansion, tree attention, and multi-step speculative sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from vllm_trie.search.sampling import sample_search_cells

NEGLIGIBLE = 1e-12  # a chance so small that what has it is rounding


class Generated(NamedTuple):
    """A sampled answer, and what it took."""

    tokens: list[int]  # with the EOS token, if it came
    logprobs: list[float]  # log p of each token, at temperature 1
    target_forwards: int  # after the prompt's
    drafted: int  # nodes of all trees
    accepted: int  # of them in `tokens`


class Tree:
    """Tokens to be tried, each after its parent: node 0 is the last committed token, the others are drafts."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.paths: list[list[int]] = []  # of each node, the nodes from the first to itself
        self.children: list[list[int]] = []  # of each node, in the order in which they were sampled
        self.distributions: dict[int, torch.Tensor] = {}  # q [V] float64, of each node that has children

    def add(self, token: int, parent: int | None = None) -> int:
        """Append a node and say which it is."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.children.append([])
        self.paths.append([node] if parent is None else [*self.paths[parent], node])
        if parent is not None:
            self.children[parent].append(node)
        return node


class CachedModel:
    """A model with the KV of what it was fed: first of the committed tokens, then of a tree's nodes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.cache = DynamicCache()
        self.num_cached = 0

    def logits(self, committed: Sequence[int], tree: Tree) -> torch.Tensor:
        """Feed what is not in the cache yet, in one forward: [its length, V], the last rows those of the tree."""
        tokens = [*committed, *tree.tokens]
        positions = [*range(len(committed)), *(len(committed) + len(path) - 1 for path in tree.paths)]
        device = self.model.device
        output = self.model(
            input_ids=torch.tensor([tokens[self.num_cached :]], device=device),
            position_ids=torch.tensor([positions[self.num_cached :]], device=device),
            attention_mask=self._mask(len(committed), tree).to(device),
            past_key_values=self.cache,
            use_cache=True,
        )
        self.num_cached = len(tokens)
        return output.logits[0]

    def keep(self, num_committed: int, path: Sequence[int]) -> None:
        """Drop all of the tree but a path, whose last node need not have been fed."""
        fed = [num_committed + node for node in path if num_committed + node < self.num_cached]
        kept = torch.tensor([*range(num_committed), *fed], device=self.model.device)
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys.index_select(-2, kept), layer.values.index_select(-2, kept)
        self.num_cached = len(kept)

    def _mask(self, num_committed: int, tree: Tree) -> torch.Tensor:
        """Each new token sees the committed tokens up to itself, and a node its ancestors: [1, 1, new, all], added."""
        num_all = num_committed + len(tree.tokens)
        sees = torch.ones(num_all - self.num_cached, num_all, dtype=torch.bool).tril(self.num_cached)
        for node, path in enumerate(tree.paths):
            row = num_committed + node - self.num_cached
            if row >= 0:
                sees[row, num_committed:] = False
                sees[row, [num_committed + ancestor for ancestor in path]] = True
        dtype = self.model.dtype
        return torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, torch.finfo(dtype).min)[None, None]


class TreeSpeculation:
    """Sampling from a target, exactly by its distribution, several tokens per forward.

    Args:
        target: Attends to everything before a token in every layer, and takes position ids and a mask.
        draft: As the target, with its vocabulary.
        expansion: How many children each node of a layer gets, <k_1, ..., k_m>.
        temperature: Above 0, of the target and of the draft.

    Raises:
        ValueError: An argument is not as described.
    """

    def __init__(
        self, target: PreTrainedModel, draft: PreTrainedModel, expansion: Sequence[int], temperature: float = 1.0
    ) -> None:
        if not expansion or min(expansion) < 1:
            raise ValueError(f"expansion={tuple(expansion)} must name a width of at least 1 for one layer or more")
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} must be above 0, for the tokens are sampled")
        if target.config.vocab_size != draft.config.vocab_size:
            sizes = f"{draft.config.vocab_size} tokens, the target {target.config.vocab_size}"
            raise ValueError(f"the draft knows {sizes}; take a draft with the target's vocabulary")
        for model in (target, draft):
            if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=model.config).layers):
                raise ValueError(
                    f"{model.config.model_type} has layers without full attention; take a model that has none"
                )
        self.target, self.draft = target, draft
        self.expansion, self.temperature = tuple(expansion), temperature

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_new_tokens: int, eos_token_id: int | None, seed: int) -> Generated:
        """Sample an answer, of `max_new_tokens` or up to its first EOS token."""
        if not prompt:
            raise ValueError("the prompt is empty; begin it with at least one token, such as BOS")
        rng = np.random.default_rng(seed)
        target, draft = CachedModel(self.target), CachedModel(self.draft)
        if len(prompt) > 1:
            target.logits(prompt[:-1], Tree())
        tokens: list[int] = []
        logprobs: list[float] = []
        forwards = drafted = accepted = 0
        while len(tokens) < max_new_tokens and (not tokens or tokens[-1] != eos_token_id):
            *committed, last = prompt + tokens
            tree = self._drafted(draft, committed, last, rng)
            logp = target.logits(committed, tree).double().log_softmax(-1)  # [nodes, V]
            path, extra = self._verified(tree, logp, rng)
            target.keep(len(committed), path)
            draft.keep(len(committed), path)
            new = [*(tree.tokens[node] for node in path[1:]), extra][: max_new_tokens - len(tokens)]
            if eos_token_id in new:
                new = new[: new.index(eos_token_id) + 1]
            tokens += new
            logprobs += [float(logp[node, token]) for node, token in zip(path, new, strict=False)]
            forwards += 1
            drafted += len(tree.tokens) - 1
            accepted += min(len(new), len(path) - 1)
        return Generated(tokens, logprobs, forwards, drafted, accepted)

    @staticmethod
    def chance(p: float, q: float) -> float:
        """The chance to accept a draft of probability q that has p under the target; above 1 means surely."""
        return p / q

    @staticmethod
    def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """What the target's distribution p [V] becomes when a draft from q [V] is rejected, unnormalised."""
        return (p - q).clamp_(min=0)

    def _distribution(self, logits: torch.Tensor) -> torch.Tensor:
        return (logits.double() / self.temperature).softmax(-1)

    def _drafted(self, draft: CachedModel, committed: list[int], last: int, rng: np.random.Generator) -> Tree:
        """A tree below the last token; siblings are sampled independently, so they may be equal."""
        tree = Tree()
        layer = [tree.add(last)]
        for width in self.expansion:
            distributions = self._distribution(draft.logits(committed, tree)[-len(layer) :])
            tree.distributions.update(zip(layer, distributions, strict=True))
            layer = [
                tree.add(token, node)
                for node in layer
                for token in sample_search_cells(tree.distributions[node], width, True, rng).tolist()
            ]
        return tree

    def _verified(self, tree: Tree, logp: torch.Tensor, rng: np.random.Generator) -> tuple[list[int], int]:
        """The path of accepted nodes, from node 0, and the token sampled after them."""
        node = 0
        while True:
            p = self._distribution(logp[node])
            for child in tree.children[node]:
                q, token = tree.distributions[node], tree.tokens[child]
                if rng.random() < self.chance(float(p[token]), float(q[token])):
                    node = child
                    break
                left = self.residual(p, q)
                mass = float(left.sum())
                if mass > NEGLIGIBLE:  # else p = q, and only rounding rejected
                    p = left / mass
            else:
                return tree.paths[node], int(sample_search_cells(p, 1, True, rng)[0])
