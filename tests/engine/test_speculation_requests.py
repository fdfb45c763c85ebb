"""What a user asks of drawn and of speculating beams reaches the search, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.sampling_params import BeamSearchParams, SamplingParams

from tests.conftest import BLOCK_SIZE, TRAINED_TARGET, Engine, Engines
from tests.engine.test_parity import Case, trained_prompts
from tests.engine.test_preemption import Clumsy, preempt_all, run
from tests.loop import one_thread
from tests.reference import NEAR_TIE, SCORE_TOLERANCE, load
from vllm_trie import beam_params
from vllm_trie.engine.group import BeamGroup

TRAINED_DRAFT = TRAINED_TARGET.with_name("draft")
LAYERS, WIDTH, LENGTH = 3, 4, 32
DRAWN = {"speculation": "sample", "seed": 1}
WARPED = {"temperature": 0.7, "top_k": 40, "top_p": 0.95}

Answer = list[tuple[tuple[int, ...], float | None]]


@pytest.fixture
def engine(engines: Engines) -> Engine:
    speculative = {"method": "draft_model", "model": str(TRAINED_DRAFT), "num_speculative_tokens": LAYERS}
    return engines(TRAINED_TARGET, speculative_config=speculative)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return trained_prompts([Case(WIDTH, 1.0, False, True, LENGTH)] * 4)


@pytest.fixture
def says(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets the engine have been started with these options for requests that say nothing of them."""

    def say(**options: Any) -> None:
        for name, value in options.items():
            monkeypatch.setitem(engine.llm.llm_engine.vllm_config.additional_config["trie_beam"], name, value)

    return say


def search(engine: Engine, prompts: list[list[int]], width: int = WIDTH, **options: Any) -> list[Any]:
    """By `LLM.generate`, all `width` hypotheses of each prompt."""
    options = {"n": width, "max_tokens": LENGTH, "ignore_eos": True, **options}
    return engine.generate(prompts, beam_params(width, **options))


def answer(output: Any) -> Answer:
    return [(tuple(o.token_ids), o.cumulative_logprob) for o in output.outputs]


def tokens(outputs: list[Any]) -> list[list[tuple[int, ...]]]:
    return [[of_one for of_one, _ in answer(output)] for output in outputs]


def counts(output: Any) -> dict[str, Any]:
    return output.kv_transfer_params["trie_beam"]


def altered(params: SamplingParams, **fields: Any) -> SamplingParams:
    """A copy with fields that the helper does not let pass."""
    params = params.clone()
    for name, value in fields.items():
        setattr(params, name, value)
    return params


# Options reach the search.


def test_every_search_says_what_it_took(engine: Engine, prompts: list[list[int]]) -> None:
    for options in ({}, {"speculation": "exact"}, DRAWN, {"do_sample": True, "seed": 1}):
        for output in search(engine, prompts, **options):
            took = counts(output)
            assert took["steps"] == LENGTH
            assert took["steps"] / (1 + LAYERS) <= took["target_forwards"] < LENGTH
            assert took["prompts"] == 1
            assert took["steps_per_forward"] == (LENGTH - 1) / (took["target_forwards"] - 1) > 1
            assert 0 < took["accepted"] < took["drafted"]
            assert took["mean_width"] == took["beams"] / LENGTH == WIDTH
    for options in ({"speculation": "off"}, {"speculation": "off", "do_sample": True}):
        assert [output.kv_transfer_params for output in search(engine, prompts, **options)] == [None] * len(prompts)


@pytest.mark.parametrize("law", [{"speculation": "exact"}, DRAWN], ids=["exact", "sample"])
def test_draft_width_bounds_what_is_drafted(engine: Engine, prompts: list[list[int]], law: dict) -> None:
    drafted = {}
    for draft_width in (WIDTH, 2 * WIDTH, 6 * WIDTH, engine.llm.model_config.get_vocab_size()):
        (output,) = search(engine, prompts[:1], draft_width=draft_width, **law)
        drafted[draft_width] = counts(output)["drafted"] / counts(output)["target_forwards"]
        assert drafted[draft_width] <= LAYERS * draft_width
    assert list(drafted.values()) == sorted(drafted.values())
    (default,) = search(engine, prompts[:1], **law)
    assert counts(default)["drafted"] / counts(default)["target_forwards"] == drafted[2 * WIDTH]


def test_replacement_lets_the_same_beam_be_drawn_twice(engine: Engine, prompts: list[list[int]]) -> None:
    for law in (DRAWN, {"do_sample": True, "speculation": "off", "seed": 1}):
        (once,) = tokens(search(engine, prompts[:1], top_k=1, **law))
        assert (len(once[0]), once[1:]) == (LENGTH, [()] * (WIDTH - 1)), "there is only one to be drawn"
        assert tokens(search(engine, prompts[:1], top_k=1, replacement=True, **law)) == [[once[0]] * WIDTH]


def test_a_threshold_lets_layers_be_narrower_but_not_below_the_least_width(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers: list[tuple[int, int]] = []  # beams of each step, and those of its hypotheses that ended
    stock = BeamGroup.advance

    def advance(self: BeamGroup, step: Any) -> bool:
        layers.append((step.num_beams, len(step.finished.tokens)))
        return stock(self, step)

    monkeypatch.setattr(BeamGroup, "advance", advance)
    mean_widths = []
    for min_width in (None, 2, 3, WIDTH):
        layers.clear()
        outputs = search(engine, prompts, threshold=0.8, min_width=min_width, ignore_eos=False, **DRAWN)
        assert all(living + ended >= (min_width or 1) for living, ended in layers)
        assert sum(counts(output)["beams"] for output in outputs) == sum(living for living, _ in layers)
        steps = sum(counts(output)["steps"] for output in outputs)
        mean_widths.append(sum(living for living, _ in layers) / steps)
    assert mean_widths == sorted(mean_widths)
    assert mean_widths[0] < mean_widths[1] < WIDTH
    assert min(living + ended for living, ended in layers) == WIDTH, "min_width=beam_width leaves no choice"
    more = [counts(search(engine, prompts[:1], threshold=t, **DRAWN)[0])["mean_width"] for t in (0.99, 0.3)]
    assert more[0] < more[1]


def test_what_the_engine_says_holds_for_those_who_say_nothing(
    engine: Engine, prompts: list[list[int]], says: Callable[..., None]
) -> None:
    asked = search(engine, prompts[:1], threshold=0.8, min_width=2, draft_width=6, **DRAWN)
    off = search(engine, prompts[:1], speculation="off")
    says(do_sample=True, threshold=0.8, min_width=2, draft_width=6)
    params = altered(beam_params(WIDTH, n=WIDTH, max_tokens=LENGTH, ignore_eos=True), seed=1)
    (said,) = engine.generate(prompts[:1], params)
    assert (answer(said), said.kv_transfer_params) == (answer(asked[0]), asked[0].kv_transfer_params)
    for own in ({"do_sample": False}, {"speculation": "exact"}):
        (output,) = search(engine, prompts[:1], **own)
        assert tokens([output]) == tokens(off)
        assert counts(output)["drafted"] > 0
    says(speculation="off", do_sample=None)
    (output,) = search(engine, prompts[:1])
    assert (tokens([output]), output.kv_transfer_params) == (tokens(off), None)


# What is drawn.


@pytest.mark.parametrize(
    "law", [DRAWN, DRAWN | {"replacement": True} | WARPED, {"do_sample": True, "speculation": "off"} | WARPED]
)
def test_a_seed_decides_what_is_drawn(engine: Engine, prompts: list[list[int]], law: dict) -> None:
    prompts = prompts[:2]
    first, again, other = (tokens(search(engine, prompts, **law | {"seed": seed})) for seed in (5, 5, 6))
    assert first == again
    assert all(one != another for one, another in zip(first, other, strict=True))
    unseeded = [tokens(search(engine, prompts, **law | {"seed": None})) for _ in range(2)]
    assert all(one != another for one, another in zip(*unseeded, strict=True))
    same_prompt = tokens(search(engine, [prompts[0]] * 2, **law | {"seed": None}))
    assert same_prompt[0] != same_prompt[1]


@one_thread()
@torch.inference_mode()
def rows_of(prompt: list[int], generated: tuple[int, ...]) -> torch.Tensor:
    """[tokens, V] the target's log-probabilities at the place of each generated token."""
    logits = load(TRAINED_TARGET)(torch.tensor([[*prompt, *generated]])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def own_sum(prompt: list[int], generated: tuple[int, ...]) -> float:
    """The target's log-probability of a hypothesis."""
    return rows_of(prompt, generated).gather(1, torch.tensor(generated)[:, None]).sum().item()


@pytest.mark.parametrize(
    "law",
    [
        {"speculation": "exact"},
        DRAWN,
        DRAWN | WARPED,
        DRAWN | WARPED | {"replacement": True, "threshold": 0.7},
        DRAWN | {"memory_mode": True},
        {"speculation": "off", "do_sample": True, "seed": 1} | WARPED,
    ],
    ids=["exact", "sample", "warped", "narrower", "one beam", "plain"],
)
def test_cumulative_logprob_is_the_targets_own_sum(engine: Engine, prompts: list[list[int]], law: dict) -> None:
    """At temperature 1, before any filter, whatever other groups take the same step."""
    params = [beam_params(w, n=w, max_tokens=2 * LENGTH, **law) for w in (WIDTH, 1, 7, 5)]
    outputs = run(engine, list(zip(prompts, params, strict=True)), lambda: None)
    num_checked = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        for generated, total in answer(output):
            if total is not None:
                assert total == pytest.approx(own_sum(prompt, generated), abs=SCORE_TOLERANCE * len(generated))
                num_checked += 1
    assert num_checked >= 6


@pytest.mark.parametrize("law", [DRAWN, {"speculation": "off", "do_sample": True, "seed": 1}], ids=["sample", "plain"])
def test_logprobs_report_each_drawn_token_and_its_rank(engine: Engine, prompts: list[list[int]], law: dict) -> None:
    ranks = []
    for prompt, output in zip(prompts, search(engine, prompts, logprobs=2, **law), strict=True):
        for o in output.outputs:
            rows = rows_of(prompt, tuple(o.token_ids))
            for token, reported, row in zip(o.token_ids, o.logprobs, rows, strict=True):
                best = row.topk(2).indices.tolist()
                assert reported.keys() == {token, *best}
                for one, entry in reported.items():
                    assert entry.logprob == pytest.approx(row[one].item(), abs=SCORE_TOLERANCE)
                    assert entry.rank == (row > row[one]).sum().item() + 1
                ranks.append(reported[token].rank)
            own = sum(reported[token].logprob for token, reported in zip(o.token_ids, o.logprobs, strict=True))
            assert o.cumulative_logprob == pytest.approx(own, abs=SCORE_TOLERANCE)
    assert max(ranks) > 2 * WIDTH, "something must be drawn that no search would rank"
    (without,) = search(engine, prompts[:1], **law)
    assert tokens([without]) == tokens(search(engine, prompts[:1], logprobs=2, **law)), "to be told changes no draw"


# One beam goes on.

ONE_BEAM = DRAWN | {"memory_mode": True}


def test_memory_mode_holds_one_beam_between_forwards(engine: Engine, prompts: list[list[int]]) -> None:
    manager, peaks = engine.scheduler.kv_cache_manager, {}
    for keeps_one in (False, True):
        manager.peak_group_blocks, held = 0, []

        def watch(held: list[tuple[int, int]] = held) -> None:
            for group in engine.scheduler.groups.values():
                if group.length > 1:
                    held.append((manager.num_group_blocks, -(-(group.prompt_length + group.length) // BLOCK_SIZE)))

        params = beam_params(8, n=8, max_tokens=3 * BLOCK_SIZE, ignore_eos=True, **DRAWN, memory_mode=keeps_one)
        run(engine, [(prompts[0], params)], watch)
        peaks[keeps_one] = manager.peak_group_blocks
        assert len(held) > BLOCK_SIZE / 2
        if keeps_one:
            assert all(blocks <= of_one for blocks, of_one in held)
        else:
            assert max(blocks - of_one for blocks, of_one in held) >= 7
    assert peaks[True] <= peaks[False] - 7


def keeping_one(engine: Engine, prompts: list[list[int]], **options: Any) -> list[Any]:
    """Memory mode, rows checked after every step."""
    fields = {"n": WIDTH, "max_tokens": LENGTH, **ONE_BEAM, **options}
    return run(engine, [(prompt, beam_params(WIDTH, **fields)) for prompt in prompts], lambda: None)


def test_memory_mode_ends_hypotheses_as_any_search_does(engine: Engine, prompts: list[list[int]]) -> None:
    tokenizer, stop = engine.llm.get_tokenizer(), "):"
    newline = tokenizer.encode("\n")[-1]

    def ended(prompts: list[list[int]], **options: Any) -> list[Any]:
        outputs = keeping_one(engine, prompts, early_stopping=True, **options)
        found = [o for output in outputs for o in output.outputs if o.finish_reason == "stop" and o.token_ids]
        assert found
        return found

    by_string = ended(prompts, stop=[stop], ignore_eos=True)
    assert {o.stop_reason for o in by_string} == {stop}
    assert all(stop not in o.text for o in by_string), "the string itself is cut off"
    for token, options in [
        (newline, {"stop_token_ids": [newline], "ignore_eos": True}),
        (tokenizer.eos_token_id, {"max_tokens": 2 * LENGTH}),
    ]:
        by_token = ended(prompts[:2], **options)
        assert {o.stop_reason for o in by_token} == {None if token == tokenizer.eos_token_id else token}
        assert all(o.token_ids.index(token) == len(o.token_ids) - 1 for o in by_token)


def test_memory_mode_of_one_token_and_of_fewer_answers_than_beams(engine: Engine, prompts: list[list[int]]) -> None:
    for output in keeping_one(engine, prompts, max_tokens=1):
        assert [len(o.token_ids) for o in output.outputs] == [1] * WIDTH
        assert len({tuple(o.token_ids) for o in output.outputs}) == WIDTH
        assert counts(output)["target_forwards"] == 1
    four = keeping_one(engine, prompts)
    for n in (1, 2):
        assert tokens(keeping_one(engine, prompts, n=n)) == [answers[:n] for answers in tokens(four)]


def test_memory_mode_searches_wider_than_the_batch(engine: Engine, prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="beam_width=100 exceeds max_num_seqs=64; lower it, or raise --max-num-seqs"):
        search(engine, prompts[:1], 100, **DRAWN)
    (output,) = search(engine, prompts[:1], 100, **ONE_BEAM)
    assert len({tuple(o.token_ids) for o in output.outputs}) == 100


# Whatever happens meanwhile.


def preempted_at_every_step(engine: Engine, prompts: list[list[int]], law: dict[str, Any]) -> tuple[list[Any], ...]:
    """What is found undisturbed, and what if everything is preempted whenever a search is further."""

    def jobs() -> list[tuple[list[int], SamplingParams]]:
        return [
            (prompt, beam_params(WIDTH, n=WIDTH, max_tokens=LENGTH, ignore_eos=True, **law)) for prompt in prompts[:2]
        ]

    undisturbed, clumsy = run(engine, jobs(), lambda: None), Clumsy(engine)
    disturbed = run(engine, jobs(), clumsy.preempt_whenever_a_search_is_further)
    assert clumsy.num_preempted >= LENGTH / (1 + LAYERS) - 1
    return undisturbed, disturbed


@pytest.mark.parametrize("law", [ONE_BEAM, {"speculation": "off", "do_sample": True, "seed": 1}], ids=["one", "plain"])
def test_a_preempted_group_draws_what_it_would_have_drawn(engine: Engine, prompts: list[list[int]], law: dict) -> None:
    undisturbed, disturbed = preempted_at_every_step(engine, prompts, law)
    assert tokens(disturbed) == tokens(undisturbed)


@pytest.mark.parametrize("law", [DRAWN, DRAWN | {"threshold": 0.8, "min_width": 2}], ids=["sample", "narrower"])
def test_a_preempted_group_goes_on_with_the_beams_it_has_drawn(
    engine: Engine, prompts: list[list[int]], law: dict
) -> None:
    """Rows that compute their histories anew do not speculate, so that the seed is used otherwise."""
    _, disturbed = preempted_at_every_step(engine, prompts, law)
    for prompt, output in zip(prompts, disturbed, strict=False):
        assert counts(output)["steps"] == LENGTH
        for generated, total in answer(output):
            if total is not None:
                assert total == pytest.approx(own_sum(prompt, generated), abs=SCORE_TOLERANCE * len(generated))


def test_groups_of_every_kind_run_side_by_side(engine: Engine, prompts: list[list[int]]) -> None:
    asked: list[dict[str, Any]] = [
        {},
        {"speculation": "off"},
        {"semantics": "vllm"},
        {"sample_first": 5, "seed": 3},
        DRAWN | {"stop": ["\n\n"]},
        DRAWN | {"threshold": 0.9, "min_width": 2, "draft_width": 5},
        ONE_BEAM | WARPED,
        DRAWN | {"replacement": True, "presence_penalty": 0.5, "bad_words": ["self"]},
        {"speculation": "off", "do_sample": True, "seed": 4, "min_tokens": 9},
        {"logprobs": 2} | DRAWN,
    ]
    greedy = SamplingParams(temperature=0, max_tokens=LENGTH)
    jobs = [(prompts[i % 4], beam_params(3, n=3, max_tokens=LENGTH, **options)) for i, options in enumerate(asked)]
    (alone,) = run(engine, [(prompts[0], greedy.clone())], lambda: None)
    steps = 0

    def disturb() -> None:
        nonlocal steps
        steps += 1
        if steps in (4, 9):
            preempt_all(engine)

    outputs = run(engine, [*jobs, (prompts[0], greedy)], disturb)
    assert list(outputs[-1].outputs[0].token_ids) == list(alone.outputs[0].token_ids)
    for (_, params), output in zip(jobs, outputs, strict=False):
        assert (output.kv_transfer_params is None) == (params.extra_args.get("speculation") == "off")
        assert all(len(o.token_ids) <= LENGTH for o in output.outputs)
        assert output.outputs[0].token_ids


# Requests that are refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": "sometimes"}, "speculation='sometimes' is unknown"),
        ({"do_sample": 2}, "do_sample=2 is neither true nor false"),
        ({"draft_widht": 8}, "unknown option draft_widht=8; did you mean draft_width?"),
        ({"draft_width": 10**9}, "draft_width=1000000000 exceeds the vocabulary of 2048 tokens; lower it"),
        ({"threshold": 0.5}, "threshold=0.5 means nothing where beams are not drawn"),
        ({"speculation": "sample", "min_width": 2}, "min_width=2 needs a threshold, such as 0.7"),
        ({"replacement": True}, "replacement=True has nothing to draw; set do_sample=True"),
        ({"do_sample": 1, "speculation": "off", "memory_mode": 1}, "memory_mode=True has no drafts to act on"),
        ({"do_sample": 1, "sample_first": 2}, "sample_first=2 is not supported together with do_sample"),
        ({"do_sample": 1, "semantics": "vllm"}, 'semantics="vllm" does not draw beams'),
    ],
)
def test_a_wrong_option_is_refused_and_those_beside_it_do_not_stay(
    engine: Engine, prompts: list[list[int]], options: dict, message: str
) -> None:
    good = beam_params(WIDTH, max_tokens=LENGTH, **DRAWN)
    wrong = SamplingParams(max_tokens=LENGTH, extra_args={"beam_width": WIDTH, **options})
    with pytest.raises(ValueError, match="^" + message.replace("?", r"\?")):
        engine.generate(prompts[:3], [good, wrong, good])
    engine.check_nothing_is_left()


def test_wrong_fields_are_refused_and_the_engine_goes_on(engine: Engine, prompts: list[list[int]]) -> None:
    expected = tokens(search(engine, prompts[:1], **DRAWN))
    drawn = beam_params(WIDTH, max_tokens=LENGTH, **DRAWN)
    for fields, message in [
        ({"temperature": 0.0}, "temperature=0.0 leaves do_sample nothing to draw; raise it"),
        ({"logit_bias": {5: 1.0}}, "logit_bias={5: 1.0} is not supported with beam_width on an engine with spec"),
        ({"min_p": 0.1}, "min_p=0.1 is not supported with beam_width on an engine with speculative_config, as vLLM"),
        ({"prompt_logprobs": 1}, "prompt_logprobs=1 is not supported together with beam_width"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.generate(prompts[:1], altered(drawn, **fields))
        engine.check_nothing_is_left()
    with pytest.raises(ValueError, match=r"logit_bias=.* is not supported with beam_width"):
        search(engine, prompts[:1], speculation="off", logit_bias={5: 1.0})
    with pytest.raises(ValueError, match="seed=7 has nothing to decide in a beam search"):
        engine.generate(prompts[:1], altered(beam_params(WIDTH, max_tokens=4), seed=7))
    assert tokens(search(engine, prompts[:1], **DRAWN)) == expected


def test_an_abort_between_two_forests_leaves_nothing(engine: Engine, prompts: list[list[int]]) -> None:
    core = engine.llm.llm_engine
    expected = tokens(search(engine, prompts[:1], **DRAWN))
    for law in (DRAWN, ONE_BEAM, {"speculation": "exact"}):
        for number in range(2):
            params = beam_params(WIDTH, n=2, max_tokens=LENGTH, ignore_eos=True, **law)
            core.add_request(str(number), {"prompt_token_ids": prompts[number]}, params)
        for _ in range(4):
            core.step()
        core.abort_request(["0"])
        while core.has_unfinished_requests():
            core.step()
            engine.check_rows()
        engine.check_nothing_is_left()
    assert tokens(search(engine, prompts[:1], **DRAWN)) == expected


# Beside an engine that has no draft model.


def test_an_engine_without_drafts_finds_and_draws_the_same(
    engine: Engine, engines: Engines, prompts: list[list[int]]
) -> None:
    drawn = {"do_sample": True, "speculation": "off", "seed": 1} | WARPED
    inputs, params = [{"prompt_token_ids": prompt} for prompt in prompts], BeamSearchParams(WIDTH, max_tokens=LENGTH)
    with_drafts = engine.llm.beam_search(inputs, params)
    drawn_with_drafts = tokens(search(engine, prompts, **drawn))
    engine.check_nothing_is_left()

    plain = engines(TRAINED_TARGET)
    for ours, theirs in zip(with_drafts, plain.llm.beam_search(inputs, params), strict=True):
        for x, y in zip(ours.sequences, theirs.sequences, strict=True):
            assert (x.tokens, x.text) == (y.tokens, y.text)
            assert x.cum_logprob == pytest.approx(y.cum_logprob, abs=NEAR_TIE * LENGTH)
    assert tokens(search(plain, prompts, **drawn)) == drawn_with_drafts
    assert tokens(search(plain, prompts, **drawn | {"speculation": None})) == drawn_with_drafts
    for speculation in ("exact", "sample"):
        with pytest.raises(ValueError, match=f'speculation="{speculation}" needs a draft model; start the engine with'):
            search(plain, prompts, speculation=speculation)
