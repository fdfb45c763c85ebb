"""What transformers' `generate` answers, and how its answers are compared with ours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

NEAR_TIE = 1e-5  # candidates this close may come in another order: rounding differs between kernels
SCORE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Answer:
    """One hypothesis: its tokens, and the score it competes with."""

    token_ids: list[int]
    score: float


@cache
def load(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    # "eager" is the one that knows Gemma's soft caps.
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()


def transformers_beams(
    model: Path, prompt: list[int], width: int, n: int, max_tokens: int, **options: Any
) -> list[Answer]:
    """The `n` best hypotheses of transformers' beam search.

    Args:
        options: Further arguments of `generate`; `eos_token_id=None` never stops.
    """
    (answers,) = transformers_beams_of_all(model, [prompt], width, n, max_tokens, **options)
    return answers


def transformers_beams_of_all(
    model: Path, prompts: list[list[int]], width: int, n: int, max_tokens: int, **options: Any
) -> list[list[Answer]]:
    """The same of several prompts in one batch, padded on the left."""
    eos = options.setdefault("eos_token_id", 1)
    stops = set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
    generator = load(model)
    if eos is None:
        generator.generation_config.eos_token_id = None
    try:
        texts = [torch.tensor(prompt) for prompt in prompts]
        output = generator.generate(
            pad_sequence(texts, batch_first=True, padding_side="left"),
            attention_mask=pad_sequence([text >= 0 for text in texts], batch_first=True, padding_side="left").long(),
            num_beams=width,
            num_return_sequences=n,
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0 if width == 1 else -1,  # greedy search reads it, beside others that go on
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
    finally:
        generator.generation_config.eos_token_id = 1
    sequences = output.sequences[:, max(map(len, prompts)) :].tolist()
    found = [_until_stop(tokens, stops) for tokens in sequences]
    if width == 1:  # generate() turns one beam into greedy search, which has no score
        logprobs = generator.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
        sums = [of_one[: len(tokens)].sum().item() for of_one, tokens in zip(logprobs, found, strict=True)]
        length_penalty = options.get("length_penalty", 1.0)
        scores = [total / len(tokens) ** length_penalty for total, tokens in zip(sums, found, strict=True)]
    else:
        scores = output.sequences_scores.tolist()
    answers = [Answer(tokens, score) for tokens, score in zip(found, scores, strict=True)]
    return [answers[start : start + n] for start in range(0, len(answers), n)]


def transformers_greedy(model: Path, prompt: list[int], max_tokens: int) -> list[int]:
    (answer,) = transformers_beams(model, prompt, 1, 1, max_tokens)
    return answer.token_ids


def is_greedy(model: Path, prompt: list[int], tokens: list[int], max_tokens: int) -> bool:
    """Whether transformers' greedy search answers `tokens`, found by one forward instead of one for each of them."""
    return _greedy_sum(model, prompt, tokens, max_tokens, 1) is not None


def transformers_one_beam(
    model: Path, prompt: list[int], likely: list[int], max_tokens: int, *, eos: int | None, length_penalty: float = 1.0
) -> list[Answer]:
    """What `transformers_beams` answers with one beam, by one forward if it is what is likely."""
    total = _greedy_sum(model, prompt, likely, max_tokens, eos)
    if total is None:
        return transformers_beams(model, prompt, 1, 1, max_tokens, eos_token_id=eos, length_penalty=length_penalty)
    return [Answer(likely, total / len(likely) ** length_penalty)]


@torch.inference_mode()
def _greedy_sum(model: Path, prompt: list[int], tokens: list[int], max_tokens: int, eos: int | None) -> float | None:
    """The sum of log-probabilities of these tokens, if greedy search answers them."""
    logits = load(model)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    ends = eos not in tokens[:-1] and (tokens[-1] == eos or len(tokens) == max_tokens)
    if not ends or logits.argmax(-1).tolist() != tokens:
        return None
    return logits.log_softmax(-1).amax(-1).sum().item()


def engine_answers(request_output: Any, length_penalty: float) -> list[Answer]:
    return [
        Answer(list(o.token_ids), o.cumulative_logprob / len(o.token_ids) ** length_penalty)
        for o in request_output.outputs
    ]


def agree(ours: list[Answer], theirs: list[Answer]) -> bool:
    """Whether all tokens agree. Tokens may differ only between hypotheses closer than `NEAR_TIE`.

    Raises:
        AssertionError: a score differs, or tokens differ without a near-tie.
    """
    assert len(ours) == len(theirs)
    same = True
    for rank, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert abs(our.score - their.score) < SCORE_TOLERANCE * max(1.0, abs(their.score)), (rank, our, their)
        if our.token_ids != their.token_ids:
            same = False
            assert abs(our.score - their.score) < NEAR_TIE * max(1.0, abs(their.score)), (rank, our, their)
    return same


def _until_stop(tokens: list[int], stops: set[int]) -> list[int]:
    """Cut off the padding that `generate` appends after a stop token."""
    for position, token in enumerate(tokens):
        if token in stops:
            return tokens[: position + 1]
    return [token for token in tokens if token != -1]
