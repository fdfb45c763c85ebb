"""Kinds of engines with what is searched in them, for whatever is to hold in each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams

from tests.support.engine import Engine, Engines
from tests.support.grammars import structured
from tests.support.options import OPTIONS, SAMPLED, WITHOUT_TEXT
from tests.support.pairs import NOISE, TRAINED, Pair, drafting
from tests.support.running import Job, prompt_of, trained_prompts
from tests.support.sweep import sweep
from vllm_trie import beam_params

MAX_TOKENS = 12
PROMPT = 29  # a few tokens before a block boundary
LAYERS = 3
LIMITS = {"max_model_len": 128, "max_num_batched_tokens": 128}
LONG = [  # forks lie more than a block apart when histories are computed anew
    {"beam_width": 1, "max_tokens": 40, "ignore_eos": True, "prompt": 20},
    {"beam_width": 6, "max_tokens": 40, "ignore_eos": True, "prompt": 20},
    {"beam_width": 4, "max_tokens": 40, "prompt": 70, "logprobs": 2},
]
FEW = [{"min_tokens": 6, "stop_token_ids": [13, 15]}, {"frequency_penalty": 0.4, "temperature": 0.9}]
SAMPLED_PLAINLY = [options | {"speculation": "off"} for options in SAMPLED]


@dataclass(frozen=True)
class Mode:
    """An engine, and what is searched in it.

    Attributes:
        kind: Of model; "trained" for the trained one.
        options: Of the engine.
        asked: Options of each search.
        num_layers: Drafted by a draft model, if there is one.
        draws_anew: Rows that compute their histories anew do not speculate, and use the seed otherwise.
    """

    kind: str
    options: dict[str, Any]
    asked: Sequence[dict[str, Any]] = field(repr=False)
    num_layers: int = 0
    draws_anew: bool = False

    @property
    def is_trained(self) -> bool:
        return self.kind == "trained"

    @property
    def speculates(self) -> bool:
        return any(options.get("speculation", "off") != "off" for options in self.asked)

    @property
    def overlaps(self) -> bool:
        """Steps of a search are scheduled while others are on their way."""
        return self.options.get("async_scheduling", True) and not self.speculates

    def start(self, engines: Engines, random_pair: Callable[[str, float], Pair]) -> Engine:
        target, draft = TRAINED if self.is_trained else random_pair(self.kind, NOISE)
        drafts = drafting(draft, self.num_layers) if self.num_layers else {}
        return engines(target, **{**LIMITS, **self.options}, **drafts)

    def jobs(self, **more: Any) -> list[Job]:
        """The searches, each with these options, too, and an ordinary request."""
        lengths = [options.get("prompt", PROMPT + number % 5) for number, options in enumerate(self.asked)]
        prompts = trained_prompts(lengths) if self.is_trained else [prompt_of(n, n) for n in lengths]
        jobs = []
        for prompt, options in zip(prompts, self.asked, strict=True):
            options = {"beam_width": 3, "max_tokens": MAX_TOKENS} | options | more
            options.pop("prompt", None)
            options.setdefault("n", options["beam_width"])
            jobs.append((prompt, beam_params(**options)))
        ordinary = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        return [*jobs, (prompts[0], ordinary)]


def each(asked: Sequence[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    return [options | more for options in asked]


EXACT = [*each(LONG, speculation="exact", draft_width=16), *each(FEW, speculation="exact")]
SAMPLED_WITH_DRAFTS = each([{}, {"beam_width": 1}, {"replacement": True}], speculation="sample", seed=1, max_tokens=24)
SAMPLED_WITH_DRAFTS += [SAMPLED_WITH_DRAFTS[0] | {"threshold": 0.8, "min_width": 2}]
GRAMMATICAL: list[dict[str, Any]] = [
    {"structured_outputs": structured("schema"), "max_tokens": 24},
    {"structured_outputs": structured("regex"), "beam_width": 5, "logprobs": 2},
    {"structured_outputs": structured("object"), "semantics": "vllm", "frequency_penalty": 0.4},
    {"structured_outputs": structured("grammar"), "do_sample": True, "seed": 3, "temperature": 0.7},
    {"structured_outputs": structured("choice"), "sample_first": 2, "seed": 5},
    {},  # ordinary
]
ROOMY = {"max_num_batched_tokens": 512}  # what is sampled depends on what is left over to speculate with
PLAIN = [*LONG, *WITHOUT_TEXT, *SAMPLED]
MOVES = {"num_beam_groups", "beam_widths", "allowed_sequences"}  # rows otherwise than most do
MOVED = [*LONG, *FEW, *SAMPLED, *(options for options in WITHOUT_TEXT if options.keys() & MOVES)]
MODES = {
    "sync": Mode("gqa", {"async_scheduling": False, "enable_prefix_caching": False}, PLAIN),
    "async": Mode("gqa", {}, PLAIN),
    "windows": Mode("gemma2", {"enable_prefix_caching": False}, [*LONG, *FEW, *SAMPLED]),
    "states": Mode("granite4", {}, MOVED),
    "strings": Mode("trained", {}, OPTIONS[:6]),
    "exact": Mode("gqa", {"enable_prefix_caching": False}, EXACT, LAYERS),
    "exact with windows": Mode("gemma2", {}, EXACT, LAYERS),
    "exact with strings": Mode("trained", ROOMY, each(OPTIONS[:6], speculation="exact"), LAYERS),
    "sampled without drafts": Mode("trained", ROOMY, each(SAMPLED_PLAINLY, max_tokens=24), LAYERS),
    "sample": Mode("trained", ROOMY, SAMPLED_WITH_DRAFTS, LAYERS, draws_anew=True),
    "grammars": Mode("trained", {}, GRAMMATICAL),
    "memory": Mode("trained", ROOMY, each(SAMPLED_WITH_DRAFTS[:2], memory_mode=True), LAYERS),
}
SWEEP = sweep(MODES, "async", "states", "exact", "sample", "grammars")
