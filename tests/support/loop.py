"""Beam search as a plain loop over a transformers model, written from the rules: no group beside."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.next_logits import NextLogits
from tests.support.reference import Answer
from vllm_trie.compat.versions import own_vllm_beams

Adjust = Callable[[torch.Tensor, list[int], list[int]], torch.Tensor]  # logits [V], prompt, generated -> logits
Allow = Callable[[torch.Tensor], torch.Tensor]  # log-probabilities [V] -> the same, some of them impossible
IMPOSSIBLE = float("-inf")


@dataclass(frozen=True)
class Found(Answer):
    """A hypothesis, and the stop token or stop string that ended it."""

    stopped_by: int | str | None


@contextmanager
def one_thread() -> Iterator[None]:
    """Threads that wait for a busy core cost far more than they save on models this small."""
    threads = torch.get_num_threads()
    torch._C.set_num_threads(1)  # vLLM's CPU worker makes `torch.set_num_threads` do nothing
    try:
        yield
    finally:
        torch._C.set_num_threads(threads)


def adjusted(logits: torch.Tensor, prompt: list[int], generated: list[int], **controls: Any) -> torch.Tensor:
    """What vLLM's `Sampler.apply_logits_processors` makes of logits [V], in its order. `bad_words` are tokens."""
    logits = logits.clone()
    if allowed := controls.get("allowed_token_ids"):
        logits[list({*range(len(logits))} - {*allowed})] = IMPOSSIBLE
    for *start, last in controls.get("bad_words", ()):
        if not start or generated[-len(start) :] == start:
            logits[last] = IMPOSSIBLE
    for token, bias in controls.get("logit_bias", {}).items():
        logits[token] += bias
    seen, repetition = list({*prompt, *generated}), controls.get("repetition_penalty", 1.0)
    logits[seen] *= torch.where(logits[seen] > 0, 1 / repetition, repetition)
    for token, count in Counter(generated).items():
        logits[token] -= controls.get("frequency_penalty", 0.0) * count + controls.get("presence_penalty", 0.0)
    return logits / controls.get("temperature", 1.0)


def allowed(logprobs: torch.Tensor, **filters: Any) -> torch.Tensor:
    """Log-probabilities [V] without what `min_p`, then `top_k`, then `top_p` of `filters` leave out, one by one."""
    if not filters:
        return logprobs
    chances = logprobs.double().exp().tolist()
    ranked = [token for token in sorted(range(len(chances)), key=lambda t: -chances[t]) if chances[token] > 0]
    if min_p := filters.get("min_p"):
        ranked = [token for token in ranked if chances[token] >= min_p * chances[ranked[0]]]
    if (top_k := filters.get("top_k", 0)) > 0:
        ranked = ranked[:top_k]
    total, share, kept = sum(chances[token] for token in ranked), 0.0, list[int]()
    for token in ranked:
        if share < filters.get("top_p", 1.0) * total:
            kept.append(token)
        share += chances[token]
    result = torch.full_like(logprobs, IMPOSSIBLE)
    result[kept] = logprobs[kept]
    return result


def masked_logprobs(logits: torch.Tensor, masked: Collection[int]) -> torch.Tensor:
    """Log-softmax, and then the mask."""
    logprobs = logits.log_softmax(-1)
    logprobs = torch.where(logprobs.isnan(), IMPOSSIBLE, logprobs)  # nothing is allowed at all
    logprobs[list(masked)] = IMPOSSIBLE
    return logprobs


def pruned(
    sums: torch.Tensor,
    before: list[float],
    *,
    prune_relative: float | None = None,
    prune_absolute: float = float("inf"),
    prune_relative_local: float | None = None,
    max_candidates_per_parent: int | None = None,
) -> torch.Tensor:
    """Sums [r, V] without what the rules drop, one candidate at a time. `before`: each row's own sum."""
    candidates = [(row, token) for row, token in (sums > IMPOSSIBLE).nonzero().tolist()]
    scores = {(row, token): sums[row, token].item() for row, token in candidates}
    if not candidates:
        return sums
    best, best_last = max(scores.values()), max(score - before[row] for (row, _), score in scores.items())
    result, taken = sums.clone(), Counter[int]()
    for (row, token), score in sorted(scores.items(), key=lambda scored: (-scored[1], scored[0])):
        taken[row] += 1
        if (
            score < best - prune_absolute
            or (prune_relative is not None and score - best < math.log(prune_relative))
            or (prune_relative_local is not None and score - before[row] - best_last < math.log(prune_relative_local))
            or (max_candidates_per_parent is not None and taken[row] > max_candidates_per_parent)
        ):
            result[row, token] = IMPOSSIBLE
    return result


def completed_string(before: str, after: str, strings: Sequence[str]) -> tuple[int, str] | None:
    """(end, string) of the stop string that ends first in what `after` has beyond `before`."""
    old = len(before.rstrip("\N{REPLACEMENT CHARACTER}"))  # part of a character
    ends = [(end, s) for end in range(old + 1, len(after) + 1) for s in strings if after[:end].endswith(s)]
    return ends[0] if ends else None


def competing_score(
    semantics: str, length_penalty: float, num_prompt: int, tokens: list[int], total: float, uncounted: Collection[int]
) -> float:
    """What a hypothesis competes by. vLLM 0.32 counts the prompt, but no stop token or ignored EOS in the end."""
    length = len(tokens)
    if semantics == "vllm" and own_vllm_beams().counts_prompt:
        length += num_prompt - (tokens[-1] in uncounted)
    return total / max(length, 1) ** length_penalty


@one_thread()
@torch.inference_mode()
def loop_beams(
    model_folder: Path,
    prompt: list[int],
    width: int,
    n: int,
    max_tokens: int,
    *,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    semantics: str = "hf",
    eos: int | None = None,
    ignore_eos: bool = False,
    stop_token_ids: Collection[int] = (),
    stop: Sequence[str] = (),
    decode: Callable[[list[int]], str] = str,
    min_tokens: int = 0,
    barred: Collection[int] = (),
    adjust: Adjust = adjusted,
    allow: Allow = allowed,
    pruning: Mapping[str, Any] | None = None,
    start: Sequence[tuple[list[int], float]] = (([], 0.0),),
    widths: Sequence[int] | None = None,
) -> list[Found]:
    """The `n` best hypotheses, best first; fewer if there are fewer. `decode` gives the text of generated tokens.

    Args:
        barred: What else `min_tokens` bars: EOS of the model's generation configuration.
        start: Beams of equal length to begin with, and their sums.
        widths: Beams after each step, where they differ; the last one goes on.
    """
    uncounted = {*stop_token_ids} | ({eos} - {None})
    stops = {*stop_token_ids} if ignore_eos else uncounted
    pool: list[Found] = []
    full_at: int | None = None  # length at which `width` hypotheses were finished

    def stopped_by(generated: list[int], token: int) -> int | str | None:
        is_stop = token in stops and (generated or semantics != "tridecode")  # which takes anything first
        if len(generated) < min_tokens or is_stop:
            return token if is_stop else None
        completed = stop and completed_string(decode(generated), decode([*generated, token]), stop)
        return completed[1] if completed else None

    def finish(tokens: list[int], total: float, by: int | str | None) -> None:
        score = competing_score(semantics, length_penalty, len(prompt), tokens, total, uncounted)
        pool.append(Found(tokens, score, by))
        pool.sort(key=lambda found: -found.score)
        del pool[width:]

    def is_done(best_running: float, length: int) -> bool:
        if semantics == "tridecode":
            return full_at is not None and length > full_at
        if semantics == "vllm" or len(pool) < width:
            return False
        length = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        # One beam is greedy search: it stops at once, whatever the options.
        return early_stopping is True or width == 1 or best_running / length**length_penalty <= pool[-1].score

    beams, next_logits = [*start], NextLogits(model_folder)
    for length in range(len(start[0][0]) + 1, max_tokens + 1):
        logits = next_logits([prompt + generated for generated, _ in beams])
        rows = []
        for (generated, total), row in zip(beams, logits, strict=True):
            masked = uncounted.union(barred) if length <= min_tokens else ()  # as vLLM: EOS, too, though it is ignored
            rows.append(total + allow(masked_logprobs(adjust(row, prompt, generated), masked)).double())
            if semantics == "vllm":  # whatever stops among a beam's own best 2b finishes
                proposals = rows[-1].topk(2 * width).indices
                for token in proposals.tolist():
                    if rows[-1][token] > IMPOSSIBLE and (by := stopped_by(generated, token)) is not None:
                        finish([*generated, token], rows[-1][token].item(), by)
                if own_vllm_beams().stops_by_generation_config:  # nothing else goes on
                    rows[-1] = torch.full_like(rows[-1], IMPOSSIBLE).index_copy(0, proposals, rows[-1][proposals])
        step_width = width if widths is None else widths[min(length, len(widths)) - 1]
        sums = pruned(torch.stack(rows), [total for _, total in beams], **pruning) if pruning else torch.stack(rows)
        ranked, live = sums.flatten().sort(descending=True, stable=True), []
        for rank, (total, place) in enumerate(zip(*(field.tolist() for field in ranked), strict=True)):
            if total == IMPOSSIBLE or (len(live) == step_width and (rank >= step_width or semantics == "tridecode")):
                break
            parent, token = divmod(place, len(rows[0]))
            tokens, by = [*beams[parent][0], token], stopped_by(beams[parent][0], token)
            may_finish = semantics == "tridecode" or (semantics == "hf" and rank < step_width)
            if may_finish and (by is not None or length == max_tokens):
                finish(tokens, total, by)
            if by is None and len(live) < step_width:
                live.append((tokens, total))
        full_at = length if full_at is None and len(pool) == width else full_at
        beams = live
        if not beams or is_done(beams[0][1], length):
            break
    for generated, total in beams if semantics == "vllm" else ():
        finish(generated, total, None)
    return pool[:n]
