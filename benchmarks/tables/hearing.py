"""Does the engine hear what transformers hears? All hypotheses of clips, by language, against `generate`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common import generate
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.peers.whisper import Hypothesis, WhisperInTransformers
from benchmarks.tables.fidelity import NEAR_TIE
from benchmarks.tables.speech import FROM_THE_START, NUM_TOKENS, WITHOUT_TIMESTAMPS, Prompts, engine, spoken
from vllm_trie import beam_params

WIDTH = 5
BATCH = 8  # clips at once in transformers
LANGUAGES = ("en", "de", "fr", "es", "it")


def cells(setting: Setting) -> list[Cell]:
    return [(language,) for language in setting.pick(("en", "de"), LANGUAGES, LANGUAGES)]


def measure(bench: Bench, language: str) -> Measured:
    """The clips of one language, with both ends of the prompt; transformers encodes them once for both."""
    setting = bench.setting
    heard = [clip for clip in spoken(setting.pick(2, 24, 200)) if clip.language == language]
    num_tokens = setting.max_tokens or setting.pick(8, NUM_TOKENS, NUM_TOKENS)
    width = setting.widths[0] if setting.widths else setting.pick(2, WIDTH, WIDTH)
    llm = engine(bench)
    prompts = Prompts(llm)
    model = WhisperInTransformers(setting.model, setting.dtype)
    batches = [heard[start : start + BATCH] for start in range(0, len(heard), BATCH)]
    encoded = [model.encode(model.features([clip.sound for clip in batch])) for batch in batches]
    params = beam_params(width, n=width, max_tokens=num_tokens)
    rows = list[Cell]()
    for end in (WITHOUT_TIMESTAMPS, FROM_THE_START):
        outputs = generate(llm, [prompts.for_engine(clip, end) for clip in heard], params)
        ours = [
            [Hypothesis(list(one.token_ids), one.cumulative_logprob / len(one.token_ids)) for one in output.outputs]
            for output in outputs
        ]
        theirs = [
            found
            for batch, sounds in zip(batches, encoded, strict=True)
            for found in model.search(sounds, [prompts.tokens(language, end)] * len(batch), width, num_tokens, width)
        ]
        rows.append((end, language, width, len(heard), *compared(ours, theirs)))
    return Measured(rows)


def compared(
    ours: Sequence[Sequence[Hypothesis]], theirs: Sequence[Sequence[Hypothesis]]
) -> tuple[int, int, int, int, float]:
    """Hypotheses, those alike at their rank, near-ties, those that differ otherwise; the most that scores differ."""
    same = near = others = 0
    gaps = list[float]()
    for our_beams, their_beams in zip(ours, theirs, strict=True):
        for our, their in zip(our_beams, their_beams, strict=True):
            gaps.append(abs(our.score - their.score))
            same += our.token_ids == their.token_ids
            near += our.token_ids != their.token_ids and gaps[-1] < NEAR_TIE
            others += our.token_ids != their.token_ids and gaps[-1] >= NEAR_TIE
    return len(gaps), same, near, others, max(gaps)


TABLE = Table(
    "Speech to text: the hypotheses of transformers",
    (
        "prompt ends with",
        "language",
        "beams",
        "clips",
        "hypotheses",
        "identical",
        "near-ties",
        "different",
        "max |Δ score|",
    ),
    cells,
    measure,
    "identical: the tokens of the hypothesis at the same rank of generate(num_beams=b, num_return_sequences=b), "
    f"{BATCH} clips in a batch; near-ties: tokens differ and the scores at that rank by less than {NEAR_TIE}; score: "
    f"mean log p; at most {NUM_TOKENS} tokens, what the model's generation configuration suppresses left out "
    f"by both; after {FROM_THE_START}, both follow Whisper's rules of timestamps",
    is_of_speech=True,
)
