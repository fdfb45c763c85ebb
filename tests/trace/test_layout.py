"""Where the page puts nodes, and what it says of KV blocks: its script runs in V8, without a browser."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from py_mini_racer import MiniRacer

from tests.support.engine import ROOT
from tests.support.traces import random_trace
from vllm_trie.trace import Forest, Trace
from vllm_trie.trace.trace import Finished

SCRIPT = ROOT / "vllm_trie" / "trace" / "page" / "layout.js"
PLAIN = "(key, value) => (ArrayBuffer.isView(value) ? [...value] : value instanceof Map ? [...value] : value)"
BEAM, FINISHED, DRAFT = range(3)


@cache
def engine() -> MiniRacer:
    context = MiniRacer()
    context.eval(SCRIPT.read_text())
    return context


def laid_out(trace: Trace, then: str = "nodes", shows_drafts: bool = True) -> Any:
    """What an expression comes to, of `trace` and its `nodes`."""
    shown = json.dumps(shows_drafts)
    prepared = f"const trace = {trace.to_json()}; const nodes = TraceLayout.layout(trace, {shown});"
    found = engine().eval(f"(() => {{ {prepared} return JSON.stringify({then}, {PLAIN}); }})()")
    return json.loads(found)


TRACES = {
    "plain": random_trace(5, 30),
    "drafts": random_trace(4, 21, num_drafts=9),
    "one beam": random_trace(1, 6),
    "wide": random_trace(40, 12, num_drafts=60, seed=3),
}
EACH = pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)


@EACH
def test_every_beam_and_hypothesis_has_a_node_and_the_way_to_it_is_its_own(trace: Trace) -> None:
    nodes = laid_out(trace, "({...nodes, paths: [...nodes.step.keys()].map((node) => TraceLayout.path(nodes, node))})")
    tokens = [[nodes["token"][at] for at in path] for path in nodes["paths"]]
    for number, node in enumerate(nodes["nodeOfFinished"]):
        assert tokens[node] == trace.hypothesis(number)
    for step, of_slots in enumerate(nodes["nodeOf"][:-1]):
        assert [tokens[node] for node in of_slots] == [trace.beam(step, slot) for slot in range(len(of_slots))]
    kinds = [nodes["kind"].count(kind) for kind in range(3)]
    assert kinds[:2] == [sum(map(len, trace.tokens)), len(trace.finished.steps)]
    assert (kinds[DRAFT] > 0) == (len(trace.forests) > 0)


@EACH
def test_no_two_edges_cross_and_no_two_nodes_touch(trace: Trace) -> None:
    nodes = laid_out(trace)
    for first, end in pairwise(nodes["columns"]):
        lanes, parents = nodes["lane"][first:end], nodes["parent"][first:end]
        assert all(below - above > 0.999 for above, below in pairwise(lanes))
        assert parents == sorted(parents)
        assert all(-0.001 <= lane <= nodes["height"] - 0.999 for lane in lanes)


@EACH
def test_dead_are_those_from_which_nothing_descends_any_more(trace: Trace) -> None:
    step = 2 * trace.num_steps // 3
    nodes = laid_out(
        trace, f"({{...nodes, states: [...nodes.step.keys()].map((n) => TraceLayout.state(nodes, n, {step}))}})"
    )
    alive = set[int]()
    for node in reversed(range(len(nodes["step"]))):
        if nodes["kind"][node] == DRAFT or nodes["step"][node] > step:
            continue
        if nodes["kind"][node] == FINISHED or nodes["step"][node] == step or node in alive:
            alive |= {node, nodes["parent"][node]}
    for node, state in enumerate(nodes["states"]):
        if nodes["kind"][node] == BEAM and nodes["step"][node] <= step:
            assert state == ("running" if node in alive else "dead"), node
    returned = [nodes["states"][nodes["nodeOfFinished"][number]] for number in trace.returned]
    assert returned == ["returned"] * len(trace.returned)


@EACH
def test_blocks_are_those_of_the_trace(trace: Trace) -> None:
    for step in range(0, len(trace.tokens), 5):
        found = laid_out(
            trace, f"({{...TraceLayout.blocks(trace, nodes, {step}), step: nodes.step, place: nodes.place}})"
        )
        rows = trace.row_blocks(step)
        for beam, owners in zip(found["beams"], found["owners"], strict=True):
            own = [(found["step"][node], found["place"][node]) for node in owners]
            expected = [at for at in rows[found["place"][beam]] if at[0] < step]
            assert own == [*expected, (step, found["place"][beam])]
        assert sum(count for _, count in found["sharers"]) == sum(map(len, found["owners"]))


def test_drafts_are_beams_where_they_were_accepted_and_else_nodes_of_their_own() -> None:
    trace = TRACES["drafts"]
    nodes = laid_out(trace)
    for step, accepted in enumerate(trace.accepted):
        for slot, draft in enumerate(accepted):
            assert nodes["drafted"][nodes["nodeOf"][step][slot]] == (2 if draft >= 0 else 0) or draft < 0
    num_drafts = sum(len(forest.tokens) for forest in trace.forests)
    num_accepted = nodes["drafted"].count(2)
    assert num_accepted > 0
    assert nodes["kind"].count(DRAFT) >= num_drafts - num_accepted - nodes["kind"].count(BEAM)
    assert laid_out(trace, shows_drafts=False)["kind"].count(DRAFT) == 0


def test_a_slot_without_a_beam_has_no_node() -> None:
    trace = TRACES["plain"]
    scores = [[*of_step] for of_step in trace.scores]
    scores[-1][2] = None
    nodes = laid_out(replace(trace, scores=scores))
    assert nodes["kind"].count(BEAM) == laid_out(trace)["kind"].count(BEAM) - 1


def test_nodes_lie_as_near_to_their_parents_as_can_be() -> None:
    lanes = engine().eval("JSON.stringify(TraceLayout.spread([2, 2, 2, 7, 7, 9], 10))")
    assert json.loads(lanes) == pytest.approx([1, 2, 3, 6.5, 7.5, 9])
    lanes = engine().eval("JSON.stringify(TraceLayout.spread([0, 0, 0], 10))")
    assert json.loads(lanes) == [0, 1, 2]


def test_a_draft_after_a_draft_lies_one_step_later() -> None:
    trace = Trace(
        prompt_length=5,
        block_size=4,
        parents=[[0, 0], [0, 0], [0, 1]],
        tokens=[[7, 8], [3, 5], [4, 9]],
        scores=[[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]],
        finished=Finished([2], [1], [6], [-7.0]),
        returned=[0],
        forests=[Forest(step=1, parents=[-1, 0, 0, 1], tokens=[3, 4, 2, 2])],
        accepted=[[], [0, -1], [1, -1]],
    )
    nodes = laid_out(trace)
    assert [nodes["drafted"][nodes["nodeOf"][step][0]] for step in (0, 1, 2)] == [0, 2, 2]
    (draft,) = [node for node, kind in enumerate(nodes["kind"]) if kind == DRAFT]  # the last one lies behind the end
    assert (nodes["step"][draft], nodes["token"][draft], nodes["parent"][draft]) == (2, 2, nodes["nodeOf"][1][0])
