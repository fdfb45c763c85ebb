"""What a search asks is sent to the worker once; a step sends what is particular about it, however much that was."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest

from tests.support.disturb import preempt_all
from tests.support.engine import TRAINED_TARGET, Engines
from tests.support.running import answers, run, trained_prompts
from tests.support.trained_pair import trained_pair
from vllm_trie import beam_params
from vllm_trie.engine import scheduler as engine_scheduler
from vllm_trie.messages import GroupStep

pytestmark = pytest.mark.slow

(PROMPT,) = trained_prompts([40])
WIDTH, MAX_TOKENS, MOST_BYTES = 4, 12, 600
STOPS = [*range(900, 1000)]
ITEMS = [[token, *range(100, 100 + MAX_TOKENS - 1)] for token in range(300, 400)]
SEARCHES: dict[str, dict[str, Any]] = {
    "plain": {"ignore_eos": True},
    "stop tokens": {"ignore_eos": True, "stop_token_ids": STOPS},
    "along a catalog": {"allowed_sequences": ITEMS},
    "many constraints": {"ignore_eos": True, "no_repeat_ngram_size": 3, "phrase_boosts": [[[5, 6], 1.0]] * 9},
    "few beams first": {"ignore_eos": True, "beam_widths": [1, 2, 4], "min_tokens": 5},
}


class Sent:
    """The steps of groups that schedulers send, and whether their requests are new to the worker in them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = list[tuple[GroupStep, bool]]()
        attach = engine_scheduler.attach_group_messages

        def attached(output: Any, groups: dict[str, GroupStep], *args: Any) -> None:
            new = {request.req_id for request in output.scheduled_new_reqs}
            self.steps += [(step, group_id in new) for group_id, step in groups.items()]
            attach(output, groups, *args)

        monkeypatch.setattr(engine_scheduler, "attach_group_messages", attached)

    @property
    def searches(self) -> int:
        """How often what a search asks was sent: with its request, and never else."""
        assert all((step.search is not None) == is_new for step, is_new in self.steps)
        return sum(is_new for _, is_new in self.steps)

    def check_steady_steps(self) -> None:
        """Raise AssertionError unless they are small, and say nothing of what holds in all of them."""
        steady = [pickle.dumps(step) for step, is_new in self.steps if not is_new and step.rows is None]
        assert len(steady) >= 3
        for content in steady:
            assert not any(name in content for name in (b"SearchRules", b"Stop", b"Constraint", b"Filters"))
            assert len(content) <= MOST_BYTES


@pytest.mark.parametrize("name", SEARCHES)
def test_a_step_says_nothing_that_holds_in_all(engines: Engines, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines(TRAINED_TARGET)
    sent = Sent(monkeypatch)
    run(engine, [(PROMPT, beam_params(WIDTH, max_tokens=MAX_TOKENS, **SEARCHES[name]))])
    assert sent.searches == 1
    sent.check_steady_steps()


def test_nor_does_one_that_speculates(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained_pair(engines)
    sent = Sent(monkeypatch)
    params = beam_params(WIDTH, max_tokens=30, ignore_eos=True, stop_token_ids=STOPS, speculation="exact")
    run(engine, [(PROMPT, params)])
    assert any(step.budget for step, _ in sent.steps)
    assert sent.searches == 1
    sent.check_steady_steps()


def test_each_preemption_has_it_sent_again(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, counts = engines(TRAINED_TARGET), Counter[str]()
    params = beam_params(WIDTH, n=WIDTH, max_tokens=MAX_TOKENS, ignore_eos=True, stop_token_ids=STOPS)
    jobs = [(PROMPT, params), (PROMPT[:30], params)]
    expected, sent = answers(run(engine, jobs)), Sent(monkeypatch)

    def preempt_sometimes() -> None:
        counts["steps"] += 1
        if counts["steps"] % 4 == 0 and engine.scheduler.running:
            counts["preempted"] += len(engine.scheduler.running)
            preempt_all(engine)

    assert answers(run(engine, jobs, preempt_sometimes)) == expected
    assert 2 + 4 <= sent.searches <= 2 + counts["preempted"]  # what is preempted with its last step is over
