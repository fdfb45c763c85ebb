"""`make demo`: beam search inside vLLM on a real model, compared with what vLLM has; all is measured on the spot."""

from __future__ import annotations

import argparse
import statistics
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks.common import (
    BLOCK_SIZE,
    alternate,
    console,
    make_engine,
    median_ratio,
    one_at_a_time,
    show,
    stop,
    timed,
)
from benchmarks.demo_prompts import Subject, Task, real, toy
from benchmarks.model_wheels import UnavailableError
from benchmarks.watch import total_counts, watched
from benchmarks.whisper_base import get as whisper
from benchmarks.whisper_base.speech import SENTENCES, Clip, speaker_is_here
from benchmarks.whisper_base.speech import say as spoken
from vllm_trie import beam_params

WIDTH = 4
SHOWN = 2  # hypotheses of a search
WIDTHS = (1, 4, 8)
TIMED_PROMPTS, TIMED_TOKENS = 3, 24
BLOCKS_PROMPT, BLOCKS_TOKENS = 256, 64
LAYERS = 4
LONGEST_SHOWN = 240  # characters of a question
SPEECH_WIDTH = 5
NEXT = """Three things to try next, in this folder:
- your own prompts:     the server and the client that README.md begins with
- a search to look at:  examples/playground, a page that asks this server and draws the trie of the beams
- items by their ids:   examples/retrieve, a million items, searched by beams that find items alone"""
INTERRUPTED = 130
MINUTES = 8
START = "about 20 seconds"
ENGINE = {"in_process": True, "enforce_eager": True, "max_num_seqs": 64, "kv_cache_memory_bytes": 1 << 30}
# Without it the model fills a JSON answer with blanks.
GRAMMARS = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--toy", action="store_true", help="run on the toy model that comes along, and fetch nothing")
    parser.add_argument("--tasks", type=int, help="prompts to answer; all by default")
    parser.add_argument("--repeats", type=int, default=2, help="alternations per timing; medians are shown")
    args = parser.parse_args()
    try:
        demonstrate(toy() if args.toy else _real_or_toy(), args.tasks, args.repeats)
    except KeyboardInterrupt:
        console.print("Interrupted.")
        return INTERRUPTED
    return 0


def _real_or_toy() -> Subject:
    try:
        return real()
    except UnavailableError as error:
        console.print(
            f"{error}\nThe demo goes on with a toy model. What it writes looks like Python and means nothing."
        )
        return toy()


def demonstrate(subject: Subject, num_tasks: int | None, repeats: int) -> None:
    """Answer the tasks, count blocks, take times, speculate, and hear a sentence where that can be."""
    tasks = subject.tasks[:num_tasks]
    hears = whisper.is_at_hand() and speaker_is_here()
    say(
        f"The model is {subject.description}. The demo shows 1. answers, 2. memory, 3. time, 4. a draft model"
        f"{', 5. speech' if hears else ''}. It takes about {MINUTES} minutes on two idle cores, more on busy ones.",
        f"Starting vLLM with the model ({START}) ...",
    )
    llm = make_engine(model=subject.model, dtype=subject.dtype, **ENGINE, **GRAMMARS)
    say(
        f"1. ANSWERS. Greedy decoding takes the likeliest token at each step. Beam search keeps the {WIDTH} likeliest "
        "beginnings of an answer at each step, its beams, and so often finds answers that are likelier as a whole. "
        "vLLM's own beam search is a loop outside its engine: for each token it sends each beam as a new request. This "
        "project searches inside the engine. The model is small: what it says may be wrong.",
        "- log p: the natural logarithm of the probability that the model gives to all tokens of the answer, the one "
        "that ends it among them. Nearer to 0 is likelier. In bfloat16 the same tokens may get a slightly different "
        "log p in a batch of another size.\n"
        "- log p per token: beams in the engine are ranked by it. Each token makes log p lower, so a longer answer may "
        "rank first though its log p is lower.\n"
        "- ms: the time of a second, warm call.\n"
        "- answer: one that breaks off has reached its limit of tokens.",
    )
    for task in tasks:
        answer(llm, task)
    say(
        "2. MEMORY. Beams have most of their text in common. In the engine they share the KV blocks that hold it, "
        f"{BLOCK_SIZE} tokens each. Here a search adds {BLOCKS_TOKENS} tokens to a prompt of {BLOCKS_PROMPT}. "
        "Where separate sequences find the prompt in vLLM's prefix cache, they share it, too, but "
        "nothing that comes after it.",
        "- blocks held: the most in use in any step, counted in vLLM's own pool.\n"
        "- beams apart would hold: the blocks of as many separate sequences of the same length.\n"
        "- share: blocks held / beams apart would hold.",
    )
    count_blocks(llm, tasks)
    say(
        f"3. TIME. {len(tasks[:TIMED_PROMPTS])} prompts at once, {TIMED_TOKENS} new tokens each, in seconds. Sampling "
        "as many answers as there are beams computes as many tokens and searches nothing: beam search should take no "
        "longer. It may take less, because the beams of a prompt are one request to vLLM, while each sample is a "
        "request of its own.",
        "- times ours: 2 means twice as long as beams in the engine. It is the median of the rounds' ratios, which may "
        "differ a little from the ratio of two medians.",
    )
    take_times(llm, tasks[:TIMED_PROMPTS], repeats)
    stop(llm)
    say(
        f"4. A DRAFT MODEL. A smaller model drafts the next {LAYERS} tokens of all beams, and one forward of the large "
        "model verifies these drafts. Drafted steps count up to the first in which a beam that the search keeps was "
        "not drafted, so the search finds what plain beam search finds. Drafts save time only where the "
        "smaller model is much cheaper and often right. Elsewhere drafting in every step takes longer. "
        "By default the engine measures this, and drafts where it pays.",
        "- steps per forward: tokens by which the beams grow in one forward of the large model; forwards of prompts do "
        "not count.\n"
        "- drafts accepted: drafted tokens that became part of a beam; for each place several are drafted.\n"
        "- times plain: 2 means twice as long as plain beams.\n"
        "- same best answer: in bfloat16 a forward of more rows rounds otherwise, so beams with nearly equal scores "
        "may change places; in float32 all are the same.",
        f"Starting vLLM with a draft model ({START}) ...",
    )
    draft = {"method": "draft_model", "model": str(subject.draft), "num_speculative_tokens": LAYERS}
    llm = make_engine(model=subject.model, dtype=subject.dtype, speculative_config=draft, **ENGINE, **GRAMMARS)
    speculate(llm, [task for task in tasks if task.schema is None][:TIMED_PROMPTS], repeats)
    stop(llm)
    if hears:
        say(
            f"5. SPEECH. Whisper base hears a sentence that espeak-ng says. The encoder runs once for all "
            f"{SPEECH_WIDTH} beams, where vLLM's own loop runs it for each token of each beam.",
            f"Starting vLLM with Whisper ({START}) ...",
        )
        hear(SENTENCES["en"][5])
    say(NEXT)


def say(*paragraphs: str) -> None:
    """Explain what comes next."""
    for text in paragraphs:
        console.print(f"\n{text}", highlight=False, markup=False)


class Found(NamedTuple):
    """One answer: what found it, its log p and tokens, seconds of the search, its text."""

    way: str
    logprob: float
    num_tokens: int
    seconds: float
    text: str


def answer(llm: Any, task: Task) -> None:
    """Answer one prompt in three ways, one after the other."""
    prompt = task.prompt(llm.get_tokenizer())
    ways = tqdm((_greedy, _in_the_engine, _own_loop), desc=task.name, leave=False)
    found = [one for way in ways for one in way(llm, task, prompt)]
    beginning = textwrap.shorten(task.text, LONGEST_SHOWN) if task.is_chat else task.text.rstrip()
    say(f"Asked for {task.name}: {beginning}")
    show(
        "",
        ("way", "log p", "tokens", "log p per token", "ms", "answer"),
        [
            (
                one.way,
                f"{one.logprob:.2f}",
                one.num_tokens,
                f"{one.logprob / one.num_tokens:.3f}",
                _ms(one),
                _shown(one),
            )
            for one in found
        ],
        task.note,
    )


def _ms(found: Found) -> str:
    return f"{1000 * found.seconds:.0f}" if found.seconds else ""


def _shown(found: Found, lines: int = 8) -> str:
    kept = textwrap.dedent(found.text.strip()).split("\n")
    return "\n".join(kept[:lines] + (["..."] if len(kept) > lines else []))


def _structure(task: Task) -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    return {} if task.schema is None else {"structured_outputs": StructuredOutputsParams(json=task.schema)}


def _measured(run: Callable[[], Any]) -> tuple[Any, float]:
    """What a second call returns, and its seconds: the first one warms up."""
    run()
    results = []
    seconds = timed(lambda: results.append(run()))
    return results[0], seconds


def _greedy(llm: Any, task: Task, prompt: str) -> list[Found]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=task.max_tokens, logprobs=0, **_structure(task))
    (output,), seconds = _measured(lambda: llm.generate([prompt], params, use_tqdm=False))
    best = output.outputs[0]
    return [Found("greedy", best.cumulative_logprob, len(best.token_ids), seconds, best.text)]


def _in_the_engine(llm: Any, task: Task, prompt: str) -> list[Found]:
    params = beam_params(WIDTH, n=SHOWN, max_tokens=task.max_tokens, **_structure(task))
    (output,), seconds = _measured(lambda: llm.generate([prompt], params, use_tqdm=False))
    names, times = (f"{WIDTH} beams in the engine", "  second best"), (seconds, 0.0)
    return [
        Found(name, one.cumulative_logprob, len(one.token_ids), time, one.text)
        for name, time, one in zip(names, times, output.outputs, strict=True)
    ]


def _own_loop(llm: Any, task: Task, prompt: str) -> list[Found]:
    from vllm.sampling_params import BeamSearchParams

    from vllm_trie.entrypoints.llm import llm_beam_search

    params = BeamSearchParams(beam_width=WIDTH, max_tokens=task.max_tokens, **_structure(task))
    (output,), seconds = _measured(lambda: llm_beam_search.original(llm, [{"prompt": prompt}], params))
    best = output.sequences[0]
    tokenizer = llm.get_tokenizer()
    tokens = best.tokens[len(tokenizer(prompt)["input_ids"]) :]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return [Found(f"{WIDTH} beams, vLLM's own loop", best.cum_logprob, len(tokens), seconds, text)]


def count_blocks(llm: Any, tasks: Sequence[Task]) -> None:
    """Peak KV blocks of one search, from vLLM's own pool, against rows that share nothing."""
    tokenizer = llm.get_tokenizer()
    tokens = [token for task in tasks for token in tokenizer(task.prompt(tokenizer))["input_ids"]]
    prompt = (tokens * BLOCKS_PROMPT)[:BLOCKS_PROMPT]
    rows = []
    for width in tqdm(WIDTHS, desc="searches", leave=False):
        params = beam_params(width, max_tokens=BLOCKS_TOKENS, ignore_eos=True)
        peak = max(watched(llm, prompt, params, width).used)
        unshared = width * -(-(BLOCKS_PROMPT + BLOCKS_TOKENS - 1) // BLOCK_SIZE)
        rows.append((width, peak, unshared, f"{peak / unshared:.2f}"))
    show(
        "",
        ("beams", "blocks held", "beams apart would hold", "share"),
        rows,
    )


def take_times(llm: Any, tasks: Sequence[Task], repeats: int) -> None:
    """Time against vLLM's own beam loop and against plain sampling of as many sequences and tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import BeamSearchParams

    from vllm_trie.entrypoints.llm import llm_beam_search

    prompts = [task.prompt(llm.get_tokenizer()) for task in tasks]
    rows = []
    for width in WIDTHS[1:]:
        options = {"max_tokens": TIMED_TOKENS, "ignore_eos": True}
        client = BeamSearchParams(beam_width=width, **options)
        seconds = alternate(
            {
                "loop": partial(llm_beam_search.original, llm, [{"prompt": prompt} for prompt in prompts], client),
                "sampling": partial(llm.generate, prompts, SamplingParams(n=width, **options), use_tqdm=False),
                "engine": partial(llm.generate, prompts, beam_params(width, n=width, **options), use_tqdm=False),
            },
            repeats,
            title=f"{width} beams",
        )
        medians = (f"{statistics.median(seconds[name]):.2f}" for name in ("engine", "sampling", "loop"))
        ratios = (median_ratio(seconds[name], seconds["engine"]) for name in ("sampling", "loop"))
        rows.append((width, *medians, *(f"{ratio:.2f}" for ratio in ratios)))
    show(
        "",
        ("beams", "in the engine", "sampling", "vLLM's own loop", "sampling, times ours", "loop, times ours"),
        rows,
        f"Medians of {repeats} rounds, in which the three run in turn.",
    )


def speculate(llm: Any, tasks: Sequence[Task], repeats: int) -> None:
    """Search with and without a draft: the same answers in fewer forwards of the model, counted and timed."""
    prompts = [task.prompt(llm.get_tokenizer()) for task in tasks]
    ways = {"plain beams": "off", "drafts in every step": "exact", "drafts where they pay": "auto"}
    params = {way: beam_params(WIDTH, max_tokens=TIMED_TOKENS, speculation=own) for way, own in ways.items()}
    found = dict[str, list[Any]]()

    def search(way: str) -> None:
        found[way] = one_at_a_time(llm, prompts, params[way])

    seconds = alternate({way: partial(search, way) for way in ways}, repeats, title="rounds")
    plain, *_ = found.values()
    rows = []
    for way, outputs in found.items():
        is_plain = outputs is plain
        same = sum(_tokens(one) == _tokens(other) for one, other in zip(outputs, plain, strict=True))
        counts = None if is_plain else total_counts(outputs)
        rows.append(
            (
                way,
                "1.00" if counts is None else f"{counts.steps_per_forward:.2f}",
                "" if counts is None else f"{counts.accepted} of {counts.drafted}",
                f"{statistics.median(seconds[way]):.2f}",
                "" if is_plain else f"{median_ratio(seconds[way], seconds['plain beams']):.2f}",
                "" if is_plain else f"{same} of {len(prompts)}",
            )
        )
    show(
        f"{WIDTH} beams, one search at a time, {TIMED_TOKENS} new tokens at most",
        ("way", "steps per forward", "drafts accepted", "seconds", "times plain", "same best answer"),
        rows,
    )


def hear(sentence: str) -> None:
    """Transcribe a spoken sentence, greedily and by beams."""
    from vllm import SamplingParams

    from benchmarks.tables.speech import Prompts  # imports vLLM

    llm = make_engine(model=whisper.model(), max_model_len=448, **{**ENGINE, "max_num_seqs": SPEECH_WIDTH})
    prompt = Prompts(llm).for_engine(Clip(spoken(sentence, "en"), sentence, "en"))
    ways = {
        "greedy": SamplingParams(temperature=0, max_tokens=64, logprobs=0),
        f"{SPEECH_WIDTH} beams in the engine": beam_params(SPEECH_WIDTH, max_tokens=64),
    }
    rows = []
    for way, params in tqdm(ways.items(), desc="hearing", leave=False):
        (output,), seconds = _measured(lambda params=params: llm.generate([prompt], params, use_tqdm=False))
        best = output.outputs[0]
        rows.append((way, f"{best.cumulative_logprob:.2f}", f"{1000 * seconds:.0f}", best.text.strip()))
    show(f"Said: {sentence}", ("way", "log p", "ms", "answer"), rows)
    stop(llm)


def _tokens(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


if __name__ == "__main__":
    sys.exit(main())
