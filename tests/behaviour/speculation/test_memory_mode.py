"""Memory mode keeps one beam between forwards, and is a search like any other."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine import BLOCK_SIZE, Engine
from tests.support.running import run
from tests.support.trained_pair import LENGTH, ONE_BEAM, SAMPLED, WIDTH, counts, search, tokens
from vllm_trie import beam_params

pytestmark = pytest.mark.slow


def test_memory_mode_holds_one_beam_between_forwards(engine: Engine, prompts: list[list[int]]) -> None:
    manager, peaks = engine.scheduler.kv_cache_manager, {}
    for keeps_one in (False, True):
        manager.peak_group_blocks, held = 0, []

        def watch(held: list[tuple[int, int]] = held) -> None:
            for group in engine.scheduler.groups.values():
                if group.length > 1 and not group.num_pending:  # else blocks are lent
                    held.append((manager.num_group_blocks, -(-(group.plan.prompt_length + group.length) // BLOCK_SIZE)))

        params = beam_params(8, n=8, max_tokens=2 * BLOCK_SIZE, ignore_eos=True, **SAMPLED, memory_mode=keeps_one)
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
    return run(engine, [(prompt, beam_params(WIDTH, **fields)) for prompt in prompts])


@pytest.mark.nightly
def test_memory_mode_ends_hypotheses_as_any_search_does(engine: Engine, prompts: list[list[int]]) -> None:
    tokenizer, stop = engine.llm.get_tokenizer(), "\n"  # which all code comes to
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
        by_token = ended(prompts, **options)
        assert {o.stop_reason for o in by_token} == {None if token == tokenizer.eos_token_id else token}
        assert all(o.token_ids.index(token) == len(o.token_ids) - 1 for o in by_token)


def test_memory_mode_of_one_token_and_of_fewer_answers_than_beams(engine: Engine, prompts: list[list[int]]) -> None:
    for output in keeping_one(engine, prompts[:2], max_tokens=1):
        assert [len(o.token_ids) for o in output.outputs] == [1] * WIDTH
        assert len({tuple(o.token_ids) for o in output.outputs}) == WIDTH
        assert counts(output)["target_forwards"] == 1
    four = keeping_one(engine, prompts[:2])
    for n in (1, 2):
        assert tokens(keeping_one(engine, prompts[:2], n=n)) == [answers[:n] for answers in tokens(four)]


def test_memory_mode_searches_wider_than_the_batch(engine: Engine, prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="beam_width=100 exceeds max_num_seqs=64; lower it, or raise --max-num-seqs"):
        search(engine, prompts[:1], 100, **SAMPLED)
    (output,) = search(engine, prompts[:1], 100, max_tokens=12, **ONE_BEAM)
    assert len({tuple(o.token_ids) for o in output.outputs}) == 100
