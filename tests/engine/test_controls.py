"""What acts on single hypotheses acts in the engine as in a plain loop: penalties, bans, stops, log-probabilities."""

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
from vllm import SamplingParams
from vllm.tokenizers import get_tokenizer

from tests.conftest import BLOCK_SIZE, TRAINED_TARGET, Engine, Engines
from tests.engine.test_parity import LENGTH_PENALTIES, MOST_TIES, trained_prompts
from tests.engine.test_scheduling import BYTES_PER_BLOCK, answers, prompt_of
from tests.loop import (
    Found,
    adjusted,
    allowed,
    competing_score,
    completed_string,
    loop_beams,
    masked_logprobs,
    one_thread,
)
from tests.reference import NEAR_TIE, SCORE_TOLERANCE, Answer, agree, load, transformers_beams
from vllm_trie import beam_params

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
MANY_STRINGS = tuple(" estia_(.rn")
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
        return partial(adjusted, bad_words=words.bad_words_token_ids or (), **CONTROLS[self.controls])

    @property
    def allow(self) -> Callable[..., torch.Tensor]:
        return partial(allowed, **{name: v for name, v in CONTROLS[self.controls].items() if name in FILTERS})

    def params(self) -> SamplingParams:
        options = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}
        for name in ("controls", "pruning", "prompt_length", "prompt", "model"):
            del options[name]
        return beam_params(n=self.beam_width, **options, **CONTROLS[self.controls], **PRUNINGS[self.pruning])

    @cache  # noqa: B019
    def found(self) -> list[Found]:
        """What the loop finds."""
        rules = {name: getattr(self, name) for name in RULES} | {"eos": self.eos, "decode": text_of}
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
    for o in real if case.logprobs is not None else []:
        check_logprobs(case, o)
    return same


@one_thread()
@torch.inference_mode()
def check_logprobs(case: Case, output: Any) -> None:
    """Each token, and the best in its place, have the log-probability and the rank of the adjusted distribution."""
    prompt, tokens, most = [*case.prompt], [*output.token_ids], case.logprobs or 0
    stops = {*case.stop_token_ids} | (set() if case.ignore_eos else {EOS})
    logits = load(case.model)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    for place, (token, reported) in enumerate(zip(tokens, output.logprobs, strict=True)):
        masked = stops if place < case.min_tokens else ()
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
    prompts = map(tuple, anything if model else trained_prompts(cases))
    return [replace(c, model=model or TRAINED_TARGET, prompt=p) for c, p in zip(cases, prompts, strict=True)]


def num_changed(cases: list[Case], **changes: Any) -> int:
    """How many would find something else after `changes`."""
    return sum(case.found() != replace(case, **changes).found() for case in cases)


@pytest.fixture
def model(random_model: Callable[[str], Path]) -> Path:
    return random_model("gqa")


@pytest.fixture
def controlled(model: Path) -> list[Case]:
    controls = ["none", *PENALTIES, "bias", "bans", "harsh bans"]
    stops = [(), (EOS,), (EOS, 83, 140, 248)]
    lengths = [1, BLOCK_SIZE - 4, BLOCK_SIZE + 9]
    cases = grid_of(0, controls=controls, stop_token_ids=stops, prompt_length=lengths)
    return prompted([*cases, *(Case(8, s, controls="all", stop_token_ids=(EOS,)) for s in GRID["semantics"])], model)


@one_thread()
def test_the_loop_without_controls_is_transformers(model: Path) -> None:
    cases = [Case(b, "hf", e, stop_token_ids=(EOS,)) for b in GRID["beam_width"] for e in GRID["early_stopping"]]
    for case in prompted(cases, model):
        b, early = case.beam_width, case.early_stopping
        agree([*case.found()], transformers_beams(model, [*case.prompt], b, b, case.max_tokens, early_stopping=early))


def test_controlled_beams_are_the_loops_and_disturb_nobody(
    engines: Engines, model: Path, controlled: list[Case]
) -> None:
    for name in {case.controls for case in controlled} - {"none"}:
        assert num_changed([case for case in controlled if case.controls == name], controls="none"), name
    assert num_changed(controlled, stop_token_ids=()) > len(controlled) // 4, "stop tokens must really occur"
    run(engines(model), controlled)


@pytest.mark.parametrize("semantics", GRID["semantics"])
def test_where_bans_leave_fewer_hypotheses_the_others_come_back_empty(
    engines: Engines, model: Path, semantics: str
) -> None:
    some = partial(Case, 5, semantics, stop_token_ids=(EOS,), logprobs=2)
    few = {some(controls="one token"): 1, some(controls="EOS"): 1, some(controls="EOS", min_tokens=2): 0}
    few |= {some(controls="one token or EOS", max_tokens=3): 4, some(controls="harsh bans", max_tokens=1): 4}
    cases = prompted([*few], model)
    assert [len(case.found()) for case in cases] == [*few.values()]
    run(engines(model), cases)


def test_without_histories_of_their_own_beams_are_penalised_wrongly(
    engines: Engines, model: Path, controlled: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = [[*case.prompt] for case in controlled], [case.params() for case in controlled]
    right = answers(engines(model).generate(prompts, params))
    monkeypatch.setattr("vllm_trie.worker.select.Selector.reorder_controls", lambda *_: None)
    wrong = answers(engines(model).generate(prompts, params))
    differing = {case.controls for case, a, b in zip(controlled, right, wrong, strict=True) if a != b}
    assert len(differing) > len(PENALTIES) // 2
    assert differing <= PENALTIES.keys()


def test_groups_that_wait_or_start_anew_keep_their_penalties(
    engines: Engines, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = partial(Case, max_tokens=64, prompt_length=40)
    first = some(6, controls="less frequency", prompt_length=2 * BLOCK_SIZE - 6)  # forks full blocks before it waits
    others = [some(4, prompt_length=30), some(6, "vllm", controls="penalties"), some(5, controls="all")]
    cases = prompted([first, *others], model)
    prompts = [prompt_of(440), *([*case.prompt] for case in cases)]
    params = [SamplingParams(temperature=0, max_tokens=2), *(case.params() for case in cases)]
    roomy = answers(engines(model).generate(prompts, params))
    limits = {"max_num_seqs": 24, "max_num_batched_tokens": 24, "kv_cache_memory_bytes": 29 * BYTES_PER_BLOCK}
    engine = engines(model, long_prefill_token_threshold=16, **limits)  # the long prompt takes all that rows leave
    scheduler, preempted = type(engine.scheduler), []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda *a, **k: (preempted.append(a), preempt(*a, **k)))
    engine.watched.restart()
    outputs = engine.generate(prompts, params)
    assert max(engine.watched.waiting) > 1, "no group had to wait"
    assert preempted, "no group had to start anew"
    assert [[t for t, _ in output] for output in answers(outputs)] == [[t for t, _ in output] for output in roomy]
    for case, output in zip(cases, outputs[1:], strict=True):
        check(case, output.outputs)


def test_bad_words_and_stop_strings_of_the_trained_model_are_the_loops(engines: Engines) -> None:
    texts = {"stop": [(), ("):\n",), ("self.", "f(x", "t(s"), ("\n", "e(", "return", ", ")]}
    texts |= {"include_stop_str_in_output": [False, True], "bad_words": [(), ("self",), ("self.__class__", "return")]}
    tokens = {"stop_token_ids": [(), (COMMA, DOT)], "ignore_eos": [False, True]}
    cases = grid_of(14, controls=["none", "penalties", "all"], **texts, **tokens)
    ignored_eos = Case(5, "vllm", length_penalty=2.0, controls="one token or EOS", max_tokens=3, prompt_length=2)
    cases = prompted([*cases, ignored_eos, Case(8, stop=("elf", "):\n"))])
    assert num_changed([case for case in cases if case.bad_words], bad_words=()) > 3
    stopped = [[f for f in case.found() if isinstance(f.stopped_by, str)] for case in cases]
    together = [len(found) - len({len(f.token_ids) for f in found}) for found in stopped]
    assert sum(map(bool, together)) > 3, "several beams must stop in one step"
    across = [f for f in itertools.chain(*stopped) if not any(f.stopped_by in text_of([t]) for t in f.token_ids)]
    assert len(across) > 2, "strings must lie across tokens"
    run(engines(TRAINED_TARGET), cases)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_more_candidates_than_beams_may_stop_at_once(engines: Engines, logprobs: int | None) -> None:
    grid = itertools.product([1, 2, 5], GRID["semantics"], [1.0, 5.0])
    cases = [Case(b, s, "never" if s == "hf" else False, lp, stop=MANY_STRINGS, max_tokens=8) for b, s, lp in grid]
    run(engines(TRAINED_TARGET), prompted([replace(case, logprobs=logprobs) for case in cases]))
