"""The peer samples by the target's distribution, and speculates."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel

from benchmarks.peers.specinfer import Generated, TreeSpeculation
from tests.support.models import KINDS

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

VOCABULARY = 16
TEMPERATURE = 0.6
PROMPT = [3, 11, 5]
SEEDS, CONTROL_SEEDS = 600, 200
LEAST = 5  # expected in a cell; rarer answers are counted as one
SIGNIFICANCE = 1e-3


class InverseRatio(TreeSpeculation):
    """Wrong: accepts with q / p, as one paper prints it."""

    @staticmethod
    def chance(p: float, q: float) -> float:
        return q / p if p else 1.0


class NoResidual(TreeSpeculation):
    """Wrong: after a rejection the target's distribution stays as it was."""

    @staticmethod
    def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return p


def toy(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return LlamaForCausalLM(KINDS["toy"]()).eval()


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return toy(7)


@pytest.fixture(scope="module")
def draft() -> PreTrainedModel:
    """The target with a tenth of another model, so that they overlap by half: both outcomes are common."""
    model, other = toy(7), toy(8)
    with torch.no_grad():
        for weight, noise in zip(model.parameters(), other.parameters(), strict=True):
            weight.add_(noise, alpha=0.1)
    return model


@pytest.fixture(scope="module")
def distribution(target: PreTrainedModel) -> torch.Tensor:
    """[V * V], of the first two tokens, by enumeration."""
    prompts = torch.tensor([[*PROMPT, token] for token in range(VOCABULARY)])
    with torch.inference_mode():
        p = (target(prompts).logits[:, -2:].double() / TEMPERATURE).softmax(-1)
    return (p[0, 0, :, None] * p[:, 1]).flatten()


def p_value(speculation: TreeSpeculation, distribution: torch.Tensor, num_seeds: int) -> float:
    """Of the first two tokens, under the target's distribution."""
    answers = (speculation.generate(PROMPT, 2, None, seed).tokens for seed in range(num_seeds))
    seen = Counter(first * VOCABULARY + second for first, second in answers)
    observed = torch.tensor([seen[cell] for cell in range(len(distribution))], dtype=torch.float64)
    expected = distribution * num_seeds
    rare = expected < LEAST
    pooled = [torch.cat([counts[~rare], counts[rare].sum()[None]]).numpy() for counts in (observed, expected)]
    return float(chisquare(*pooled).pvalue)


def plain_logprobs(model: PreTrainedModel, prompt: list[int], answer: Generated) -> torch.Tensor:
    with torch.inference_mode():
        logp = model(torch.tensor([prompt + answer.tokens])).logits[0].double().log_softmax(-1)
    return logp[len(prompt) - 1 : -1].gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]


@pytest.mark.parametrize("expansion", [(1, 1), (3, 1), (2, 2)])
def test_two_tokens_have_the_targets_law(
    target: PreTrainedModel, draft: PreTrainedModel, distribution: torch.Tensor, expansion: tuple[int, ...]
) -> None:
    assert p_value(TreeSpeculation(target, draft, expansion, TEMPERATURE), distribution, SEEDS) > SIGNIFICANCE


@pytest.mark.parametrize("wrong", [InverseRatio, NoResidual])
def test_wrong_verification_fails_the_same_test(
    target: PreTrainedModel, draft: PreTrainedModel, distribution: torch.Tensor, wrong: type[TreeSpeculation]
) -> None:
    assert p_value(wrong(target, draft, (3, 1), TEMPERATURE), distribution, CONTROL_SEEDS) < SIGNIFICANCE


def test_a_draft_that_is_the_target_is_always_accepted(target: PreTrainedModel) -> None:
    answer = TreeSpeculation(target, target, (2, 1, 2)).generate(PROMPT, 24, None, seed=0)
    assert len(answer.tokens) == 24
    assert answer.target_forwards == 24 / 4
    assert answer.accepted == 24 / 4 * 3
    assert answer.drafted == 24 / 4 * (2 + 2 + 4)


@pytest.mark.parametrize("max_new_tokens", range(8))
def test_an_answer_has_exactly_the_tokens_asked_for(
    target: PreTrainedModel, draft: PreTrainedModel, max_new_tokens: int
) -> None:
    answer = TreeSpeculation(target, draft, (2, 2)).generate(PROMPT, max_new_tokens, None, seed=1)
    assert len(answer.tokens) == len(answer.logprobs) == max_new_tokens


def test_an_answer_ends_with_its_first_eos_token(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    speculation = TreeSpeculation(target, draft, (2, 2))
    whole = speculation.generate(PROMPT, 24, None, seed=2)
    for eos_token_id in set(whole.tokens):
        answer = speculation.generate(PROMPT, 24, eos_token_id, seed=2)
        end = whole.tokens.index(eos_token_id) + 1
        assert answer.tokens == whole.tokens[:end]
        assert answer.logprobs == whole.logprobs[:end]


@pytest.mark.parametrize("prompt", [PROMPT, [4]])
@pytest.mark.parametrize("expansion", [(1,), (3, 2), (2, 1, 2)])
def test_logprobs_are_those_of_a_plain_forward(
    target: PreTrainedModel, draft: PreTrainedModel, expansion: tuple[int, ...], prompt: list[int]
) -> None:
    """Wrong positions, a wrong mask or a rejected node left in the cache would show."""
    answer = TreeSpeculation(target, draft, expansion, TEMPERATURE).generate(prompt, 32, None, seed=3)
    assert 0 < answer.accepted < 32
    expected = plain_logprobs(target, prompt, answer)
    assert torch.allclose(torch.tensor(answer.logprobs, dtype=torch.float64), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("expansion", "temperature", "message"),
    [((), 1.0, "expansion"), ((2, 0), 1.0, "expansion"), ((2,), 0.0, "temperature=0.0 must be above 0")],
)
def test_what_cannot_be_sampled_is_refused(
    target: PreTrainedModel, expansion: tuple[int, ...], temperature: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TreeSpeculation(target, target, expansion, temperature)


def test_an_empty_prompt_is_refused(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        TreeSpeculation(target, target, (2,)).generate([], 4, None, seed=0)


def test_a_draft_with_another_vocabulary_is_refused(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="take a draft with the target's vocabulary"):
        TreeSpeculation(target, LlamaForCausalLM(KINDS["gqa"]()), (2,))


def test_a_sliding_window_is_refused(target: PreTrainedModel) -> None:
    model = MistralForCausalLM(KINDS["mistral"]())
    with pytest.raises(ValueError, match="without full attention"):
        TreeSpeculation(model, model, (2,))
