"""Single beam requests of every kind, and what a plain loop over the model finds for them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from allpairspy import AllPairs
from torch.nn.utils.rnn import pad_sequence
from vllm import SamplingParams
from vllm.tokenizers import get_tokenizer

from tests.support.engine import TRAINED_TARGET, Engine
from tests.support.grammars import may_come, structured
from tests.support.loop import (
    Found,
    adjusted,
    allowed,
    competing_score,
    completed_string,
    loop_beams,
    masked_logprobs,
    one_thread,
)
from tests.support.reference import NEAR_TIE, SCORE_TOLERANCE, Answer, agree, load
from tests.support.running import MOST_TIES, prompt_of, trained_prompts
from vllm_trie import beam_params

LENGTH_PENALTIES = [-1.0, 0.0, 1.0, 2.0]
TOKENIZER = get_tokenizer(str(TRAINED_TARGET))
text_of = partial(TOKENIZER.decode, skip_special_tokens=True)
EOS, COMMA, DOT = 1, 13, 15
PENALTIES: dict[str, dict[str, Any]] = {
    "less presence": {"presence_penalty": 1.5},
    "more presence": {"presence_penalty": -1.2},
    "less frequency": {"frequency_penalty": 0.8},
    "more frequency": {"frequency_penalty": -0.5},
    "less repetition": {"repetition_penalty": 1.4},
    "more repetition": {"repetition_penalty": 0.8},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": -0.3, "repetition_penalty": 1.2},
    "all": {"presence_penalty": -0.4, "frequency_penalty": 0.9, "repetition_penalty": 0.9, "logit_bias": {40: 5.0}},
}
BIASES: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {5: 6.0, 17: -100.0, EOS: -1.0, 250: 7.5}},
    "bans": {"allowed_token_ids": [EOS, *range(40, 90)]},
    "harsh bans": {"allowed_token_ids": [EOS, 7, 8, 9]},
    "one token": {"allowed_token_ids": [9]},
    "one token or EOS": {"allowed_token_ids": [9, EOS]},
    "EOS": {"allowed_token_ids": [EOS]},
}
WARPINGS: dict[str, dict[str, Any]] = {
    "hot": {"temperature": 1.6},
    "cold": {"temperature": 0.4},
    "min_p": {"min_p": 0.2},
    "top_k": {"top_k": 3},
    "the best alone": {"top_k": 1},
    "top_p": {"top_p": 0.5},
    "all filters": {"temperature": 1.3, "min_p": 0.03, "top_k": 6, "top_p": 0.8},
    "all filters, penalties": {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "frequency_penalty": 0.7},
}
PRUNINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "relative": {"prune_relative": 0.1},
    "absolute": {"prune_absolute": 1.5},
    "local": {"prune_relative_local": 0.3},
    "one per parent": {"max_candidates_per_parent": 1},
    "two per parent": {"max_candidates_per_parent": 2, "prune_absolute": 4.0},
    "harsh": {"prune_relative": 0.7, "prune_relative_local": 0.7, "max_candidates_per_parent": 3},
}
FILTERS = ("min_p", "top_k", "top_p")
CONTROLS = {"none": {}, **PENALTIES, **BIASES, **WARPINGS}
RULES = ("semantics", "early_stopping", "length_penalty", "stop_token_ids", "stop", "min_tokens", "ignore_eos")
GRID = {"beam_width": [1, 2, 5], "semantics": ["hf", "vllm"], "early_stopping": [False, True, "never"]}
GRID |= {"length_penalty": LENGTH_PENALTIES, "min_tokens": [0, 7], "logprobs": [None, 0, 4]}
ORDINARY = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0, max_tokens=24, frequency_penalty=0.6, repetition_penalty=1.1, logprobs=2),
    SamplingParams(temperature=0, max_tokens=24, presence_penalty=-0.9, min_tokens=9, logit_bias={7: 2.0}),
    SamplingParams(temperature=0.9, max_tokens=24, seed=3, allowed_token_ids=[*range(1, 200)]),
]


@dataclass(frozen=True)
class Case:
    """One beam request. Where there is no tokenizer, on a random model, only `stop_token_ids` stop."""

    beam_width: int
    semantics: str = "hf"
    early_stopping: bool | str = False
    length_penalty: float = 1.0
    controls: str = "none"
    pruning: str = "none"
    grammar: str = ""
    bad_words: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int = 24
    ignore_eos: bool = True
    logprobs: int | None = None
    prompt_length: int = 20
    prompt: tuple[int, ...] = ()
    model: Path = TRAINED_TARGET

    @property
    def eos(self) -> int | None:
        return EOS if self.model == TRAINED_TARGET else None

    @property
    def adjust(self) -> Callable[..., torch.Tensor]:
        words = SamplingParams(bad_words=[*self.bad_words])
        words.update_from_tokenizer(TOKENIZER)
        adjust = partial(adjusted, bad_words=words.bad_words_token_ids or (), **CONTROLS[self.controls])
        return partial(self._matching, adjust) if self.grammar else adjust

    def _matching(
        self, adjust: Callable[..., torch.Tensor], logits: torch.Tensor, prompt: list[int], generated: list[int]
    ) -> torch.Tensor:
        stops = tuple(sorted({EOS, *self.stop_token_ids}))
        masked = torch.full_like(logits, -torch.inf)
        may = may_come(self.grammar, tuple(generated), stops)
        masked[may] = adjust(logits, prompt, generated)[may]
        return masked

    @property
    def allow(self) -> Callable[..., torch.Tensor]:
        return partial(allowed, **{name: v for name, v in CONTROLS[self.controls].items() if name in FILTERS})

    def params(self) -> SamplingParams:
        options = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}
        if self.grammar:
            options["structured_outputs"] = structured(self.grammar)
        for name in ("controls", "pruning", "grammar", "prompt_length", "prompt", "model"):
            del options[name]
        return beam_params(n=self.beam_width, **options, **CONTROLS[self.controls], **PRUNINGS[self.pruning])

    @cache  # noqa: B019
    def found(self) -> list[Found]:
        """What the loop finds."""
        rules = {name: getattr(self, name) for name in RULES} | {"eos": self.eos, "barred": {EOS}, "decode": text_of}
        rules |= {"adjust": self.adjust, "allow": self.allow, "pruning": PRUNINGS[self.pruning]}
        return loop_beams(self.model, [*self.prompt], self.beam_width, self.beam_width, self.max_tokens, **rules)


def text_to_return(case: Case, found: Found) -> str:
    by, tokens, include = found.stopped_by, found.token_ids, case.include_stop_str_in_output
    text = text_of(tokens[:-1] if isinstance(by, int) and not include else tokens)
    if isinstance(by, str):
        end, _ = completed_string(text_of(tokens[:-1]), text, [by])
        text = text[: end if include else end - len(by)]
    return text


def check(case: Case, outputs: list[Any]) -> bool:
    """Compare all there is to compare. Returns whether all hypotheses agree to the last token."""
    theirs = case.found()
    real, missing = outputs[: len(theirs)], outputs[len(theirs) :]
    assert all((o.token_ids, o.text, o.stop_reason) == ([], "", "no further hypothesis") for o in missing)
    uncounted = {case.eos, *case.stop_token_ids}
    score = partial(competing_score, case.semantics, case.length_penalty, len(case.prompt), uncounted=uncounted)
    same = agree([Answer([*o.token_ids], score([*o.token_ids], o.cumulative_logprob)) for o in real], theirs)
    for o, found in zip(real, theirs if same else [], strict=same):
        by = found.stopped_by
        assert (o.finish_reason, o.stop_reason) == ("length" if by is None else "stop", None if by == case.eos else by)
        assert o.text == (text_to_return(case, found) if case.eos is not None else "")
    if case.logprobs is not None and real:
        check_logprobs(case, real)
    return same


@one_thread()
@torch.inference_mode()
def check_logprobs(case: Case, outputs: list[Any]) -> None:
    """Each token, and the best in its place, have the log-probability and the rank of the adjusted distribution."""
    texts = pad_sequence([torch.tensor([*case.prompt, *output.token_ids]) for output in outputs], batch_first=True)
    logits_of_outputs = load(case.model)(texts, logits_to_keep=texts.shape[1] - len(case.prompt) + 1).logits
    for output, logits in zip(outputs, logits_of_outputs, strict=True):
        _check_logprobs(case, output, logits)


def _check_logprobs(case: Case, output: Any, logits: torch.Tensor) -> None:
    prompt, tokens, most = [*case.prompt], [*output.token_ids], case.logprobs or 0
    barred = {*case.stop_token_ids, EOS}  # until min_tokens: EOS, too, where it is ignored
    for place, (token, reported) in enumerate(zip(tokens, output.logprobs, strict=True)):
        masked = barred if place < case.min_tokens else ()
        row = masked_logprobs(case.adjust(logits[place], prompt, tokens[:place]), masked)
        assert reported.keys() >= {token}
        assert {entry.rank for entry in reported.values()} >= {*range(1, most + 1)}
        assert len(reported) <= most + 1
        for other, entry in reported.items():
            logprob = row[other].item()
            assert entry.logprob == pytest.approx(logprob, abs=SCORE_TOLERANCE), (place, other)
            better, as_good = (row > logprob + NEAR_TIE).sum(), (row >= logprob - NEAR_TIE).sum()
            assert better < entry.rank <= as_good, (place, other, entry)


def run(engine: Engine, cases: list[Case]) -> None:
    """All cases in one batch, each followed by an ordinary request, which must answer as it does without them."""
    prompts = [[*case.prompt] for case in cases]
    ordinary = [*itertools.islice(itertools.cycle(ORDINARY), len(cases))]
    alone = engine.generate(prompts, ordinary)
    params = [p for pair in zip([case.params() for case in cases], ordinary, strict=True) for p in pair]
    outputs = engine.generate([prompt for prompt in prompts for _ in range(2)], params)
    in_full = 0
    for case, output in zip(cases, outputs[::2], strict=True):
        try:
            in_full += check(case, output.outputs)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
    assert in_full >= (1 - MOST_TIES) * len(cases)
    for one, other in zip(alone, outputs[1::2], strict=True):
        (a,), (b,) = one.outputs, other.outputs
        assert (a.token_ids, a.text, a.stop_reason) == (b.token_ids, b.text, b.stop_reason)
        for places in zip(a.logprobs or (), b.logprobs or (), strict=True):
            expected, found = ({token: entry.logprob for token, entry in place.items()} for place in places)
            assert found == pytest.approx(expected, abs=SCORE_TOLERANCE)


def grid_of(more: int, **grid: list[Any]) -> list[Case]:
    """Every pair of values at least once, and `more`."""
    grid, choose = GRID | grid, random.Random(0)
    every = [*AllPairs([*grid.values()]), *([choose.choice(values) for values in grid.values()] for _ in range(more))]
    cases = [Case(**dict(zip(grid, values, strict=True))) for values in every]
    return [replace(case, early_stopping=False) if case.semantics == "vllm" else case for case in cases]


def prompted(cases: list[Case], model: Path | None = None) -> list[Case]:
    """The cases with prompts: anything for a random model, held-out code for the trained one."""
    anything = [prompt_of(case.prompt_length, seed) for seed, case in enumerate(cases)]
    prompts = map(tuple, anything if model else trained_prompts([case.prompt_length for case in cases]))
    return [replace(c, model=model or TRAINED_TARGET, prompt=p) for c, p in zip(cases, prompts, strict=True)]


def num_changed(cases: list[Case], **changes: Any) -> int:
    """How many would find something else after `changes`."""
    return sum(case.found() != replace(case, **changes).found() for case in cases)
