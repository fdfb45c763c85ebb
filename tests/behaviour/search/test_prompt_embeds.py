"""A prompt of embeddings is a prompt: beams after the embeddings of tokens are those after the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.disturb import preempt_all
from tests.support.engine import BLOCK_SIZE, TRAINED_TARGET, Engine, Engines
from tests.support.pairs import TRAINED, drafting, looking_up
from tests.support.reference import agree, engine_answers, load
from tests.support.running import trained_prompts
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

LENGTHS = [3 * BLOCK_SIZE + 5, 1, BLOCK_SIZE, BLOCK_SIZE - 1, 2 * BLOCK_SIZE + 1]


def embedded(tokens: list[int]) -> dict[str, Any]:
    with torch.no_grad():
        return {"prompt_embeds": load(TRAINED_TARGET).get_input_embeddings()(torch.tensor(tokens))}


def partly_embedded(tokens: list[int]) -> dict[str, Any]:
    """Every third token of a prompt stands there as a token."""
    are_tokens = [place % 3 == 0 for place in range(len(tokens))]
    shown = [token if is_token else 1 for token, is_token in zip(tokens, are_tokens, strict=True)]
    embeds = embedded(tokens)["prompt_embeds"] * ~torch.tensor(are_tokens)[:, None]
    return {"prompt_embeds": embeds, "prompt_token_ids": shown, "prompt_is_token_ids": are_tokens}


def answers(engine: Engine, prompts: list[dict[str, Any]], params: list[Any], after_step: Any = None) -> list[Any]:
    core, found = engine.llm.llm_engine, dict[str, Any]()
    for number, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        core.add_request(str(number), prompt, own.clone())
    while core.has_unfinished_requests():
        found |= {output.request_id: output for output in core.step() if output.finished}
        if after_step is not None:
            after_step()
    return [found[str(number)] for number in range(len(prompts))]


@pytest.mark.parametrize(
    ("form", "options"),
    [
        pytest.param(embedded, {}, id="embedded", marks=pytest.mark.nightly),
        pytest.param(embedded, looking_up(2), id="embedded, looked-up drafts", marks=pytest.mark.nightly),
        pytest.param(partly_embedded, {}, id="partly embedded", marks=pytest.mark.nightly),
        pytest.param(partly_embedded, looking_up(2), id="partly embedded, looked-up drafts"),
    ],
)
def test_embeddings_of_tokens_find_what_the_tokens_find(
    engines: Engines, options: dict[str, Any], form: Callable[[list[int]], dict[str, Any]]
) -> None:
    """Among prompts of tokens, in slots that prompts with other embeddings have left, and after a preemption."""
    engine = engines(TRAINED_TARGET, enable_prompt_embeds=True, **options)
    prompts, steps = trained_prompts(LENGTHS), 0
    more = [{}, {"stop": ["e"]}, {"num_beam_groups": 2, "diversity_penalty": 0.5}, {"temperature": 2.0}, {}]
    params = [
        beam_params(width, n=width, max_tokens=BLOCK_SIZE + 3, **own)
        for width, own in zip((4, 3, 4, 2, 1), more, strict=True)
    ]
    expected = answers(engine, [{"prompt_token_ids": prompt} for prompt in prompts], params)

    def preempt_once() -> None:
        nonlocal steps
        steps += 1
        if steps == 9:
            preempt_all(engine)

    asked = [form(prompt) if number % 2 == 0 else {"prompt_token_ids": prompt} for number, prompt in enumerate(prompts)]
    for disturb, of_prompts in ((None, asked), (preempt_once, [*map(form, prompts)]), (None, asked)):
        found = answers(engine, of_prompts, params, disturb)
        for one, other in zip(expected, found, strict=True):
            assert agree(engine_answers(one, 1.0), engine_answers(other, 1.0))
            assert [output.text for output in one.outputs] == [output.text for output in other.outputs]
    assert steps > 9
    engine.check_nothing_is_left()


def test_a_draft_model_which_does_not_see_embeddings_is_named(engines: Engines) -> None:
    engine = engines(TRAINED_TARGET, enable_prompt_embeds=True, **drafting(TRAINED[1], 2))
    with pytest.raises(ValueError, match="works on prompt_embeds only without a draft model, which does not see them"):
        engine.llm.generate([embedded([5, 6, 7])], beam_params(2, n=2, max_tokens=3), use_tqdm=False)
    assert len(engine.generate([[5, 6, 7]], beam_params(2, n=2, max_tokens=3))[0].outputs) == 2
