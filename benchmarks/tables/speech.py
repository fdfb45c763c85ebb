"""From sound to text with Whisper: words per second and word error rate by search.

Clips are those of benchmarks/whisper_base/speech.py. A search hears each of them once, and computes its features.
`--model whisper-base`, or a folder of another Whisper.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import generate, timed
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.peers.whisper import Hypothesis, WhisperInCTranslate2, WhisperInTransformers
from benchmarks.significance import paired
from benchmarks.whisper_base.speech import RATE, SPEAKER, Clip, clips, speaker_is_here, word_error_rate
from vllm_trie import beam_params
from vllm_trie.entrypoints.llm import llm_beam_search

OURS, CLIENT_LOOP = "beams in the engine", "vLLM's LLM.beam_search"
CTRANSLATE2, TRANSFORMERS = "CTranslate2", "transformers generate"
GREEDY = "greedy"
WIDTHS = (1, 5)
NUM_TOKENS = 64  # at most, of a hypothesis
BATCHES = {1: 4, 8: 2, 32: 1}  # times repeats, by clips at once: short calls vary more
LOOP_WIDTH, LOOP_TOKENS = 2, 24  # for vLLM's loop encodes the sound for each token of each beam
WITHOUT_TIMESTAMPS, FROM_THE_START = "<|notimestamps|>", "<|0.00|>"  # how the prompt ends

Search = Callable[[Sequence[Clip]], list[str]]


def cells(setting: Setting) -> list[Cell]:
    return [(count,) for count in setting.pick((1,), (1, 8), (1, 8, 32))]


def measure(bench: Bench, count: int) -> Measured:
    """All searches in turn on batches of so many clips; each has heard a clip before."""
    setting = bench.setting
    num_tokens = setting.max_tokens or setting.pick(8, NUM_TOKENS, NUM_TOKENS)
    runs = searches(bench, setting.widths or setting.pick((2,), WIDTHS, WIDTHS), num_tokens)
    warm_up, *batches = batches_of_clips(setting, count)
    for run in runs.values():
        run(warm_up)
    rows = _compared(count, runs, batches)
    if count == 1:
        num_tokens = min(num_tokens, LOOP_TOKENS)
        ours = search_in_engine(bench, beam_params(LOOP_WIDTH, n=LOOP_WIDTH, max_tokens=num_tokens))
        runs = {(OURS, LOOP_WIDTH): ours, (CLIENT_LOOP, LOOP_WIDTH): client_loop(bench, num_tokens)}
        rows += _compared(count, runs, batches[:1])
    return Measured(rows)


def batches_of_clips(setting: Setting, count: int) -> list[list[Clip]]:
    """One clip to warm up with, and batches of so many."""
    num_batches = setting.repeats * setting.pick(1, BATCHES[count], BATCHES[count])
    warm_up, *heard = spoken(1 + num_batches * count)
    return [[warm_up], *(heard[start : start + count] for start in range(0, len(heard), count))]


def _compared(count: int, runs: dict[tuple[str, int | str], Search], batches: Sequence[Sequence[Clip]]) -> list[Cell]:
    texts: dict[tuple[str, int | str], list[str]] = {key: [] for key in runs}
    seconds: dict[tuple[str, int | str], list[float]] = {key: [] for key in runs}
    for batch in batches:
        for key, run in runs.items():
            seconds[key].append(timed(lambda run=run, key=key, batch=batch: texts[key].extend(run(batch))))
    words = [sum(len(clip.text.split()) for clip in batch) for batch in batches]
    rows = list[Cell]()
    for (name, width), own in seconds.items():
        ours = seconds.get((OURS, width), own)
        per_second = statistics.median(said / one for said, one in zip(words, own, strict=True))
        wrong = word_error_rate(texts[name, width], [clip.text for batch in batches for clip in batch])
        ratio = "" if ours is own else str(paired(own, ours).ratio)
        rows.append((count, width, name, per_second, wrong, statistics.median(own), ratio, len(own)))
    return rows


def searches(bench: Bench, widths: Sequence[int], num_tokens: int) -> dict[tuple[str, int | str], Search]:
    """What hears clips, by name and beams; one beam is greedy search but for ours, which has both."""
    from vllm import SamplingParams

    prompts = Prompts(engine(bench))

    def peer(model: WhisperInTransformers | WhisperInCTranslate2, width: int) -> Search:
        def hear(heard: Sequence[Clip]) -> list[str]:
            encoded = model.encode(model.features([clip.sound for clip in heard]))
            found = model.search(encoded, [prompts.tokens(clip.language) for clip in heard], width, num_tokens)
            return [prompts.text(of_clip[0]) for of_clip in found]

        return hear

    of_ours: dict[int | str, Any] = {GREEDY: SamplingParams(temperature=0.0, max_tokens=num_tokens)}
    of_ours |= {width: beam_params(width, n=width, max_tokens=num_tokens) for width in widths}
    found = {(OURS, width): search_in_engine(bench, params) for width, params in of_ours.items()}
    for name, model in peers(bench).items():
        found |= {(name, GREEDY if width == 1 else width): peer(model, width) for width in sorted({1, *widths})}
    return found


def search_in_engine(bench: Bench, params: Any) -> Search:
    """By beams, or an ordinary request: the best text of each clip."""
    llm = engine(bench)
    prompts = Prompts(llm)

    def hear(heard: Sequence[Clip]) -> list[str]:
        outputs = generate(llm, [prompts.for_engine(clip) for clip in heard], params)
        return [output.outputs[0].text for output in outputs]

    return hear


def client_loop(bench: Bench, num_tokens: int) -> Search:
    """vLLM's own loop over requests of one token, on the same engine."""
    from vllm.sampling_params import BeamSearchParams

    llm = engine(bench)
    prompts = Prompts(llm)
    params = BeamSearchParams(beam_width=LOOP_WIDTH, max_tokens=num_tokens)

    def hear(heard: Sequence[Clip]) -> list[str]:
        outputs = llm_beam_search.original(llm, [prompts.for_engine(clip) for clip in heard], params)
        answers = [output.sequences[0].tokens[len(prompts.tokens("en")) :] for output in outputs]
        return [prompts.text(Hypothesis(answer, 0.0)) for answer in answers]

    return hear


def spoken(count: int) -> list[Clip]:
    """So many clips.

    Raises:
        ValueError: what says them is not installed.
    """
    if not speaker_is_here():
        raise ValueError(f"{SPEAKER} is not installed (apt-get install {SPEAKER})")
    return clips(count)


def engine(bench: Bench, **options: Any) -> Any:
    """An `LLM` with beams that computes the features of every sound anew."""
    return bench.engine(mm_processor_cache_gb=0, **options)


def peers(bench: Bench) -> dict[str, WhisperInTransformers | WhisperInCTranslate2]:
    """CTranslate2, where it can be had, and transformers."""
    found: dict[str, WhisperInTransformers | WhisperInCTranslate2] = {}
    try:
        found[CTRANSLATE2] = WhisperInCTranslate2(bench.setting.model)
    except ValueError as error:
        bench.say_once(f"{CTRANSLATE2} is left out: {error}")
    return found | {TRANSFORMERS: WhisperInTransformers(bench.setting.model, bench.setting.dtype)}


class Prompts:
    """What each search is given, and texts of what it finds."""

    def __init__(self, llm: Any) -> None:
        self._tokenizer = llm.get_tokenizer()

    def tokens(self, language: str, end: str = WITHOUT_TIMESTAMPS) -> list[int]:
        """Token ids of the decoder's prompt."""
        return self._tokenizer.convert_tokens_to_ids(
            ["<|startoftranscript|>", f"<|{language}|>", "<|transcribe|>", end]
        )

    def for_engine(self, clip: Clip, end: str = WITHOUT_TIMESTAMPS) -> dict[str, Any]:
        """A sound and the decoder's prompt, as `LLM.generate` takes them."""
        return {
            "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (clip.sound, RATE)}},
            "decoder_prompt": {"prompt_token_ids": self.tokens(clip.language, end)},
        }

    def text(self, hypothesis: Hypothesis) -> str:
        return self._tokenizer.decode(hypothesis.token_ids, skip_special_tokens=True)


TABLE = Table(
    "Speech to text",
    (
        "clips at once",
        "beams",
        "search",
        "words/s",
        "word error rate",
        "s",
        "times our time (95 %)",
        "n",
    ),
    cells,
    measure,
    "clips of one sentence or two in five languages, said by espeak-ng; whole calls, from sound to text, features "
    "included, medians; words/s: words that were said; the searches take turns on every batch, and each batch has "
    f"clips of its own; at most {NUM_TOKENS} tokens, no timestamps; what the model's generation "
    "configuration suppresses is left out, but by vLLM's ordinary requests and its loop; greedy: of ours an ordinary "
    "request in the same engine, of CTranslate2 (in float32, whatever the others have) and "
    f"transformers also what one beam is; all of ours return b answers, the others the best; {CLIENT_LOOP} encodes "
    f"the sound again for every token of every beam: measured once, with {LOOP_WIDTH} beams and {LOOP_TOKENS} tokens, "
    "which it always takes, as it does not stop when no beam can win any more; times: geometric mean of ratios",
    is_of_speech=True,
)
