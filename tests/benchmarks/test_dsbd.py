"""The DSBD paper's tables: equal seeds, layers that are counted, the theorem beside them, and the front of the grid."""

from __future__ import annotations

import pytest

from benchmarks.beam_sampling import MODES, PLAIN, sampled_params
from benchmarks.harness import Setting
from benchmarks.tables.dsbd import LAYERS, expected_steps, in_turn
from benchmarks.tables.dsbd_grid import front, grid
from benchmarks.watch import total_counts
from tests.support.engine import Engines
from tests.support.pairs import TRAINED, speculating
from tests.support.running import trained_prompts

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_the_theorem_gives_the_closed_form_and_its_limits() -> None:
    for acceptance in (0.0, 0.3, 0.99):
        closed = (1 - acceptance**4) / (1 - acceptance)
        assert expected_steps(acceptance, 3) == pytest.approx(closed)
    assert [expected_steps(1.0, layers) for layers in range(4)] == [1, 2, 3, 4]


def test_the_front_is_what_nothing_else_dominates() -> None:
    points = [(1.0, -1.0), (2.0, -2.0), (1.5, -2.0), (0.5, -1.0), (3.0, -5.0), (1.0, -1.0)]
    assert front(points) == [0, 1, 4, 5], "equals do not dominate each other"
    assert front([]) == []


def test_no_layer_of_the_grid_is_to_be_wider_than_its_drafts() -> None:
    for layers, settings in grid(Setting(size="full")):
        assert layers in (2, 3, 4)
        assert {draft_width for draft_width, _, _ in settings} == {2, 3, 4, 5, 6}
        assert {threshold for _, threshold, _ in settings} == {0.7, 0.9}
        assert all(1 <= least <= min(3, draft_width) for draft_width, _, least in settings)


def test_ways_take_turns_at_equal_seeds_and_their_layers_are_counted(engines: Engines) -> None:
    """A forward takes a step for each layer that is accepted, and one more unless the search ends with that layer."""
    llm = speculating(engines, TRAINED, LAYERS).llm
    prompts = trained_prompts([20, 30])
    plain, drafted = sampled_params(4, 16, PLAIN), sampled_params(4, 16, MODES["beam sampling, 4"].options)
    found = in_turn(llm, prompts, [plain, drafted, plain, drafted], rounds=2)
    answers = [[output.outputs[0].token_ids for output in sampled.outputs] for sampled in found]
    assert answers[0] == answers[2]
    assert answers[1] == answers[3]
    assert answers[0] != answers[1]
    assert [len(sampled.seconds) for sampled in found] == [len(prompts)] * 4
    assert found[0].layers.num_verified == 0
    counts, layers = total_counts(found[1].outputs), found[1].layers
    assert 0 < layers.num_accepted < layers.num_verified
    unaided = counts.steps - counts.target_forwards
    assert layers.num_accepted - len(prompts) <= unaided <= layers.num_accepted
    at_a_boundary = 2 * 4  # a full block and a new one of each beam; the drafts behind it fit into these
    assert [sampled.peak_blocks for sampled in found] == [[at_a_boundary] * len(prompts)] * 4
