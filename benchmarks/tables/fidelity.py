"""Does sharing change what is computed? Log p against an unshared forward, hypotheses against `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.common import generate
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.watch import reclaiming_every
from vllm_trie import beam_params

NEAR_TIE = 1e-4  # of final scores: rounding may order what is closer


def cells(setting: Setting) -> list[Cell]:
    own_widths = setting.pick((3,), (3, 9), (3, 6, 9, 15))
    intervals = setting.pick((1,), (1, 15), (1, 15))
    return [
        (prompts.name, width, interval)
        for prompts in setting.prompts
        for width in setting.widths or own_widths
        for interval in intervals
    ]


def measure(bench: Bench, set_name: str, width: int, interval: int) -> Measured:
    """All hypotheses of all prompts, searched together with one `reclaim_interval`."""
    setting = bench.setting
    num_tokens = setting.max_tokens or setting.pick(16, 64, 96)
    llm, reference = bench.engine(), bench.reference()
    prompts = bench.prompts(setting.pick(2, 6, 12), of=setting.prompt_set(set_name))
    params = beam_params(width, n=width, max_tokens=num_tokens, logprobs=0)
    with reclaiming_every(llm, interval):
        outputs = generate(llm, [{"prompt_token_ids": prompt} for prompt in prompts], params)
    deltas, num_hypotheses = [], 0
    for prompt, output in zip(prompts, outputs, strict=True):
        for hypothesis in output.outputs:
            ours = [at[token].logprob for token, at in zip(hypothesis.token_ids, hypothesis.logprobs, strict=True)]
            theirs = unshared_logprobs(reference, prompt, list(hypothesis.token_ids))
            deltas.append(max(abs(a - b) for a, b in zip(ours, theirs, strict=True)))
            num_hypotheses += 1
    references = [reference_beams(bench, [prompt], width, num_tokens)[0] for prompt in prompts]
    found = agreement(outputs, references)
    row = (
        set_name,
        width,
        interval,
        num_hypotheses,
        max(deltas),
        len(prompts),
        found.same,
        found.near,
        found.others,
        max(found.gaps),
    )
    return Measured([row], {"max delta log p by hypothesis": deltas})


def unshared_logprobs(model: Any, prompt: list[int], answer: list[int]) -> list[float]:
    """Log-probability of each token of an answer, by one forward of that sequence alone."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer], device=model.device)).logits[0, len(prompt) - 1 : -1]
    chosen = torch.tensor(answer, device=logits.device)[:, None]
    return logits.float().log_softmax(-1).gather(1, chosen)[:, 0].tolist()


Beams = tuple[list[list[int]], list[float]]  # hypotheses of a prompt, best first, and their scores


def reference_beams(bench: Bench, prompts: Sequence[list[int]], width: int, num_tokens: int) -> list[Beams]:
    """transformers' hypotheses of each prompt, searched in one batch, without padding.

    All of the prompts but their last tokens is computed once; `generate` by itself would compute it for every beam.
    """
    import torch
    from transformers import DynamicCache

    model, eos = bench.reference(), bench.eos_token_ids
    longest = max(map(len, prompts))
    ids = torch.tensor([[eos[0]] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode():
        computed = DynamicCache(config=model.config)
        before = {"attention_mask": mask[:, :-1], "position_ids": positions[:, :-1], "past_key_values": computed}
        model(ids[:, :-1], **before, logits_to_keep=1)
        computed.batch_repeat_interleave(width)
        found = model.generate(
            ids,
            attention_mask=mask,
            past_key_values=computed,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=eos[0],
            return_dict_in_generate=True,
            output_scores=True,
        )
    answers = found.sequences[:, longest:].tolist()
    ends = [next((at for at, token in enumerate(one, start=1) if token in eos), len(one)) for one in answers]
    hypotheses = [one[:end] for one, end in zip(answers, ends, strict=True)]
    scores = found.sequences_scores.tolist()
    starts = range(0, len(hypotheses), width)
    return [(hypotheses[start : start + width], scores[start : start + width]) for start in starts]


class Agreement(NamedTuple):
    """Of searches: whose hypotheses are all identical, differ by near-ties alone, differ otherwise; and of scores."""

    same: int
    near: int
    others: int
    gaps: list[float]


def agreement(outputs: Sequence[Any], references: Sequence[Beams]) -> Agreement:
    """Compare what the engine found with what transformers did, prompt by prompt."""
    same = near = others = 0
    all_gaps = list[float]()
    for output, (found, scores) in zip(outputs, references, strict=True):
        ours = [list(hypothesis.token_ids) for hypothesis in output.outputs]
        our_scores = [h.cumulative_logprob / len(h.token_ids) for h in output.outputs]
        gaps = [abs(a - b) for a, b in zip(our_scores, scores, strict=True)]
        all_gaps += gaps
        same += ours == found
        near += ours != found and max(gaps) < NEAR_TIE
        others += ours != found and max(gaps) >= NEAR_TIE
    return Agreement(same, near, others, all_gaps)


TABLE = Table(
    "Fidelity: shared against unshared, and against transformers",
    (
        "prompts",
        "beams",
        "reclaim_interval",
        "hypotheses",
        "max |Δ log p|",
        "searches",
        "all hypotheses identical",
        "near-ties",
        "different",
        "max |Δ score|",
    ),
    cells,
    measure,
    "Δ log p: of every token of every hypothesis, against one float32 forward of that sequence alone in transformers; "
    "identical: all b hypotheses and their order, against generate(num_beams=b); near-ties: tokens differ and no score "
    "by as much as 1e-4; score: mean log p",
)


PARITY_TOKENS, CHUNK, BATCH = 64, 20, 4


def parity_cells(setting: Setting) -> list[Cell]:
    count = setting.pick(4, CHUNK, 100)
    widths = setting.widths or (4, 8)
    starts = range(0, count, CHUNK)
    return [
        (prompts.name, width, start, min(start + CHUNK, count))
        for prompts in setting.prompts
        for width in widths
        for start in starts
    ]


def measure_parity(bench: Bench, set_name: str, width: int, start: int, end: int) -> Measured:
    """All hypotheses of some prompts of a set, compared with transformers'."""
    num_tokens = bench.setting.max_tokens or bench.setting.pick(8, PARITY_TOKENS, PARITY_TOKENS)
    prompts = bench.prompts(end, of=bench.setting.prompt_set(set_name))[start:]
    params = beam_params(width, n=width, max_tokens=num_tokens)
    outputs = generate(bench.engine(), [{"prompt_token_ids": prompt} for prompt in prompts], params)
    batches = [prompts[at : at + BATCH] for at in range(0, len(prompts), BATCH)]
    references = [beams for batch in batches for beams in reference_beams(bench, batch, width, num_tokens)]
    found = agreement(outputs, references)
    hypotheses = width * len(prompts)
    counts = (found.same, found.near, found.others)
    return Measured([(set_name, width, f"{start}-{end - 1}", len(prompts), hypotheses, *counts, max(found.gaps))])


PARITY = Table(
    "Parity: the hypotheses of transformers, prompt by prompt",
    (
        "prompts",
        "beams",
        "which",
        "searches",
        "hypotheses",
        "all hypotheses identical",
        "near-ties",
        "different",
        "max |Δ score|",
    ),
    parity_cells,
    measure_parity,
    f"{PARITY_TOKENS} tokens, EOS ends hypotheses; identical: all b hypotheses and their order, against "
    f"generate(num_beams=b), {BATCH} prompts in a batch; near-ties: tokens differ and no score by as much as "
    f"{NEAR_TIE}; score: mean log p",
)
