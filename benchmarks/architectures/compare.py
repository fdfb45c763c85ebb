"""Compares beams in vLLM's engine with transformers' `generate`, or vLLM's own loop, on one model, in one process."""

from __future__ import annotations

import random
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.architectures.models import EOS, VOCABULARY, Architecture, make

LENGTHS = (5, 31, 70)
WIDTH = 4
MAX_TOKENS = 40
NEAR_TIE = 1e-5  # hypotheses this close, as a share of their score, may come in another order
TOLERANCE = 1e-4  # between scores of the same hypotheses; where they differ by more, vLLM itself is looked at
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20,
}
WITH_BEAMS = {"additional_config": {"trie_beam": {"check_invariants": True}}}
KINDS_OF_CACHE = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "ChunkedLocalAttentionSpec": "chunks",
    "MLAAttentionSpec": "latent",
    "MambaSpec": "states",
}


class Hypothesis(NamedTuple):
    """Tokens, and the score they compete by."""

    tokens: list[int]
    score: float


class Agreement(NamedTuple):
    """Of two lists of hypotheses, rank by rank."""

    equal: int
    tied: int
    worst: float  # difference of scores, as a share of a score if that is above 1


def measure(architecture: Architecture, folder: Path) -> dict[str, Any]:
    """A row of the table."""
    made = make(architecture, folder)
    row: dict[str, Any] = {"name": architecture.name, "class": made, "dtype": ENGINE["dtype"]}
    prompts = [_prompt(length) for length in LENGTHS]
    # First: vLLM's Transformers backend changes the classes of transformers in this process.
    reference = _load(folder)
    theirs = [_theirs(reference, prompt, ignore_eos) for ignore_eos in (True, False) for prompt in prompts]
    their_greedy = [_theirs(reference, prompt, True, width=1)[0].tokens for prompt in prompts]
    try:
        llm = start(architecture, folder, WITH_BEAMS)
    except Exception as error:
        return row | {"outcome": "refused", "error": sentence(error, folder)}
    core = llm.llm_engine.engine_core.engine_core
    row["caches"] = _caches(core)
    row["runs"] = type(core.model_executor.driver_worker.worker.model_runner.model).__name__
    try:
        ours = [one for ignore_eos in (True, False) for one in _ours(llm, prompts, ignore_eos)]
    except Exception as error:
        return row | {"outcome": "no answer", "error": sentence(error, folder)}
    found = compared([*zip(ours, theirs, strict=True)])
    hypotheses = [one for answers in ours for one in answers]
    row |= {"outcome": "compared", "hypotheses": len(hypotheses), **found._asdict()}
    row["ended"] = sum(one.tokens[-1] == EOS for one in hypotheses)
    if found.equal + found.tied < len(hypotheses) or found.worst > TOLERANCE:
        greedy = _greedy(llm, prompts, MAX_TOKENS)
        row["greedy"] = sum(map(list.__eq__, greedy, their_greedy))
        row["steady"] = sum(map(list.__eq__, greedy, _greedy_by_token(llm, prompts)))
        row["vllm"] = {"hypotheses": WIDTH * len(prompts), **compared(_ours_and_vllms(llm, prompts, llm))._asdict()}
        row["transformers_off"] = _off(reference, prompts, theirs)
        row["ours_off"] = _off(reference, prompts, ours)
    return row


def measure_speculation(architecture: Architecture, folder: Path) -> dict[str, Any]:
    """Searches whose draft model is the model itself, compared with plain ones in the same engine.

    Of some models vLLM then takes the MTP head, which beams do not draft by: n-grams draft there.
    """
    make(architecture, folder)
    drafts: dict[str, Any] = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    try:
        try:
            llm = start(architecture, folder, {**WITH_BEAMS, "speculative_config": drafts})
        except Exception as error:
            if "method='mtp'" not in str(error):
                raise
            drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
            llm = start(architecture, folder, {**WITH_BEAMS, "speculative_config": drafts})
        prompts = [_prompt(length) for length in LENGTHS]
        plain = _ours(llm, prompts, True, speculation="off")
        outputs = _outputs(llm, prompts, True, speculation="exact")
    except Exception as error:
        return {"outcome": "refused", "error": sentence(error, folder)}
    counts = [output.kv_transfer_params["trie_beam"] for output in outputs]
    if not any(count["drafted"] for count in counts):
        return {"outcome": "plain steps"}
    found = compared([*zip(map(_hypotheses, outputs), plain, strict=True)])
    per_forward = sum(count["steps_per_forward"] for count in counts) / len(counts)
    hypotheses = WIDTH * len(prompts)
    row = {"outcome": "compared", "drafts": drafts["method"], "hypotheses": hypotheses, **found._asdict()}
    return row | {"steps_per_forward": per_forward}


def measure_format(architecture: Architecture, folder: Path) -> dict[str, Any]:
    """A row of the table of number formats: vLLM's own loop runs in a second engine, without beams."""
    import torch

    row: dict[str, Any] = {"name": architecture.name, "class": make(architecture, folder), **architecture.engine}
    row["cpu"] = torch.backends.cpu.get_cpu_capability()
    prompts = [_prompt(length) for length in LENGTHS]
    try:
        llm, stock = start(architecture, folder, WITH_BEAMS), start(architecture, folder, {})
        _break_ties_by_token(stock)
        pairs = [pair for ignore_eos in (True, False) for pair in _ours_and_vllms(llm, prompts, stock, ignore_eos)]
        ours = [answers for answers, _ in pairs]
        forced = _off_when_forced(stock, prompts, ours)
    except Exception as error:
        return row | {"outcome": "no answer", "error": sentence(error, folder)}
    hypotheses = [one for answers in ours for one in answers]
    row |= {"outcome": "compared", "hypotheses": len(hypotheses), **compared(pairs)._asdict(), "forced": forced}
    return row | {"ended": sum(one.tokens[-1] == EOS for one in hypotheses)}


def works_without_beams(architecture: Architecture, folder: Path) -> bool:
    """Whether vLLM alone runs the model here."""
    from vllm import SamplingParams

    try:
        llm = start(architecture, folder, {})
        llm.generate([{"prompt_token_ids": _prompt(LENGTHS[0])}], SamplingParams(max_tokens=4), use_tqdm=False)
    except Exception:
        return False
    return True


def start(architecture: Architecture, folder: Path, options: dict[str, Any]) -> Any:
    """An engine in this process."""
    from vllm import LLM

    if architecture.twin:
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

        from benchmarks.architectures import gated_delta

        gdn_attention.cpu_gdn_attention_core = gated_delta.float32_attention
    return LLM(str(folder), **{**ENGINE, **architecture.engine, **options})


def compared(pairs: Sequence[tuple[list[Hypothesis], list[Hypothesis]]]) -> Agreement:
    """Of several searches. Hypotheses that only one side has differ."""
    equal, tied, worst = 0, 0, 0.0
    for ours, theirs in pairs:
        for our, their in zip(ours, theirs, strict=False):
            difference = abs(our.score - their.score) / max(1.0, abs(their.score))
            worst = max(worst, difference)
            equal += our.tokens == their.tokens
            tied += our.tokens != their.tokens and difference < NEAR_TIE
    return Agreement(equal, tied, worst)


def sentence(error: BaseException, folder: Path) -> str:
    """The first line of what an error says, or else where it was raised, without what changes from run to run."""
    text = str(error).strip() or traceback.extract_tb(error.__traceback__)[-1].line or type(error).__name__
    if inside := re.search(r"(?:Value|Assertion) error, (.*?)(?: \[type=|$)", text, re.DOTALL):
        text = inside[1]
    return text.splitlines()[0].replace(str(folder), "the model")[:300]


def _prompt(length: int) -> list[int]:
    shuffled = random.Random(length)
    return [shuffled.randrange(2, VOCABULARY) for _ in range(length)]


def _caches(core: Any) -> list[str]:
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    specs = [
        spec
        for group in groups
        for spec in getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}).values()
    ]
    names = [type(spec).__name__ for spec in specs]
    return sorted({KINDS_OF_CACHE.get(name, name) for name in names})


def _ours(llm: Any, prompts: list[list[int]], ignore_eos: bool, **options: Any) -> list[list[Hypothesis]]:
    return [*map(_hypotheses, _outputs(llm, prompts, ignore_eos, **options))]


def _outputs(llm: Any, prompts: list[list[int]], ignore_eos: bool, **options: Any) -> list[Any]:
    from vllm_trie import beam_params

    params = beam_params(WIDTH, n=WIDTH, max_tokens=MAX_TOKENS, ignore_eos=ignore_eos, **options)
    outputs: list[Any] = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return outputs


def _hypotheses(output: Any) -> list[Hypothesis]:
    return [Hypothesis([*one.token_ids], one.cumulative_logprob / len(one.token_ids)) for one in output.outputs]


def _load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    # "eager" is the one that knows Gemma's soft caps.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.base_model.do_not_compile = True  # vLLM's Transformers backend compiles the class once it runs
    return model


def _theirs(reference: Any, prompt: list[int], ignore_eos: bool, width: int = WIDTH) -> list[Hypothesis]:
    import torch

    reference.generation_config.eos_token_id = None if ignore_eos else EOS
    output = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        early_stopping=False,
        length_penalty=1.0,
        pad_token_id=-1,
        output_scores=True,
        return_dict_in_generate=True,
    )
    scores = output.sequences_scores.tolist() if width > 1 else [0.0]
    answers = output.sequences[:, len(prompt) :].tolist()
    return [Hypothesis(_until_end(tokens, ignore_eos), score) for tokens, score in zip(answers, scores, strict=True)]


def _until_end(tokens: list[int], ignore_eos: bool) -> list[int]:
    if not ignore_eos and EOS in tokens:
        return tokens[: tokens.index(EOS) + 1]
    return [token for token in tokens if token != -1]


def _off(reference: Any, prompts: list[list[int]], answers: list[list[Hypothesis]]) -> float:
    """By how much scores differ, at most, from those that one forward of transformers gives to the same tokens."""
    import torch

    worst = 0.0
    for number, hypotheses in enumerate(answers):
        prompt = prompts[number % len(prompts)]
        for tokens, score in hypotheses:
            with torch.inference_mode():
                logits = reference(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])
            worst = max(worst, abs(logprobs.mean().item() - score) / max(1.0, abs(score)))
    return worst


def _greedy(llm: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [[*output.outputs[0].token_ids] for output in outputs]


def _greedy_by_token(llm: Any, prompts: list[list[int]]) -> list[list[int]]:
    """As vLLM's own loop over beams asks for them: a request for each token."""
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(MAX_TOKENS):
        asked = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        for answer, new in zip(answers, _greedy(llm, asked, 1), strict=True):
            answer += new
    return answers


def _ours_and_vllms(
    llm: Any, prompts: list[list[int]], stock: Any, ignore_eos: bool = False
) -> list[tuple[list[Hypothesis], list[Hypothesis]]]:
    """`LLM.beam_search` in the engine, and in vLLM's own loop of requests.

    Args:
        stock: The engine that the requests are sent to.
    """
    from vllm.sampling_params import BeamSearchParams

    from vllm_trie.entrypoints.llm import llm_beam_search

    params = BeamSearchParams(WIDTH, max_tokens=MAX_TOKENS, ignore_eos=ignore_eos)
    asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = []
    for ours, theirs in zip(
        llm.beam_search(asked, params), llm_beam_search.original(stock, asked, params), strict=True
    ):
        sides = (
            [Hypothesis(one.tokens, one.cum_logprob / len(one.tokens)) for one in side.sequences]
            for side in (ours, theirs)
        )
        found.append(tuple(sides))
    return found


def _break_ties_by_token(stock: Any) -> None:
    """Show vLLM's own loop the log-probabilities of a place by token: the order of equal ones is open otherwise."""
    answered = stock._render_and_run_requests

    def in_order(*args: Any, **kwargs: Any) -> list[Any]:
        outputs = answered(*args, **kwargs)
        for completion in (completion for output in outputs for completion in output.outputs):
            completion.logprobs = completion.logprobs and [dict(sorted(place.items())) for place in completion.logprobs]
        return outputs

    stock._render_and_run_requests = in_order


def _off_when_forced(stock: Any, prompts: list[list[int]], answers: list[list[Hypothesis]]) -> float:
    """By how much log-probabilities per new token differ, at most, from those that vLLM gives to the same tokens.

    Args:
        answers: As `_ours_and_vllms` returns them: prompts are part of their tokens.
    """
    from vllm import SamplingParams

    forced = SamplingParams(max_tokens=1, prompt_logprobs=0)
    worst = 0.0
    for number, hypotheses in enumerate(answers):
        start_of_answer = len(prompts[number % len(prompts)])
        asked = [{"prompt_token_ids": one.tokens} for one in hypotheses]
        for one, output in zip(hypotheses, stock.generate(asked, forced, use_tqdm=False), strict=True):
            places = zip(one.tokens, output.prompt_logprobs, strict=True)
            logprobs = [place[token].logprob for token, place in [*places][start_of_answer:]]
            worst = max(worst, abs(sum(logprobs) - one.score * len(one.tokens)) / len(logprobs))
    return worst
