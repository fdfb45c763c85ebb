"""From sound to text with Whisper: word error rates by number format, and which rules tell CTranslate2's beams apart.

CTranslate2 suppresses tokens before it normalises, stops when b hypotheses have ended, and divides a hypothesis's score
by its length without the token that ends it. One search in the engine does so, too. Source: CTranslate2 4
`src/decoding.cc`, `src/models/whisper.cc`.
"""

from __future__ import annotations

from typing import Any

from benchmarks.common import generate
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.peers.whisper import WhisperInCTranslate2
from benchmarks.tables.speech import CTRANSLATE2, NUM_TOKENS, OURS, Prompts, engine, spoken
from benchmarks.whisper_base.speech import word_error_rate
from vllm_trie import beam_params

WIDTH = 5
DTYPES = ("float32", "bfloat16")
ORDINARY, BY_THEIR_RULES = "ordinary requests, greedy", f"{OURS}, by CTranslate2's rules"
SUPPRESSED = -100.0  # added to a logit


def cells(setting: Setting) -> list[Cell]:
    return [(dtype,) for dtype in DTYPES]


def measure(bench: Bench, dtype: str) -> Measured:
    """The searches one after the other, of all clips each; CTranslate2 computes in float32 whatever the others do."""
    from vllm import SamplingParams

    setting = bench.setting
    heard = spoken(setting.pick(2, 60, 200))
    num_tokens = setting.max_tokens or setting.pick(8, NUM_TOKENS, NUM_TOKENS)
    width = setting.widths[0] if setting.widths else setting.pick(2, WIDTH, WIDTH)
    model = WhisperInCTranslate2(setting.model)
    llm = engine(bench, dtype=dtype)
    prompts = Prompts(llm)

    def ours(params: Any) -> list[list[Any]]:
        return [output.outputs for output in generate(llm, [prompts.for_engine(clip) for clip in heard], params)]

    suppressed = llm.model_config.try_get_generation_config().get("suppress_tokens") or ()
    rules = {"early_stopping": True, "logit_bias": dict.fromkeys(suppressed, SUPPRESSED)}
    texts = {
        (ORDINARY, 1): [found[0].text for found in ours(SamplingParams(temperature=0.0, max_tokens=num_tokens))],
        (OURS, width): [found[0].text for found in ours(beam_params(width, max_tokens=num_tokens))],
        (BY_THEIR_RULES, width): [
            max(found, key=_score_without_end).text
            for found in ours(beam_params(width, n=width, max_tokens=num_tokens, **rules))
        ],
    }
    for clip in heard:
        encoded = model.encode(model.features([clip.sound]))
        ((best,),) = model.search(encoded, [prompts.tokens(clip.language)], width, num_tokens)
        texts.setdefault((CTRANSLATE2, width), []).append(prompts.text(best))
    theirs, said = texts[CTRANSLATE2, width], [clip.text for clip in heard]
    rows = list[Cell]()
    for (search, num_beams), own in texts.items():
        alike = sum(text == other for text, other in zip(own, theirs, strict=True))
        rows.append((dtype, search, num_beams, len(heard), word_error_rate(own, said), alike))
    return Measured(rows)


def _score_without_end(found: Any) -> float:
    """The log-probability of a hypothesis over its tokens but the one that ends it."""
    return found.cumulative_logprob / max(len(found.token_ids) - (found.finish_reason == "stop"), 1)


TABLE = Table(
    "Speech to text: word error rates",
    ("number format", "search", "beams", "clips", "word error rate", "answers as CTranslate2's"),
    cells,
    measure,
    "one or two sentences each, in five languages, said by espeak-ng; answers as CTranslate2's: of the best, those "
    "with the same text; CTranslate2 computes in float32 in all rows; ordinary requests suppress no tokens; "
    f"by CTranslate2's rules: early_stopping=True, suppressed tokens by a logit_bias of {SUPPRESSED:g}, and of the b "
    "hypotheses the best by log p over the length without the token that ends it; "
    f"at most {NUM_TOKENS} tokens, no timestamps",
    is_of_speech=True,
)
