"""Searches in a batch with streaming sessions: those that wait for input keep their rows."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.support.engine import TRAINED_TARGET, Engine, Engines
from tests.support.pairs import looking_up
from tests.support.running import Job, answers, trained_prompts
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

PROMPTS = trained_prompts([40, 50, 30])


def feed(engine: Engine, session_id: str, tokens: list[int]) -> None:
    """Send a session its next input."""
    core = engine.llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=1, output_kind=RequestOutputKind.DELTA)
    (prompt,) = core.renderer.render_cmpl([{"prompt_token_ids": tokens}])
    tasks = core.get_supported_tasks()
    request = core.input_processor.process_inputs(session_id, prompt, params, supported_tasks=tasks, resumable=True)
    request.external_req_id = session_id  # of a session, all requests have one id within the engine, too
    core.output_processor.add_request(copy.deepcopy(request), None)  # it and the engine both add to the prompt
    core.engine_core.add_request(request)


def open_sessions(engine: Engine, *ids: str) -> None:
    """Sessions that have been answered once, and wait."""
    for seed, session_id in enumerate(ids):
        feed(engine, session_id, [1, 5, 6, 7 + seed])
    for _ in range(6):
        engine.llm.llm_engine.step()
    assert engine.scheduler.num_waiting_for_streaming_input == len(ids)
    assert not engine.scheduler.running


def step_until(engine: Engine, jobs: dict[str, Job], *ends: str, most: int = 200) -> dict[str, Any]:
    """What requests are answered until all of some are."""
    core, found = engine.llm.llm_engine, dict[str, Any]()
    for request_id, (prompt, params) in jobs.items():
        core.add_request(request_id, {"prompt_token_ids": prompt}, params)
    for _ in range(most):
        found.update({output.request_id: output for output in core.step() if output.finished})
        if {*ends} <= found.keys():
            break
    return found


def test_a_search_waits_for_rows_of_sessions_and_others_pass(engines: Engines) -> None:
    engine = engines(TRAINED_TARGET, max_num_seqs=4)
    core = engine.llm.llm_engine
    wide, narrow = beam_params(4, n=4, max_tokens=10), beam_params(2, n=2, max_tokens=10)
    expected = {"wide": engine.generate(PROMPTS[:1], wide)[0], "narrow": engine.generate(PROMPTS[1:2], narrow)[0]}
    open_sessions(engine, "first", "second")
    jobs = {"wide": (PROMPTS[0], wide), "narrow": (PROMPTS[1], narrow)}
    jobs["ordinary"] = PROMPTS[2], SamplingParams(temperature=0, max_tokens=5)
    found = step_until(engine, jobs, "narrow", "ordinary")
    assert found.keys() == {"narrow", "ordinary"}
    feed(engine, "first", [8, 9])  # it goes on while the search waits
    core.abort_request(["second"])
    assert "wide" not in step_until(engine, {}, "wide", most=20)
    core.abort_request(["first"])
    found |= step_until(engine, {}, "wide")
    assert answers([found["wide"], found["narrow"]]) == answers([expected["wide"], expected["narrow"]])


def test_a_session_that_goes_on_needs_no_further_row(engines: Engines) -> None:
    engine = engines(TRAINED_TARGET, max_num_seqs=4)
    params = beam_params(3, n=3, max_tokens=12, ignore_eos=True)
    expected = engine.generate(PROMPTS[:1], params)
    open_sessions(engine, "session")
    core = engine.llm.llm_engine
    core.add_request("search", {"prompt_token_ids": PROMPTS[0]}, params)
    for _ in range(4):
        core.step()
    assert len(engine.scheduler.running) == 1  # the search, on all rows that are left
    feed(engine, "session", [8, 9])
    parts, found = 0, []
    while not found:
        outputs = core.step()
        parts += sum(output.request_id == "session" for output in outputs)
        found = [output for output in outputs if output.request_id == "search" and output.finished]
    assert parts == 1
    assert answers(found) == answers(expected)
    core.abort_request(["session"])


def test_forests_leave_sessions_their_rows(engines: Engines) -> None:
    engine = engines(TRAINED_TARGET, max_num_seqs=8, **looking_up(3))
    params = beam_params(3, n=3, max_tokens=24, speculation="exact")
    (expected,) = engine.generate(PROMPTS[:1], params)
    sessions = [f"session {number}" for number in range(4)]
    open_sessions(engine, *sessions)
    found = step_until(engine, {"search": (PROMPTS[0], params)}, "search")
    assert answers([found["search"]]) == answers([expected])
    engine.llm.llm_engine.abort_request(sessions)


def test_load_balancers_hear_of_every_request_that_ends(engines: Engines) -> None:
    engine = engines(TRAINED_TARGET)
    core, scheduler = engine.llm.llm_engine, engine.scheduler
    scheduler.finished_req_ids_dict = defaultdict(set)  # as with data parallelism
    finished, update = set[str](), scheduler.update_from_output

    def listening(*args: Any) -> Any:
        outputs = update(*args)
        for of_client in outputs.values():
            finished.update(of_client.finished_requests or ())
        return outputs

    scheduler.update_from_output = listening
    try:
        core.add_request("gone", {"prompt_token_ids": PROMPTS[0]}, beam_params(4, n=4, max_tokens=50, ignore_eos=True))
        for _ in range(4):
            core.step()
        core.abort_request(["gone"])
        step_until(engine, {"other": (PROMPTS[1], beam_params(2, n=2, max_tokens=4))}, "other")
        assert sorted(request_id.rpartition("-")[0] for request_id in finished) == ["gone", "other"]
    finally:
        scheduler.finished_req_ids_dict = None
        del scheduler.update_from_output
