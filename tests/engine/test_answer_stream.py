"""What a search sends of its answer before it is over: as much as there is by the definition, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.request import Request

from tests.support.steps import steps_of
from vllm_trie.engine.answer_prefix import AnswerChangedError, EngineAnswerPart
from vllm_trie.engine.catalogs import NoGroupCatalog
from vllm_trie.engine.group import BeamGroup
from vllm_trie.engine.new_group import new_group
from vllm_trie.messages import GroupTicketMessage
from vllm_trie.options import BeamParams
from vllm_trie.search.rules import SearchInputs
from vllm_trie.search.step_result import SearchStepResult

VOCAB, EOS = 6, 1
NUM_SEARCHES = int(os.environ.get("STREAM_SEARCHES", 100))
PENALTIES = [-1.5, 0.0, 0.5, 1.0, 2.0]
BY_SEMANTICS: dict[str, Sequence[dict[str, Any]]] = {
    "hf": [
        *({"early_stopping": early} for early in (False, True, "never")),
        {"beam_widths": [2, 4, 1, 3]},
        {"prune_absolute": 1.0},
        {"max_candidates_per_parent": 1},
        {"sample_first": 3},
        {"do_sample": True, "replacement": False},
        {"do_sample": True, "replacement": True},
    ],
    "vllm": [{}],
    "tridecode": [{}, {"prune_relative": 0.2}],
}


def searches() -> st.SearchStrategy[tuple[dict[str, Any], dict[str, Any], int, float]]:
    """Beam options, fields of the request, a seed of the model and how sure it is."""
    semantics = st.sampled_from([(name, more) for name, kinds in BY_SEMANTICS.items() for more in kinds])
    common = st.fixed_dictionaries({"beam_width": st.integers(1, 5), "length_penalty": st.sampled_from(PENALTIES)})
    fields = st.fixed_dictionaries(
        {"max_tokens": st.integers(1, 14), "min_tokens": st.integers(0, 4), "logprobs": st.sampled_from([None, 1])}
    )
    options = st.builds(lambda of, of_all: {**of_all, "semantics": of[0], **of[1]}, semantics, common)
    return st.tuples(options, fields, st.integers(0, 1 << 20), st.sampled_from([0.5, 2.0, 4.0]))


def group_of(options: dict[str, Any], fields: dict[str, Any], streams: bool) -> BeamGroup:
    if "beam_widths" in options:
        options = {**options, "beam_width": max(options["beam_widths"])}
    fields = {**fields, "min_tokens": min(fields["min_tokens"], fields["max_tokens"]), "seed": 3}
    kind = RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY
    params = SamplingParams(stop_token_ids=[EOS], output_kind=kind, **fields)
    request = Request("g", [5, 6, 7], params, None)
    beam = BeamParams(**options)
    return new_group(request, beam, GroupTicketMessage(1, EOS), 512, False, NoGroupCatalog(beam))


def next_step(group: BeamGroup, seed: int, sureness: float) -> SearchStepResult:
    """By a model that is a table of random logits, one for each history."""
    trie, rules, draw = group.hypotheses, group.plan.search.in_phase(group.next_phase()), group.next_sampling_key()
    histories = trie.histories().tolist()
    rows = [np.random.default_rng([seed, len(history), *history]).normal(0, sureness, VOCAB) for history in histories]
    scores = torch.tensor(trie.row_scores(), dtype=torch.float32)
    logits = torch.tensor(np.stack(rows), dtype=torch.float32)[None]
    (step,) = steps_of(rules, logits, scores[None], inputs=SearchInputs([draw] if draw else []))
    return step


def in_common(histories: Sequence[Sequence[int]]) -> list[int]:
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*histories, strict=False))
    return [column[0] for column in columns]


def known(group: BeamGroup) -> list[int]:
    """What the answer begins with by the definition, from whole histories."""
    scores = group.hypotheses.row_scores()
    live = [group.history(row) for row, score in enumerate(scores) if score > -np.inf]
    best = group.hypotheses.tokens(group.pool.best(1).leaves)
    if best and group.pool.is_decided(max(scores), group.length):
        return best[0][:-1]
    return in_common([*live, *best])


def joined(parts: Sequence[EngineAnswerPart]) -> tuple[list[int], float, list[Any]]:
    reports = [report for part in parts if part.reports for report in zip(*part.reports, strict=True)]
    return [token for part in parts for token in part.token_ids], sum(part.sum_logprobs for part in parts), reports


def check_answer(parts: Sequence[EngineAnswerPart], plain: BeamGroup, streamed: BeamGroup) -> None:
    expected, end = plain.best(1), streamed.unsent(streamed.best(1))
    assert len(expected) == len(end)
    if not len(end):
        return
    tokens, total, reports = joined([*parts, EngineAnswerPart(end.token_ids[0], end.sum_logprobs[0], end.reports)])
    assert end.token_ids[0], "the last token is known when the search is over, not earlier"
    assert [tokens] == expected.token_ids
    assert total == pytest.approx(expected.sum_logprobs[0], abs=1e-6)
    assert (end.scores, end.stopped_by) == (expected.scores, expected.stopped_by)
    assert (expected.reports is None) == (not reports)
    for field, same in zip(zip(*reports, strict=True), expected.reports or (), strict=True):
        assert np.array_equal(field, same)


def test_all_that_is_known_of_the_answer_is_sent_and_only_that() -> None:
    num_early = num_decided = 0

    @settings(max_examples=NUM_SEARCHES, derandomize=True)
    @given(searches())
    def search(asked: tuple[dict[str, Any], dict[str, Any], int, float]) -> None:
        nonlocal num_early, num_decided
        options, fields, seed, sureness = asked
        plain, streamed = (group_of(options, fields, streams) for streams in (False, True))
        parts: list[EngineAnswerPart] = []
        while True:
            step = next_step(plain, seed, sureness)
            is_over = plain.advance(step)
            assert streamed.advance(step) == is_over
            if is_over:
                break
            part = streamed.next_part()
            assert part is None or part.token_ids
            parts += [part] if part else []
            streamed.check_invariants()
            assert streamed.next_part() is None, "it was sent already"
            sent, expected = joined(parts)[0], known(plain)
            assert sent == expected[: len(sent)]
            if not plain.plan.num_sampled_steps:  # beams that were sampled alike are two
                assert sent == expected
            num_decided += streamed.stream.is_decided
        check_answer(parts, plain, streamed)
        num_early += bool(parts)

    search()
    assert num_early > NUM_SEARCHES / 5
    assert num_decided > NUM_SEARCHES / 10


def test_a_search_that_begins_anew_sends_nothing_twice() -> None:
    num_resent = 0

    @settings(max_examples=NUM_SEARCHES // 3, derandomize=True)
    @given(searches(), st.integers(1, 5))
    def search(asked: tuple[dict[str, Any], dict[str, Any], int, float], restart_at: int) -> None:
        nonlocal num_resent
        options, fields, seed, sureness = asked
        plain, streamed = (group_of(options, fields, streams) for streams in (False, True))
        steps: list[SearchStepResult] = []
        is_over = False
        while not is_over:
            steps.append(next_step(plain, seed, sureness))
            is_over = plain.advance(steps[-1])
        parts: list[EngineAnswerPart] = []
        for number, step in enumerate(steps[:-1], 1):
            streamed.advance(step)
            parts += [part] if (part := streamed.next_part()) else []
            if number == restart_at:
                num_resent += bool(parts)
                streamed.restart()
                for again in steps[:number]:
                    streamed.advance(again)
                    assert streamed.next_part() is None
        streamed.advance(steps[-1])
        check_answer(parts, plain, streamed)

    search()
    assert num_resent > NUM_SEARCHES / 50


def test_what_was_sent_begins_the_answer_of_a_search_that_is_aborted() -> None:
    """Preempted or not, and where it began anew, too."""
    num_running = num_finished = num_lost = 0

    @settings(max_examples=4 * NUM_SEARCHES, derandomize=True)
    @given(searches(), st.integers(1, 14), st.sampled_from(["", "preempted", "anew"]))
    def search(asked: tuple[dict[str, Any], dict[str, Any], int, float], abort_at: int, what: str) -> None:
        nonlocal num_running, num_finished, num_lost
        options, fields, seed, sureness = asked
        plain, streamed = (group_of(options, fields, streams) for streams in (False, True))
        parts: list[EngineAnswerPart] = []
        for _ in range(abort_at):
            step = next_step(plain, seed, sureness)
            if plain.advance(step):
                return
            streamed.advance(step)
            parts += [part] if (part := streamed.next_part()) else []
        if what == "preempted":
            streamed.preempt()
        if what == "anew":
            streamed.restart()
        best = plain.best_so_far(plain.plan.width)
        rest = streamed.unsent_so_far(streamed.best_so_far(1))
        tokens, total, reports = joined(
            [*parts, EngineAnswerPart(rest.token_ids[0], rest.sum_logprobs[0], rest.reports)]
        )
        if what == "anew":
            assert rest.token_ids == [[]]
            num_lost += bool(parts)
            return
        expected = plain.best(1) if streamed.stream.is_decided else best.first(1)
        assert [tokens] == expected.token_ids
        assert total == pytest.approx(expected.sum_logprobs[0], abs=1e-6)
        for field in ("scores", "stopped_by", "has_ended", "leaves"):
            assert getattr(rest, field) == getattr(expected, field)
        assert len(reports) == (0 if expected.reports is None else len(expected.reports.ranks))
        assert best.scores.tolist() == sorted(best.scores, reverse=True)
        assert (best.lengths[best.leaves < 0] == len(plain.history(0))).all()
        num_running += rest.leaves[0] < 0
        num_finished += rest.leaves[0] >= 0

    search()
    assert min(num_running, num_finished, num_lost) > 1


@pytest.mark.parametrize("max_tokens", [2, 6])
def test_an_answer_that_changed_is_an_error_and_never_sent(max_tokens: int) -> None:
    """Whether that shows while the search goes on, or in its end."""
    fields = {"max_tokens": max_tokens, "min_tokens": max_tokens, "logprobs": None}
    streamed = group_of({"beam_width": 1, "semantics": "hf"}, fields, streams=True)
    first = next_step(streamed, 1, 2.0)
    others = (next_step(streamed, seed, 2.0) for seed in range(2, 99))
    other = next(step for step in others if step.tokens[0] != first.tokens[0])
    assert not streamed.advance(first)
    assert streamed.next_part() == ([first.tokens[0]], pytest.approx(first.scores[0]), None)
    streamed.restart()
    assert not streamed.advance(other)
    if max_tokens == 2:
        assert streamed.advance(next_step(streamed, 1, 2.0))
    with pytest.raises(AnswerChangedError, match="another answer, by a near-tie, than the one whose beginning"):
        streamed.unsent(streamed.best(1)) if max_tokens == 2 else streamed.next_part()


@pytest.mark.parametrize(
    ("n", "compact", "kind", "streams"),
    [
        (1, False, RequestOutputKind.DELTA, True),
        (1, False, RequestOutputKind.CUMULATIVE, True),
        (1, False, RequestOutputKind.FINAL_ONLY, False),
        (1, True, RequestOutputKind.DELTA, False),
        (2, False, RequestOutputKind.DELTA, False),
    ],
)
def test_a_search_streams_if_it_has_one_answer_and_that_is_asked_for_in_parts(
    n: int, compact: bool, kind: RequestOutputKind, streams: bool
) -> None:
    request = Request("g", [5], SamplingParams(max_tokens=4, output_kind=kind), None)
    beam = BeamParams(beam_width=3, compact=compact, semantics="hf")
    group = new_group(request, beam, GroupTicketMessage(n, EOS), 512, False, NoGroupCatalog(beam))
    assert (group.stream is not None) == streams
