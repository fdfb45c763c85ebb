"""A filter leaves out what vLLM's sampler leaves out, and changes no log-probability."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from tests.support.loop import allowed
from tests.support.steps import shortcuts
from vllm_trie.search import filters
from vllm_trie.search.filters import (
    SearchFilters,
    filtered_search_logprobs,
    search_running_sum,
)
from vllm_trie.search.sampling import sample_search_tokens
from vllm_trie.search.step import search_log_probabilities

ROWS, VOCAB_SIZE = 6, 40
property_test = settings(max_examples=100, derandomize=True)
filters_of = st.builds(
    SearchFilters,
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 7, VOCAB_SIZE, VOCAB_SIZE + 5]),
    top_p=st.sampled_from([1e-6, 0.2, 0.7, 0.999, 1.0]),
)


def logprobs_of(seed: int, spread: float = 2.0) -> torch.Tensor:
    """[2, ROWS, VOCAB_SIZE], all different; some rows may take few tokens, one none at all."""
    logits = spread * torch.randn(2, ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    logprobs = search_log_probabilities(logits, masked_token_ids=(3, 5))
    logprobs[0, 1, 2:] = float("-inf")
    logprobs[0, 2] = float("-inf")
    return logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_log_probabilities_are_the_same_however_many_rows_are_near(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(2, 7, 90, generator=torch.Generator().manual_seed(0)).to(dtype)[:, 1:]
    monkeypatch.setattr("vllm_trie.search.parts.CELLS_NEAR", 200 // torch.get_num_threads())
    assert torch.equal(search_log_probabilities(logits), torch.log_softmax(logits.float(), dim=-1))


@property_test
@given(st.integers(0, 1 << 32), filters_of)
def test_a_row_keeps_what_a_loop_keeps(seed: int, filters: SearchFilters) -> None:
    logprobs = logprobs_of(seed)
    before = logprobs.clone()
    found = filtered_search_logprobs(logprobs, filters)
    assert torch.equal(logprobs, before)
    expected = [allowed(row, **filters._asdict()) for row in logprobs.flatten(0, 1)]
    assert torch.equal(found.flatten(0, 1), torch.stack(expected))


@property_test
@given(st.integers(0, 1 << 32), filters_of, st.sampled_from([0.5, 1.0, 2.0]))
def test_a_row_keeps_what_vllm_keeps(seed: int, filters: SearchFilters, temperature: float) -> None:
    logits = torch.randn(ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    probabilities = (logits / temperature).softmax(-1)
    scaled = logits / temperature
    scaled[probabilities < filters.min_p * probabilities.amax(-1, keepdim=True)] = float("-inf")  # vLLM's min_p
    top_k = torch.full((ROWS,), min(filters.top_k or VOCAB_SIZE, VOCAB_SIZE))
    theirs = apply_top_k_top_p_pytorch(scaled, top_k, torch.full((ROWS,), filters.top_p))
    ours = filtered_search_logprobs(search_log_probabilities(logits, temperature=temperature), filters)
    assert torch.equal(ours > float("-inf"), theirs > float("-inf"))


@pytest.mark.parametrize("top_p", [0.1, 0.6, 0.95, 0.99999])
def test_flat_rows_of_a_large_vocabulary_keep_what_a_sort_keeps(top_p: float) -> None:
    logprobs = (0.3 * torch.randn(2, 3, 5000, generator=torch.Generator().manual_seed(1))).log_softmax(-1)
    best_first, tokens = logprobs.double().sort(dim=-1, descending=True)
    behind = best_first.exp().cumsum(-1) - best_first.exp() >= top_p
    expected = torch.ones_like(behind).scatter(-1, tokens, ~behind)
    differing = (filtered_search_logprobs(logprobs, SearchFilters(top_p=top_p)) > float("-inf")) != expected
    assert differing.sum() <= 2 * 6, "more than rounding at the edge"


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_what_remains_keeps_its_log_probability(temperature: float) -> None:
    logits = torch.randn(3, VOCAB_SIZE, dtype=torch.bfloat16)
    found = filtered_search_logprobs(
        search_log_probabilities(logits, temperature=temperature), SearchFilters(top_k=5, top_p=0.8)
    )
    exact = (logits.double() / temperature).log_softmax(-1)
    kept = found > float("-inf")
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(found[kept], exact[kept].float())


def test_equal_log_probabilities_fall_to_top_p_by_token() -> None:
    found = filtered_search_logprobs(search_log_probabilities(torch.zeros(1, 8)), SearchFilters(top_p=0.4))
    assert (found[0] > float("-inf")).tolist() == [True] * 4 + [False] * 4


def test_nothing_to_filter_costs_no_copy() -> None:
    logprobs = logprobs_of(0)
    assert filtered_search_logprobs(logprobs, SearchFilters(temperature=0.5)) is logprobs


@pytest.mark.parametrize("shape", [(7,), (1, 7), (1, 1, 7), (3, 7), (2, 3, 7)])
def test_running_sums_of_one_row_are_those_of_many(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.rand(shape, dtype=torch.float64)
    expected, scanned, scan = values.cumsum(dim=-1), list[torch.Size](), torch.Tensor.cumsum

    def watched(of: torch.Tensor, dim: int) -> torch.Tensor:
        scanned.append(of.shape)
        return scan(of, dim=dim)

    monkeypatch.setattr(torch.Tensor, "cumsum", watched)
    with shortcuts(allowed=False):
        assert torch.equal(search_running_sum(values), expected)
    assert all(shape.numel() > shape[-1] for shape in scanned), "torch scanned a row that is alone"


@pytest.fixture
def long_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows of more than 4 are long ones, on a device at which nobody looks."""
    monkeypatch.setattr(filters, "LONG_ROW", 4)
    with shortcuts(allowed=False):
        yield


@pytest.mark.usefixtures("long_rows")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(5,), (1, 999), (3, 999), (2, 3, 70)])
def test_long_rows_have_the_same_running_sums(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(9).exp().to(dtype)
    values[..., 2:4] = 0
    expected = values.double().cumsum(dim=-1)
    monkeypatch.setattr(torch.Tensor, "cumsum", None)  # which would scan floats
    found = search_running_sum(values)
    assert found.dtype == dtype
    error = 16 * torch.finfo(dtype).eps * float(expected.max())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=error)
    assert (found.diff(dim=-1) >= 0).all()
    assert (found[..., 1:4].diff(dim=-1) == 0).all()


@pytest.mark.usefixtures("long_rows")
def test_what_nobody_may_draw_is_not_sampled_of_long_rows() -> None:
    random = torch.Generator().manual_seed(0)
    logprobs = torch.randn(2, 3, 400, generator=random).mul(4)
    logprobs[torch.rand(logprobs.shape, generator=random) < 0.7] = -torch.inf
    chances = torch.rand(2, 3, 500, dtype=torch.float64, generator=random)
    chances[..., :2] = torch.tensor([0.0, 1 - 2**-53])
    tokens = sample_search_tokens(logprobs, chances)
    assert (logprobs.gather(-1, tokens) > -torch.inf).all()
    with shortcuts(allowed=True):
        assert (tokens == sample_search_tokens(logprobs, chances)).float().mean() > 0.99
    assert (sample_search_tokens(torch.full((1, 1, 9), -torch.inf), chances[:1, :1]) == 8).all()


@pytest.mark.usefixtures("long_rows")
def test_the_sum_of_a_long_row_depends_on_no_other() -> None:
    values = torch.rand(4, 50, dtype=torch.float64)
    assert torch.equal(search_running_sum(values)[2], search_running_sum(values[2]))
