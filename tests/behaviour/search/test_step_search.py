"""Search by steps in an engine, against a plain loop that draws one candidate after the other with vLLM alone."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.support.engine import TRAINED_TARGET, Engine, Engines
from tests.support.running import trained_prompts
from tests.support.step_reference import Found, Sampled, Task, beam_search
from vllm_trie import StepCandidate, beam_params
from vllm_trie.engine.held_blocks import EngineHeldBlocks
from vllm_trie.messages import FORK, ForkTicketMessage
from vllm_trie.step_search.request import StepRequest

pytestmark = pytest.mark.slow

STEP_STOP = ["\n"]
PROMPTS = trained_prompts([5, 27, 64])
SEARCH = {"beam_width": 2, "candidates": 3, "max_steps": 4}
MAX_TOKENS = 48
OF_TASK = ("seed", "width", "candidates", "max_steps", "look", "lookahead")


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines(TRAINED_TARGET, max_num_seqs=16)


def by_text(text: str) -> float:
    """A score that says nothing, and is nobody else's."""
    return sum(ord(character) * (place % 7 - 3) for place, character in enumerate(text)) / 1000


def score(candidates: list[StepCandidate]) -> list[float]:
    return [by_text(candidate.text) for candidate in candidates]


def ahead_score(candidates: list[StepCandidate]) -> list[float]:
    return [by_text(candidate.text_ahead) for candidate in candidates]


def deep_score(candidates: list[StepCandidate]) -> list[float]:
    """Between 0 and 1, and worse from step to step: so that what did not go on is returned to."""
    return [by_text(candidate.text_ahead) % 1 / len(candidate.steps) for candidate in candidates]


def params(**options: Any) -> SamplingParams:
    given = {"unit": "step", "step_stop": STEP_STOP, "scorer": score, "max_tokens": MAX_TOKENS, "seed": 7, "n": 2}
    return beam_params(**SEARCH | given | options)


@pytest.fixture(scope="module")
def found_by_loop(_engines: Engines) -> list[list[Found]]:
    """What it finds for each of `PROMPTS`."""
    return [reference(_engines(TRAINED_TARGET, max_num_seqs=16), prompt) for prompt in PROMPTS]


def reference(engine: Engine, prompt: list[int], **options: Any) -> list[Found]:
    """What a plain loop finds, by vLLM's own requests, one at a time."""
    decode = partial(
        engine.llm.get_tokenizer().decode, skip_special_tokens=True
    )  # a delimiter's token may go beyond it: into the next line's indent
    own = {name: options.pop(name) for name in OF_TASK if name in options}

    def draw(tokens: tuple[int, ...], seed: int, most: int, stops: bool) -> Sampled:
        asked = SamplingParams(
            seed=seed, max_tokens=most, stop=STEP_STOP if stops else None, include_stop_str_in_output=stops, **options
        )
        (output,) = engine.generate([[*prompt, *tokens]], asked)
        (sampled,) = output.outputs
        reason = None if sampled.stop_reason in STEP_STOP else sampled.finish_reason
        before = [*prompt, *tokens]
        return Sampled(
            decode([*before, *sampled.token_ids])[len(decode(before)) :],
            tuple(sampled.token_ids),
            reason,
        )

    asked = {"seed": 7, "width": 2, "candidates": 3, "max_steps": 4} | own
    return beam_search(Task(draw, by_text, max_tokens=MAX_TOKENS, **asked))


def look(engine: Engine, prompt: list[int], count: int) -> Any:
    """What vLLM writes greedily behind tokens, at most `count` of them."""
    decode = partial(engine.llm.get_tokenizer().decode, skip_special_tokens=True)

    def ahead(tokens: tuple[int, ...], most: int) -> str:
        before = [*prompt, *tokens]
        (output,) = engine.generate([before], SamplingParams(temperature=0, max_tokens=min(count, most)))
        return decode([*before, *output.outputs[0].token_ids])[len(decode(before)) :]

    return ahead


def found(output: Any) -> list[Found]:
    scores = output.kv_transfer_params["trie_beam"]["scores"]
    outputs = zip(output.outputs, scores, strict=True)
    return [Found(o.text, tuple(o.token_ids), score, o.finish_reason) for o, score in outputs]


def test_it_finds_what_a_loop_of_single_requests_finds(engine: Engine, found_by_loop: list[list[Found]]) -> None:
    outputs = engine.generate(PROMPTS, params())
    assert [found(output) for output in outputs] == found_by_loop
    assert (
        max(len(scores) for output in outputs for scores in output.kv_transfer_params["trie_beam"]["step_scores"]) > 1
    )


def test_the_same_seed_finds_the_same_and_another_one_something_else(engine: Engine) -> None:
    once, again, other = (found(engine.generate(PROMPTS[:1], params(seed=seed))[0]) for seed in (1, 1, 2))
    assert once == again
    assert once != other


def test_every_search_of_a_batch_is_itself_among_ordinary_requests_and_beams(engine: Engine) -> None:
    greedy, beams = SamplingParams(temperature=0, max_tokens=9), beam_params(3, max_tokens=9)
    wider = params(beam_width=3, candidates=2, max_steps=None, early_stopping=True, n=3)
    asked = [params(), greedy, wider, beams, params(seed=3)]
    together = engine.generate(PROMPTS[:1] * 5, asked)
    alone = [engine.generate(PROMPTS[:1], one)[0] for one in asked]
    assert [[o.token_ids for o in output.outputs] for output in together] == [
        [o.token_ids for o in output.outputs] for output in alone
    ]
    assert [int(output.request_id) for output in together] == sorted(int(output.request_id) for output in together)


def test_options_of_sampling_act_on_candidates(engine: Engine) -> None:
    sampling = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}
    (output,) = engine.generate(PROMPTS[1:2], params(seed=5, **sampling))
    assert found(output) == reference(engine, PROMPTS[1], seed=5, **sampling)


def test_log_probabilities_are_those_of_all_steps(engine: Engine) -> None:
    (output,) = engine.generate(PROMPTS[:1], params(logprobs=2, max_steps=3))
    for hypothesis in output.outputs:
        assert len(hypothesis.logprobs) == len(hypothesis.token_ids)
        chosen = [place[token].logprob for place, token in zip(hypothesis.logprobs, hypothesis.token_ids, strict=True)]
        assert hypothesis.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-4)
    (plain,) = engine.generate(PROMPTS[:1], params(max_steps=3))
    assert [o.cumulative_logprob for o in plain.outputs] == pytest.approx(
        [o.cumulative_logprob for o in output.outputs], abs=1e-4
    )


def test_a_stop_string_ends_a_hypothesis_and_is_cut(engine: Engine) -> None:
    (output,) = engine.generate(PROMPTS[:1], params(stop=["("], max_steps=None, beam_width=4, n=4, seed=8))
    ended = [o for o in output.outputs if o.stop_reason == "("]
    assert ended, "no hypothesis came to the stop string"
    assert all("(" not in o.text and o.finish_reason == "stop" for o in ended)


@pytest.mark.parametrize("is_included", [False, True])
def test_a_stop_string_is_found_across_steps(engine: Engine, is_included: bool) -> None:
    options = {"beam_width": 1, "candidates": 1, "max_steps": None, "n": 1, "include_stop_str_in_output": is_included}
    (free,) = engine.generate(PROMPTS[:1], params(**options, logprobs=0))
    (whole,) = free.outputs
    first_line = whole.text.index("\n", 3)
    stop = whole.text[first_line - 2 : first_line + 7]
    (output,) = engine.generate(PROMPTS[:1], params(**options, logprobs=0, stop=["no such text", stop]))
    (cut,) = output.outputs
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.text == whole.text[: whole.text.index(stop) + is_included * len(stop)]
    count = len(cut.token_ids)
    assert cut.token_ids == whole.token_ids[:count]
    decode = partial(engine.llm.get_tokenizer().decode, skip_special_tokens=True)
    assert stop in decode(cut.token_ids)
    assert stop not in decode(cut.token_ids[:-1])
    logprobs = [of[token].logprob for token, of in zip(cut.token_ids, cut.logprobs, strict=True)]
    assert cut.cumulative_logprob == pytest.approx(sum(logprobs), abs=1e-4)


@pytest.mark.parametrize("is_included", [False, True])
def test_a_stop_string_ends_a_hypothesis_though_its_token_has_a_delimiter_before_it(
    engine: Engine, is_included: bool
) -> None:
    stop, seen = "\n    ", list[StepCandidate]()  # in one token, as a line's end and the next one's indent

    def watching(candidates: list[StepCandidate]) -> list[float]:
        seen.extend(candidates)
        return score(candidates)

    options = {"beam_width": 4, "n": 4, "max_steps": None, "include_stop_str_in_output": is_included, "logprobs": 0}
    (output,) = engine.generate(PROMPTS[:1], params(stop=[stop], scorer=watching, seed=8, **options))
    assert not any(stop in candidate.text for candidate in seen if not candidate.is_finished)
    ended = [o for o in output.outputs if o.stop_reason == stop]
    assert ended, "no hypothesis came to the stop string"
    decode = partial(engine.llm.get_tokenizer().decode, skip_special_tokens=True)
    for hypothesis in ended:
        assert hypothesis.finish_reason == "stop"
        whole = decode(hypothesis.token_ids)
        assert stop in whole
        assert hypothesis.text == whole[: whole.index(stop) + is_included * len(stop)]
        logprobs = [of[token].logprob for token, of in zip(hypothesis.token_ids, hypothesis.logprobs, strict=True)]
        assert hypothesis.cumulative_logprob == pytest.approx(sum(logprobs), abs=1e-4)


def test_a_scorer_sees_the_prompt_all_steps_and_what_it_said_before(engine: Engine) -> None:
    seen = list[StepCandidate]()

    def watch(candidates: list[StepCandidate]) -> list[float]:
        seen.extend(candidates)
        return score(candidates)

    engine.generate(PROMPTS[:1], params(scorer=watch))
    prompt = engine.llm.get_tokenizer().decode(PROMPTS[0])
    for candidate in seen:
        assert candidate.prompt == prompt
        before = ["".join(candidate.steps[:n]) for n in range(1, len(candidate.steps))]
        assert candidate.scores == tuple(map(by_text, before))
        assert all("\n" in step for step in candidate.steps[:-1])
    assert any(candidate.is_finished for candidate in seen)
    assert len({(candidate.text, candidate.is_finished) for candidate in seen}) == len(seen), "a text was scored twice"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda candidates: [0.0], "the scorer returned 1 numbers for"),
        (lambda candidates: [float("nan")] * len(candidates), "the scorer returned nan for candidate 0 of"),
        (lambda candidates: [0.0, -math.inf] * (len(candidates) // 2), "the scorer returned -inf for candidate 1 of"),
        (lambda candidates: [10**400] * len(candidates), "the scorer returned what is not a number: int too large"),
        (lambda candidates: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_scorer_that_fails_ends_its_search_and_no_other(engine: Engine, answer: Any, why: str) -> None:
    failed, well, greedy = engine.generate(
        PROMPTS, [params(scorer=answer), params(), SamplingParams(temperature=0, max_tokens=5)]
    )
    assert [(o.finish_reason, o.text) for o in failed.outputs] == [("error", "")] * 2
    assert failed.outputs[0].stop_reason.startswith(why)
    assert len(well.outputs) == 2
    assert len(greedy.outputs[0].token_ids) == 5


def test_a_scorer_may_ask_the_engine_that_it_scores_for(engine: Engine, found_by_loop: list[list[Found]]) -> None:
    """It holds the engine, which cannot be copied. Nothing else may be under way: `generate` returns all answers."""

    class Asking:
        llm, num_answers = engine.llm, 0

        def __init__(self) -> None:
            self.engine = engine

        def __call__(self, candidates: list[StepCandidate]) -> list[float]:
            texts = [candidate.text for candidate in candidates]
            self.num_answers += len(self.llm.generate(texts, SamplingParams(max_tokens=2), use_tqdm=False))
            return score(candidates)

    asking = Asking()
    (output,) = engine.generate(PROMPTS[:1], params(scorer=asking))
    assert found(output) == found_by_loop[0]
    assert asking.num_answers > SEARCH["beam_width"] * SEARCH["candidates"] / 2


def test_a_scorer_that_fails_on_one_search_leaves_others_that_it_scores(engine: Engine) -> None:
    bad = engine.llm.get_tokenizer().decode(PROMPTS[0])

    def picky(candidates: list[StepCandidate]) -> list[float]:
        if any(candidate.prompt == bad for candidate in candidates):
            raise RuntimeError("not this one")
        return score(candidates)

    first, second = engine.generate(PROMPTS[:2], params(scorer=picky))
    assert first.outputs[0].stop_reason == "RuntimeError: not this one"
    assert found(second) == found(engine.generate(PROMPTS[1:2], params())[0])


def test_a_search_that_is_aborted_leaves_nothing(engine: Engine) -> None:
    core = engine.llm.llm_engine
    search_id = core.add_request("9001", {"type": "token", "prompt_token_ids": PROMPTS[0]}, params())
    core.add_request("9002", {"type": "token", "prompt_token_ids": PROMPTS[1]}, params())
    for _ in range(3):
        core.step()
    assert core.get_num_unfinished_requests() == 4
    core.abort_request([search_id], internal=True)
    core.abort_request(["9002"])
    engine.check_nothing_is_left()
    assert core.get_num_unfinished_requests() == 0


def test_an_interrupt_ends_searches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(candidates: list[StepCandidate]) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS[:2], params(scorer=interrupt))
    engine.check_nothing_is_left()


def test_an_interrupted_metric_ends_searches_whose_candidates_came_in_the_same_step(engine: Engine) -> None:
    (first,) = engine.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=1))
    delimiter = first.outputs[0].text
    core, num_running = engine.llm.llm_engine, list[int]()

    def metric(pairs: list[Any]) -> list[float]:
        num_running.append(len(core.output_processor.request_states))
        raise KeyboardInterrupt

    one_step = params(step_stop=[delimiter], beam_width=1, candidates=1, n=1, top_k=1)
    reranked = beam_params(2, rerank="mbr", metric=metric, max_tokens=1)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS[:1] * 2, [one_step, reranked])
    assert num_running == [0], "the candidate was still being sampled"
    assert core.get_num_unfinished_requests() == 0
    engine.check_nothing_is_left()
    (later,) = engine.generate(PROMPTS[:1], params(max_steps=1))
    assert {output.finish_reason for output in later.outputs} <= {"stop", "length"}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"scorer": "prm"}, "scorer='prm' is not a scorer of this engine, which has: none; start it with"),
        ({"scorer": 3}, "scorer=3 is not a scorer; pass a callable"),
        ({"n": 3}, "n=3 exceeds beam_width=2"),
        ({"beam_width": 17}, "beam_width=17 exceeds max_num_seqs=16; lower it, or raise"),
        ({"candidates": 129}, "candidates=129 for each of beam_width=2 exceed 16 times max_num_seqs=16 in all"),
        (
            {"candidates": 128, "max_steps": 257, "order": "best"},
            'max_steps=257 with 256 candidates each and order="best" might keep more than 65,536 open; lower one',
        ),
        ({"presence_penalty": 1.0}, 'presence_penalty=1.0 is not supported together with unit="step"'),
        ({"temperature": 0.0, "n": 1}, 'temperature=0.0 is not supported together with unit="step", .*; raise it'),
        ({"min_tokens": 3}, 'min_tokens=3 is not supported together with unit="step"'),
    ],
)
def test_what_a_search_by_steps_cannot_do_is_refused(engine: Engine, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        engine.generate(PROMPTS[:1], params(**options))


def test_a_prompt_without_room_is_refused_as_vllm_refuses_it(engine: Engine) -> None:
    with pytest.raises(VLLMValidationError, match="maximum context length is 512 tokens"):
        engine.generate([PROMPTS[0] * 200], params())
    engine.check_nothing_is_left()


def test_a_search_ends_where_the_context_does(engine: Engine) -> None:
    prompt = (PROMPTS[2] * 20)[: 512 - 20]
    (output,) = engine.generate([prompt], params(max_tokens=None, ignore_eos=True, max_steps=None))
    assert {(o.finish_reason, len(o.token_ids)) for o in output.outputs} == {("length", 20)}


# What goes on.


def test_candidates_go_on_with_the_blocks_of_what_they_continue(
    engine: Engine, found_by_loop: list[list[Found]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the newest token of each is computed already, wherever in a block it ends."""
    cached = list[tuple[int, int]]()
    stock = StepRequest.take

    def take(self: StepRequest, outputs: list[Any]) -> list[StepCandidate]:
        cached.extend((self.search.num_rounds, len(o.prompt_token_ids) - o.num_cached_tokens) for o in outputs)
        return stock(self, outputs)

    monkeypatch.setattr(StepRequest, "take", take)
    forks = watch_forks(monkeypatch)
    outputs = engine.generate(PROMPTS, params())
    later = [num_computed for number, num_computed in cached if number > 0]
    assert later
    assert set(later) == {1}
    assert len(forks) - forks.count(None) == len(later)
    monkeypatch.undo()
    assert [found(output) for output in outputs] == found_by_loop


def test_a_scorer_sees_what_would_come_next_and_hypotheses_keep_their_own_steps(engine: Engine) -> None:
    (output,) = engine.generate(PROMPTS[:1], params(scorer=ahead_score, lookahead=6, seed=12))
    assert found(output) == reference(engine, PROMPTS[0], look=look(engine, PROMPTS[0], 6), lookahead=6, seed=12)
    assert found(output) != found(engine.generate(PROMPTS[:1], params(seed=12))[0])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"order": "best", "allot": "rebase"}, marks=pytest.mark.nightly),
        {"order": "mcts", "lookahead": 3},
    ],
)
def test_what_is_returned_to_is_the_same_held_or_computed_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    forks = watch_forks(monkeypatch)
    answers, num_held = list[Any](), list[int]()
    for pool in (None, 0):
        asked = params(scorer=deep_score, beam_width=3, n=3, max_steps=6, pool=pool, **options)
        answers.append([found(output) for output in engine.generate(PROMPTS, asked)])
        num_held.append(len(forks) - forks.count(None))
        forks.clear()
    held, computed_again = num_held
    assert answers[0] == answers[1]
    assert held > computed_again, "it returned to nothing that was not among the last round's best"


def test_a_scorer_that_fails_later_gives_held_blocks_back(engine: Engine) -> None:
    def fails_on_the_second_step(candidates: list[StepCandidate]) -> list[float]:
        return [0.0] * len(candidates) if len(candidates[0].steps) == 1 else []

    outputs = engine.generate(PROMPTS, params(scorer=fails_on_the_second_step))
    assert {o.finish_reason for output in outputs for o in output.outputs} == {"error"}
    engine.check_nothing_is_left()


def watch_forks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What requests that go on from held blocks find there from now on; None for nothing."""
    forks, stock = list[Any](), EngineHeldBlocks.blocks_for
    monkeypatch.setattr(EngineHeldBlocks, "blocks_for", lambda *args: forks.append(stock(*args)) or forks[-1])
    return forks


def until_blocks_are_held(engine: Engine, request_id: str) -> tuple[Any, EngineHeldBlocks]:
    """A search between two rounds: the engine that runs it, and what it holds."""
    core, held = engine.llm.llm_engine, engine.scheduler.kv_cache_manager.held
    core.add_request(request_id, {"type": "token", "prompt_token_ids": PROMPTS[0]}, params(max_steps=None))
    while not held:
        core.step()
    return core, held


def test_a_search_that_is_aborted_while_blocks_are_held_leaves_nothing(engine: Engine) -> None:
    core, held = until_blocks_are_held(engine, "9003")
    core.abort_request(["9003"])
    assert not held
    engine.check_nothing_is_left()


def test_after_new_weights_nothing_held_is_gone_on_with(engine: Engine) -> None:
    core, held = until_blocks_are_held(engine, "9006")
    assert core.reset_prefix_cache(reset_running_requests=True)
    assert not held
    core.abort_request(["9006"])
    engine.check_nothing_is_left()


def test_a_ticket_for_other_tokens_gets_no_blocks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if two searches had the same key."""
    core, held = until_blocks_are_held(engine, "9004")
    forks, (key, *_) = watch_forks(monkeypatch), held._held
    asked = SamplingParams(temperature=0, max_tokens=5)
    forged = SamplingParams(temperature=0, max_tokens=5, extra_args={FORK: ForkTicketMessage(parent=key)})
    core.add_request("9005", {"type": "token", "prompt_token_ids": PROMPTS[1]}, forged)
    answers = []
    while not answers:
        answers = [output for output in core.step() if output.request_id == "9005"]
    core.abort_request(["9004"])
    assert set(forks) == {None}
    assert answers[0].outputs[0].token_ids == engine.generate(PROMPTS[1:2], asked)[0].outputs[0].token_ids


@pytest.mark.nightly
def test_short_of_memory_or_without_a_prefix_cache_it_finds_the_same(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back, stock = list[int](), EngineHeldBlocks.release_all
    monkeypatch.setattr(EngineHeldBlocks, "release_all", lambda held: given_back.append(stock(held)) or given_back[-1])
    wide = params(beam_width=4, candidates=4, n=4, max_tokens=96, max_steps=6, ignore_eos=True)
    prompts = [prompt * 3 for prompt in PROMPTS]
    ample = [found(output) for output in engines(TRAINED_TARGET, max_num_seqs=16).generate(prompts, wide)]
    tight = engines(TRAINED_TARGET, max_num_seqs=16, num_gpu_blocks_override=32)
    assert [found(output) for output in tight.generate(prompts, wide)] == ample
    assert sum(given_back), "it was never short of memory"
    tight.check_nothing_is_left()
    without = engines(TRAINED_TARGET, max_num_seqs=16, enable_prefix_caching=False)
    forks = watch_forks(monkeypatch)
    assert [found(output) for output in without.generate(prompts, wide)] == ample
    assert not any(forks)
