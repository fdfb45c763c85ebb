"""Does sharing change what is computed? Log p against an unshared forward, hypotheses against `generate`."""

from __future__ import annotations

from typing import Any

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
    same = near = others = 0
    score_deltas = []
    for prompt, output in zip(prompts, outputs, strict=True):
        found, scores = reference_beams(bench, prompt, width, num_tokens)
        ours = [list(hypothesis.token_ids) for hypothesis in output.outputs]
        our_scores = [h.cumulative_logprob / len(h.token_ids) for h in output.outputs]
        gaps = [abs(a - b) for a, b in zip(our_scores, scores, strict=True)]
        score_deltas += gaps
        if ours == found:
            same += 1
        elif max(gaps) < NEAR_TIE:
            near += 1
        else:
            others += 1
    row = (
        set_name,
        width,
        interval,
        num_hypotheses,
        max(deltas),
        len(prompts),
        same,
        near,
        others,
        max(score_deltas),
    )
    return Measured([row], {"max delta log p by hypothesis": deltas})


def unshared_logprobs(model: Any, prompt: list[int], answer: list[int]) -> list[float]:
    """Log-probability of each token of an answer, by one forward of that sequence alone."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer], device=model.device)).logits[0, len(prompt) - 1 : -1]
    chosen = torch.tensor(answer, device=logits.device)[:, None]
    return logits.float().log_softmax(-1).gather(1, chosen)[:, 0].tolist()


def reference_beams(
    bench: Bench, prompt: list[int], width: int, num_tokens: int
) -> tuple[list[list[int]], list[float]]:
    """transformers' hypotheses, best first, without padding, and their scores."""
    import torch

    model = bench.reference()
    eos = bench.eos_token_ids
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=eos[0],
            return_dict_in_generate=True,
            output_scores=True,
        )
    answers = found.sequences[:, len(prompt) :].tolist()
    ends = [next((at for at, token in enumerate(one, start=1) if token in eos), len(one)) for one in answers]
    return [one[:end] for one, end in zip(answers, ends, strict=True)], found.sequences_scores.tolist()


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
