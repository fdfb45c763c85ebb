"""From sound to text with Whisper: the time of features, encoder and decoder by search."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import NamedTuple
from unittest import mock

from transformers import WhisperFeatureExtractor

from benchmarks.common import generate, timed
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.peers.whisper import WhisperInCTranslate2, WhisperInTransformers
from benchmarks.tables.speech import NUM_TOKENS, OURS, Prompts, batches_of_clips, engine, peers
from benchmarks.watch import clocked, runner_of
from benchmarks.whisper_base.speech import Clip
from vllm_trie import beam_params

WIDTH = 5
SHARED = f'{OURS}, shared_prefix_attention="on"'


class Parts(NamedTuple):
    """Seconds of one call. What a peer's search does besides the decoder is part of its decoder."""

    whole: float
    features: float
    encoder: float
    decoder: float

    @property
    def rest(self) -> float:
        """What is in no part."""
        return self.whole - self.features - self.encoder - self.decoder


Timed = Callable[[Sequence[Clip]], Parts]


def cells(setting: Setting) -> list[Cell]:
    return [(count,) for count in setting.pick((1,), (1, 8), (1, 8, 32))]


def measure(bench: Bench, count: int) -> Measured:
    """The searches in turn on batches of so many clips; each has heard a clip before."""
    setting = bench.setting
    num_tokens = setting.max_tokens or setting.pick(8, NUM_TOKENS, NUM_TOKENS)
    width = setting.widths[0] if setting.widths else setting.pick(2, WIDTH, WIDTH)
    ours = _ours(bench, width, num_tokens)
    runs = {OURS: ours, SHARED: _sharing(bench, ours)}
    runs |= {name: _of_peer(bench, model, width, num_tokens) for name, model in peers(bench).items()}
    warm_up, *batches = batches_of_clips(setting, count)
    for run in runs.values():
        run(warm_up)
    parts: dict[str, list[Parts]] = {name: [] for name in runs}
    for batch in batches:
        for name, run in runs.items():
            parts[name].append(run(batch))
    rows = list[Cell]()
    for name, own in parts.items():
        medians = (statistics.median(values) for values in zip(*own, strict=True))
        rest = statistics.median(one.rest for one in own)
        rows.append((count, width, name, *medians, rest if name in (OURS, SHARED) else "", len(own)))
    return Measured(rows)


def _ours(bench: Bench, width: int, num_tokens: int) -> Timed:
    llm = engine(bench)
    prompts = Prompts(llm)
    model, params = runner_of(llm).model, beam_params(width, n=width, max_tokens=num_tokens)
    parts = {
        "features": (WhisperFeatureExtractor, "__call__"),
        "encoder": (model, "embed_multimodal"),
        "forward": (model, "forward"),
        "logits": (model, "compute_logits"),
    }

    def hear(heard: Sequence[Clip]) -> Parts:
        with clocked(llm, parts) as clock:
            whole = timed(lambda: generate(llm, [prompts.for_engine(clip) for clip in heard], params))
        total = Counter[str]()
        for step in clock.steps:
            total.update(step)
        return Parts(whole, total["features"], total["encoder"], total["forward"] + total["logits"])

    return hear


def _sharing(bench: Bench, ours: Timed) -> Timed:
    """The same search where attention reads what an encoder made once for all beams, as with the option "on"."""
    builders = [
        builder for group in chain(*runner_of(engine(bench)).attn_groups) for builder in group.metadata_builders
    ]

    def hear(heard: Sequence[Clip]) -> Parts:
        with ExitStack() as stack:
            for builder in builders:
                stack.enter_context(mock.patch.object(builder, "option", "on"))
            return ours(heard)

    return hear


def _of_peer(bench: Bench, model: WhisperInTransformers | WhisperInCTranslate2, width: int, num_tokens: int) -> Timed:
    prompts = Prompts(engine(bench))

    def hear(heard: Sequence[Clip]) -> Parts:
        found = []
        features = timed(lambda: found.append(model.features([clip.sound for clip in heard])))
        encoder = timed(lambda: found.append(model.encode(found[-1])))
        asked = [prompts.tokens(clip.language) for clip in heard]
        decoder = timed(lambda: model.search(found[-1], asked, width, num_tokens))
        return Parts(features + encoder + decoder, features, encoder, decoder)

    return hear


TABLE = Table(
    "Speech to text: where the time goes, s",
    ("clips at once", "beams", "search", "whole", "features", "encoder", "decoder", "rest", "n"),
    cells,
    measure,
    f"of a call with {WIDTH} beams, clocks running, medians; decoder: forward passes and logits of ours, all of the "
    'others\' search; rest: scheduling, selection, KV and texts; "on": attention reads what the encoder made once for '
    'all beams, as "auto" does from 8 beams on; clips as in the table of speech to text',
    is_of_speech=True,
)
