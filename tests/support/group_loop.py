"""Group beam search as a plain loop over a transformers model, written from the rules of transformers 4."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path

import torch

from tests.support.items import Item
from tests.support.loop import one_thread
from tests.support.next_logits import NextLogits
from tests.support.reference import Answer

Scored = tuple[float, list[int]]


@one_thread()
@torch.inference_mode()
def loop_group_beams(
    model: Path,
    prompt: list[int],
    width: int,
    num_groups: int,
    penalty: float,
    max_tokens: int,
    *,
    stops: Collection[int] = (1,),
    padding: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    min_tokens: int = 0,
    no_repeat_ngram_size: int = 0,
    counts_padding: bool = True,
    items: Collection[Item] | None = None,
    items_end: bool = False,
) -> list[Answer]:
    """All hypotheses of all groups, best first.

    Args:
        padding: What a group takes that is done.
        counts_padding: False: that does not count as taken.
        items: What hypotheses must be, before a stop token or the end.
        items_end: An item ends a hypothesis, which takes no stop token; one that begins another may go on as well.
    """
    size = width // num_groups
    pools: list[list[Scored]] = [[] for _ in range(num_groups)]
    beams: list[list[Scored]] = [[(0.0, [])] for _ in range(num_groups)]
    cut: list[list[Scored]] = [[] for _ in range(num_groups)]  # what ends at the greatest length
    next_logits = [NextLogits(model) for _ in range(num_groups)]
    done: set[int] = set()

    def compared(total: float, length: int) -> float:
        return total / length**length_penalty

    def finish(group: int, total: float, tokens: list[int]) -> None:
        pools[group] = sorted([*pools[group], (compared(total, len(tokens)), tokens)], key=lambda s: -s[0])[:size]

    def is_done(group: int, best: float, length: int) -> bool:
        if len(pools[group]) < size or early_stopping is True:
            return len(pools[group]) >= size
        length = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        return pools[group][-1][0] >= compared(best, length)

    def is_item(tokens: list[int]) -> bool:
        return items is None or tuple(tokens) in items

    def further(tokens: list[int]) -> set[int]:
        """What items go on with."""
        own = [item for item in items or () if len(item) > len(tokens) and item[: len(tokens)] == tuple(tokens)]
        return {item[len(tokens)] for item in own}

    for length in range(1, max_tokens + 1):
        taken: Counter[int] = Counter()
        for group in range(num_groups):
            if group in done:
                taken[padding] += size * counts_padding
            elif not beams[group] and is_done(group, -torch.inf, length):
                done.add(group)
            if group in done or not beams[group]:
                continue
            texts = [prompt + tokens for _, tokens in beams[group]]
            logprobs = next_logits[group](texts).log_softmax(-1)
            if length <= min_tokens:
                logprobs[:, [*stops]] = -torch.inf
            for row, text in zip(logprobs, texts, strict=True):
                ngrams = [text[at : at + no_repeat_ngram_size] for at in range(len(text) - no_repeat_ngram_size + 1)]
                for *start, last in ngrams if no_repeat_ngram_size else ():
                    if [*start] == text[len(text) - no_repeat_ngram_size + 1 :]:
                        row[last] = -torch.inf
            for row, (_, tokens) in zip(logprobs, beams[group], strict=True) if items is not None else ():
                may_come = further(tokens) | ({*stops} if is_item(tokens) and not items_end else set())
                row[[*({*range(len(row))} - may_come)]] = -torch.inf
            for token, count in taken.items():
                logprobs[:, token] -= penalty * count
            sums = logprobs + torch.tensor([[total] for total, _ in beams[group]])
            best, cells = sums.flatten().topk(sums.numel() if items_end else max(2, 1 + len(stops)) * size)
            live, ended = list[Scored](), list[Scored]()
            for rank, (total, cell) in enumerate(zip(best.tolist(), cells.tolist(), strict=True)):
                if total == -torch.inf:
                    break
                row, token = divmod(cell, sums.shape[1])
                tokens = [*beams[group][row][1], token]
                ends = is_item(tokens) and length >= min_tokens if items_end else token in stops
                if rank < size and ends:
                    ended.append((total, tokens))
                elif rank < size and length == max_tokens and is_item(tokens):
                    cut[group].append((total, tokens))
                if further(tokens) if items_end else token not in stops:
                    live.append((total, tokens))
            for total, tokens in ended:
                finish(group, total, tokens)
            beams[group] = live[:size]
            taken.update(tokens[-1] for _, tokens in beams[group])
            if is_done(group, max((total for total, _ in [*live, *ended]), default=-torch.inf), length):
                done.add(group)
        if all(group in done or not beams[group] for group in range(num_groups)):
            break
    for group in {*range(num_groups)} - done:
        for total, tokens in cut[group]:
            finish(group, total, tokens)
    found = sorted((scored for pool in pools for scored in pool), key=lambda scored: -scored[0])
    return [Answer(tokens, score) for score, tokens in found]
