"""Whatever takes rows and KV blocks away from searches, and whenever, they go on where they were, in every mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.disturb import AbortWithin, Clumsy, pending
from tests.support.engine import Engine, Engines
from tests.support.grammars import structured
from tests.support.options import DRAWN, OPTIONS, WITHOUT_TEXT
from tests.support.pairs import NOISE, TRAINED, Pair, drafting
from tests.support.reference import SCORE_TOLERANCE
from tests.support.running import MOST_TIES, Job, count_ties, prompt_of, run, trained_prompts
from tests.support.trained_pair import own_sum
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

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
DRAWN_PLAINLY = [options | {"speculation": "off"} for options in DRAWN]


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
    def overlaps(self) -> bool:
        """Steps of a search are scheduled while others are on their way."""
        speculates = any(options.get("speculation", "off") != "off" for options in self.asked)
        return self.options.get("async_scheduling", True) and not speculates

    def start(self, engines: Engines, random_pair: Callable[[str, float], Pair]) -> Engine:
        target, draft = TRAINED if self.is_trained else random_pair(self.kind, NOISE)
        drafts = drafting(draft, self.num_layers) if self.num_layers else {}
        return engines(target, **{**LIMITS, **self.options}, **drafts)

    def jobs(self) -> list[Job]:
        """The searches, and an ordinary request."""
        lengths = [options.get("prompt", PROMPT + number % 5) for number, options in enumerate(self.asked)]
        prompts = trained_prompts(lengths) if self.is_trained else [prompt_of(n, n) for n in lengths]
        jobs = []
        for prompt, options in zip(prompts, self.asked, strict=True):
            options = {"beam_width": 3, "max_tokens": MAX_TOKENS} | options
            options.pop("prompt", None)
            options.setdefault("n", options["beam_width"])
            jobs.append((prompt, beam_params(**options)))
        ordinary = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        return [*jobs, (prompts[0], ordinary)]


def each(asked: Sequence[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    return [options | more for options in asked]


EXACT = [*each(LONG, speculation="exact", draft_width=16), *each(FEW, speculation="exact")]
SAMPLED = each([{}, {"beam_width": 1}, {"replacement": True}], speculation="sample", seed=1, max_tokens=24)
SAMPLED += [SAMPLED[0] | {"threshold": 0.8, "min_width": 2}]
GRAMMATICAL: list[dict[str, Any]] = [
    {"structured_outputs": structured("schema"), "max_tokens": 24},
    {"structured_outputs": structured("regex"), "beam_width": 5, "logprobs": 2},
    {"structured_outputs": structured("object"), "semantics": "vllm", "frequency_penalty": 0.4},
    {"structured_outputs": structured("grammar"), "do_sample": True, "seed": 3, "temperature": 0.7},
    {"structured_outputs": structured("choice"), "sample_first": 2, "seed": 5},
    {},  # beside them
]
ROOMY = {"max_num_batched_tokens": 512}  # what is drawn depends on what is left over to speculate with
PLAIN = [*LONG, *WITHOUT_TEXT, *DRAWN]
MODES = {
    "sync": Mode("gqa", {"async_scheduling": False, "enable_prefix_caching": False}, PLAIN),
    "async": Mode("gqa", {}, PLAIN),
    "windows": Mode("gemma2", {"enable_prefix_caching": False}, [*LONG, *FEW, *DRAWN]),
    "strings": Mode("trained", {}, OPTIONS[:6]),
    "exact": Mode("gqa", {"enable_prefix_caching": False}, EXACT, LAYERS),
    "exact with windows": Mode("gemma2", {}, EXACT, LAYERS),
    "exact with strings": Mode("trained", ROOMY, each(OPTIONS[:6], speculation="exact"), LAYERS),
    "drawn": Mode("trained", ROOMY, each(DRAWN_PLAINLY, max_tokens=24), LAYERS),
    "sample": Mode("trained", ROOMY, SAMPLED, LAYERS, draws_anew=True),
    "grammars": Mode("trained", {}, GRAMMATICAL),
    "memory": Mode("trained", ROOMY, each(SAMPLED[:2], memory_mode=True), LAYERS),
}


@pytest.fixture(scope="module", params=MODES.values(), ids=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    return request.param


@pytest.fixture(scope="module")
def undisturbed(mode: Mode, _engines: Engines, random_pair: Callable[[str, float], Pair]) -> list[Any]:
    """What is found in the mode; under "async", what steps find of which each waits for the one before."""
    reference = MODES["sync"] if mode.asked is PLAIN else mode
    return run(reference.start(_engines, random_pair), reference.jobs())


@pytest.fixture
def engine(mode: Mode, undisturbed: list[Any], engines: Engines, random_pair: Callable[[str, float], Pair]) -> Engine:
    engine = mode.start(engines, random_pair)
    engine.watched.restart()
    return engine


def check(mode: Mode, found: list[Any], expected: list[Any]) -> None:
    """Raise AssertionError unless all is found that was, or, where it is drawn anew, is what the target says of it."""
    if not mode.draws_anew:
        assert count_ties(found, expected) <= MOST_TIES * sum(len(output.outputs) for output in expected)
        return
    for output, other in zip(found, expected, strict=True):
        assert len(output.outputs) == len(other.outputs)
        for hypothesis in output.outputs:
            if hypothesis.cumulative_logprob is not None and len(output.outputs) > 1:
                tokens = tuple(hypothesis.token_ids)
                sums = own_sum(output.prompt_token_ids, tokens)
                assert hypothesis.cumulative_logprob == pytest.approx(sums, abs=SCORE_TOLERANCE * len(tokens))


def test_searches_that_overlap_or_whose_prompts_are_cached_find_the_same(
    mode: Mode, undisturbed: list[Any], engine: Engine
) -> None:
    check(mode, run(engine, mode.jobs()), undisturbed)
    assert engine.watched.num_compared > 0
    assert engine.watched.most_pending == 1 + mode.overlaps


def test_groups_preempted_whenever_they_are_further_go_on_where_they_were(
    mode: Mode, undisturbed: list[Any], engine: Engine
) -> None:
    clumsy, jobs = Clumsy(engine), mode.jobs()
    check(mode, run(engine, jobs, clumsy.preempt_whenever_a_search_is_further), undisturbed)
    longest = max(params.max_tokens for _, params in jobs)
    assert clumsy.num_preempted >= (longest - 1) / (1 + mode.num_layers)
    assert clumsy.num_steps < 16 * longest, "preempted groups hardly get on"
    assert clumsy.most_pending or not mode.overlaps, "nothing was on its way"


def test_resets_of_the_prefix_cache_change_no_answer(mode: Mode, undisturbed: list[Any], engine: Engine) -> None:
    num_steps, on_their_way = 0, []

    def reset() -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps % 4 == 0 and engine.scheduler.groups:
            on_their_way.append(pending(engine))
            assert engine.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)

    check(mode, run(engine, mode.jobs(), reset), undisturbed)
    assert len(on_their_way) > 1
    assert any(on_their_way) or not mode.overlaps


def test_aborts_between_and_within_steps_leave_nothing_and_disturb_nobody(
    mode: Mode, undisturbed: list[Any], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, core = mode.jobs(), engine.llm.llm_engine
    within, aborted = AbortWithin(engine, monkeypatch, "1", 3), {0: 2, 1: 3}  # in which step

    def abort() -> None:
        if within.num_steps == aborted[0]:
            core.abort_request(["0"])

    found = run(engine, jobs, abort)
    assert [at for at, answer in enumerate(found) if answer is None] == [*aborted]
    check(mode, found[len(aborted) :], undisturbed[len(aborted) :])
    core.step()  # tells the worker
    assert not engine.runner.groups
    assert not engine.runner.req_states.req_id_to_index
