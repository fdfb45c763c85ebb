"""A search that streams returns in parts what it returns as a whole, in every mode and whatever disturbs it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind

from tests.support.disturb import Clumsy
from tests.support.engine import TRAINED_TARGET, Engine, Engines
from tests.support.modes import MODES, Mode
from tests.support.pairs import Pair
from tests.support.reference import SCORE_TOLERANCE
from tests.support.running import MOST_TIES, Job, count_ties, run, trained_prompts
from tests.support.sweep import sweep
from tests.support.traces import check_trace
from tests.support.trained_pair import own_sum
from vllm_trie import beam_params
from vllm_trie.messages import NO_HYPOTHESIS

pytestmark = pytest.mark.slow

PROMPTS = trained_prompts([9, 30, 41, 64, 77])


def run_streams(
    engine: Engine,
    jobs: list[Job],
    after_step: Callable[[], None] = lambda: None,
    kind: RequestOutputKind = RequestOutputKind.DELTA,
) -> list[list[Any]]:
    """All that comes of each job, in order."""
    core, parts = engine.llm.llm_engine, [list[Any]() for _ in jobs]
    for number, (prompt, params) in enumerate(jobs):
        params = params.clone()
        params.output_kind = kind
        core.add_request(str(number), {"prompt_token_ids": prompt}, params, priority=-number)
    while core.has_unfinished_requests():
        for output in core.step():
            parts[int(output.request_id)].append(output)
        after_step()
    return parts


def joined(parts: list[Any]) -> Any:
    """The parts of one answer as the whole that they make."""
    outputs = [part.outputs[0] for part in parts]
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(parts) - 1)
    last = outputs[-1]
    if last.stop_reason == NO_HYPOTHESIS:  # what was sent led nowhere
        assert not last.token_ids
        return SimpleNamespace(outputs=[last], prompt_token_ids=parts[-1].prompt_token_ids)
    logprobs = [place for output in outputs for place in output.logprobs or ()]
    whole = SimpleNamespace(
        token_ids=[token for output in outputs for token in output.token_ids],
        text="".join(output.text for output in outputs),
        logprobs=None if last.logprobs is None else logprobs,
        cumulative_logprob=last.cumulative_logprob,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
    return SimpleNamespace(outputs=[whole], prompt_token_ids=parts[-1].prompt_token_ids)


def of_one_answer(jobs: list[Job]) -> list[Job]:
    jobs = [(prompt, params.clone()) for prompt, params in jobs]
    for _, params in jobs:
        params.n = 1
    return jobs


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines(TRAINED_TARGET, disable_log_stats=False)


@pytest.mark.parametrize("mode", sweep(MODES, "async", "exact"))
def test_streams_are_what_is_found_without_also_when_preempted(
    mode: Mode, engines: Engines, random_pair: Callable[[str, float], Pair]
) -> None:
    engine, jobs = mode.start(engines, random_pair), of_one_answer(mode.jobs())
    expected = run(engine, jobs)
    parts = run_streams(engine, jobs)
    assert count_ties([joined(of_one) for of_one in parts], expected) <= MOST_TIES * len(jobs)
    assert sum(len(of_one) > 1 for of_one in parts) > len(jobs) / 3, "hardly anything is sent early"
    clumsy = Clumsy(engine)
    traced = of_one_answer(mode.jobs(trace=True))
    disturbed_parts = run_streams(engine, traced, clumsy.preempt_whenever_a_search_is_further)
    disturbed = list(map(joined, disturbed_parts))
    assert clumsy.num_preempted
    for parts_of_one, whole in zip(disturbed_parts[:-1], disturbed, strict=False):
        check_trace(SimpleNamespace(**{**vars(parts_of_one[-1]), "outputs": whole.outputs}))
    if not mode.draws_anew:
        assert count_ties(disturbed, expected) <= MOST_TIES * len(jobs)
        return
    for answer in disturbed:
        (output,) = answer.outputs
        own = own_sum(answer.prompt_token_ids, tuple(output.token_ids))
        assert output.cumulative_logprob in (None, pytest.approx(own, abs=SCORE_TOLERANCE * len(output.token_ids)))


def test_text_grows_where_it_is_returned_cumulated(engine: Engine) -> None:
    params = beam_params(3, max_tokens=40, logprobs=1)
    jobs = [(prompt, params) for prompt in PROMPTS]
    texts: list[list[str]] = [[] for _ in jobs]
    deltas = run_streams(engine, jobs)
    for parts, seen in zip(run_streams(engine, jobs, kind=RequestOutputKind.CUMULATIVE), texts, strict=True):
        seen += [part.outputs[0].text for part in parts]
    assert texts == [[*accumulate(part.outputs[0].text for part in parts)] for parts in deltas]
    assert max(map(len, texts)) > 3


def test_narrow_searches_send_most_of_their_answers_early(engine: Engine) -> None:
    parts = run_streams(engine, [(prompt, beam_params(2, max_tokens=60, ignore_eos=True)) for prompt in PROMPTS])
    early = sum(len(part.outputs[0].token_ids) for of_one in parts for part in of_one[:-1])
    assert early > 60 * len(PROMPTS) / 2
    assert min(len(of_one) for of_one in parts) > 3


def test_one_beam_streams_token_by_token(engine: Engine) -> None:
    (parts,) = run_streams(engine, [(PROMPTS[0], beam_params(1, max_tokens=20, ignore_eos=True))])
    assert [len(part.outputs[0].token_ids) for part in parts] == [1] * 20


def test_a_stop_string_is_held_back_until_it_is_known_to_be_none(engine: Engine) -> None:
    options = {"max_tokens": 40, "ignore_eos": True}
    free = joined(run_streams(engine, [(PROMPTS[1], beam_params(1, **options))])[0]).outputs[0]
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 6]
    params = [beam_params(1, stop=[stop], include_stop_str_in_output=shown, **options) for shown in (False, True)]
    for parts, end in zip(run_streams(engine, [(PROMPTS[1], one) for one in params]), ("", stop), strict=True):
        whole = joined(parts).outputs[0]
        assert whole.stop_reason == stop
        assert whole.text == free.text.partition(stop)[0] + end
        assert len(parts) > 2


def test_several_answers_and_arrays_come_in_one_part_each(engine: Engine) -> None:
    several, arrays = beam_params(4, n=3, max_tokens=20), beam_params(4, compact=True, max_tokens=20)
    of_several, of_arrays = run_streams(engine, [(PROMPTS[2], several), (PROMPTS[2], arrays)])
    (expected,) = run(engine, [(PROMPTS[2], several)])
    outputs = [output for part in of_several for output in part.outputs]
    assert sorted((o.index, o.text) for o in outputs) == [(o.index, o.text) for o in expected.outputs]
    assert len(outputs) == 3
    assert [len(part.kv_transfer_params["trie_beam"]["token_ids"]) for part in of_arrays] == [4]


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE], ids=["delta", "cumulative"])
def test_streams_tell_the_item_that_they_end_with(engine: Engine, kind: RequestOutputKind) -> None:
    items = [[370, 78, 503], [370, 78, 87, 906]]  # begin alike, so that much is sent early
    after = {"catalog_after": 200, "logit_bias": {200: 30.0}, "max_tokens": 12}
    jobs = [
        (prompt, beam_params(2, allowed_sequences=items, **{"max_tokens": 8} | options))
        for prompt in PROMPTS
        for options in ({}, {"catalog_stop": True}, {"catalog_items": 2}, after)
    ]
    expected = run(engine, jobs)
    parts = run_streams(engine, jobs, kind=kind)
    assert max(map(len, parts)) > 2
    item_ids = [of_one[-1].kv_transfer_params["trie_beam"]["item_ids"] for of_one in parts]
    assert item_ids == [output.kv_transfer_params["trie_beam"]["item_ids"] for output in expected]
    assert {id for ids in item_ids[::4] for id in ids} <= {0, 1}


@pytest.mark.parametrize("num_items", [1, 2])
def test_a_search_along_a_catalog_that_finds_nothing_tells_no_items(engine: Engine, num_items: int) -> None:
    along = {"allowed_sequences": [[370, 78], [371, 78]], "catalog_after": 200, "catalog_items": num_items}
    along |= {"catalog_stop": True, "allowed_token_ids": [64], "max_tokens": 7}
    compact, plain = beam_params(2, compact=True, **along), beam_params(2, n=1, **along)
    for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA):
        for parts in run_streams(engine, [(PROMPTS[0], compact), (PROMPTS[1], plain)], kind=kind):
            assert parts[-1].kv_transfer_params["trie_beam"]["item_ids"] == []
            assert parts[-1].outputs[0].stop_reason == NO_HYPOTHESIS


def test_a_stream_may_be_coarser(engine: Engine) -> None:
    params = beam_params(1, max_tokens=20, ignore_eos=True, stream_interval=7)
    (parts,) = run_streams(engine, [(PROMPTS[0], params)])
    assert [len(part.outputs[0].token_ids) for part in parts] == [1, 7, 7, 5]


def test_the_first_part_is_the_first_token_in_all_counts(engine: Engine) -> None:
    names = ("vllm:prompt_tokens", "vllm:generation_tokens", "vllm:time_to_first_token_seconds", "vllm:request_success")

    def counted() -> list[float]:
        found = dict.fromkeys(names, 0.0)
        for metric in engine.llm.get_metrics():
            if metric.name in found:
                found[metric.name] += vars(metric).get("value", vars(metric).get("count"))
        return [*found.values()]

    before = counted()
    parts = run_streams(engine, [(PROMPTS[1], beam_params(2, max_tokens=40))])[0]
    answer = joined(parts).outputs[0]
    moved = [b - a for a, b in zip(before, counted(), strict=True)]
    assert moved == [len(PROMPTS[1]), len(answer.token_ids), 1, 1]
    times = parts[-1].metrics
    assert 0 < times.queued_ts < times.scheduled_ts < times.first_token_ts < times.last_token_ts
    assert len(parts) > 2


def test_only_the_last_part_says_that_a_request_is_over(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """To vLLM's data parallel front ends, which count what is in flight."""
    said, update = [], engine.scheduler.update_from_output
    monkeypatch.setattr(engine.scheduler, "finished_req_ids_dict", defaultdict(set))

    def update_from_output(*args: Any) -> Any:
        outputs = update(*args)
        said.extend((len(of_client.outputs), of_client.finished_requests) for of_client in outputs.values())
        return outputs

    monkeypatch.setattr(engine.scheduler, "update_from_output", update_from_output)
    (parts,) = run_streams(engine, [(PROMPTS[0], beam_params(1, max_tokens=5, ignore_eos=True))])
    assert [(count, bool(finished)) for count, finished in said if count] == [(1, False)] * 4 + [(1, True)]
    assert len(parts) == 5


def test_a_stream_that_is_aborted_leaves_nothing(engine: Engine) -> None:
    core, params = engine.llm.llm_engine, beam_params(2, max_tokens=200, ignore_eos=True)
    params.output_kind = RequestOutputKind.DELTA
    core.add_request("0", {"prompt_token_ids": PROMPTS[0]}, params)
    while not core.step():
        pass
    core.abort_request(["0"])
    assert not core.has_unfinished_requests()
    assert not engine.scheduler.groups
    core.step()  # tells the worker


@pytest.mark.parametrize("when", ["at once", "in the end"])
def test_an_answer_that_changed_ends_with_an_error(engine: Engine, when: str) -> None:
    """As by a near-tie, when a search begins anew."""
    seen = []

    def change() -> None:
        for group in engine.scheduler.groups.values():
            if group.stream._sent and not seen:
                seen.append(group.stream._sent)
                group.stream._sent[0] += 1
                if when == "at once":
                    group.stream.restart()

    parts = run_streams(engine, [(PROMPTS[1], beam_params(1, max_tokens=20, ignore_eos=True))], change)[0]
    assert [part.outputs[0].finish_reason for part in parts[-2:]] == [None, "error"]
    assert "found another answer" in parts[-1].outputs[0].stop_reason
    assert len(parts) == (2 if when == "at once" else 20)


def test_a_search_that_ends_in_nothing_says_so_after_what_was_sent(engine: Engine) -> None:
    """Bans may leave beams no token at all, after tokens that all of them had in common."""
    token = 7
    params = beam_params(1, max_tokens=8, ignore_eos=True, allowed_token_ids=[token])
    params._bad_words_token_ids = [[token] * 3]
    (parts,) = run_streams(engine, [(PROMPTS[0], params)])
    assert [list(part.outputs[0].token_ids) for part in parts] == [[token], [token], []]
    assert parts[-1].outputs[0].stop_reason == NO_HYPOTHESIS
