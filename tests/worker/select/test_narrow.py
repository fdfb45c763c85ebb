"""Logits of few tokens are those of the model, or the model computes all of them, and the log says why."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm_trie.worker.select import narrow
from vllm_trie.worker.select.narrow import NarrowSelectionHead, SelectionLogits

HIDDEN_SIZE, VOCAB_SIZE = 48, 500


class Model(nn.Module):
    """A head, and what becomes of its logits."""

    def __init__(self, shape: tuple[int, int] = (VOCAB_SIZE, HIDDEN_SIZE), **options: Any) -> None:
        super().__init__()
        self.bias, self.after = options.pop("bias", None), options.pop("after", lambda logits: logits)
        dtype, device = options.pop("dtype", torch.float32), options.pop("device", "cpu")
        with set_current_vllm_config(VllmConfig()):
            self.logits_processor = LogitsProcessor(shape[0], **options)
        random = torch.Generator().manual_seed(1)
        weight = torch.empty(shape, device=device) if device != "cpu" else torch.randn(shape, generator=random)
        self.lm_head = SimpleNamespace(
            weight=weight.to(dtype),
            quant_method=UnquantizedEmbeddingMethod(),
            tp_size=1,
            cpu_linear=nn.functional.linear,
        )

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.logits_processor(self.lm_head, hidden, self.bias)
        return self.after(logits)


def head_of(model: nn.Module, *, ranks: int = 1, lora: object = None, counts_nans: bool = False) -> NarrowSelectionHead:
    """Of an engine with a model."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB_SIZE),
        lora_config=lora,
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )
    return NarrowSelectionHead(model, config, counts_nans)


def states(num_rows: int = 7, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num_rows, HIDDEN_SIZE, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.25},
        {"soft_cap": 3.0, "scale": 2.0},
        {"bias": torch.arange(VOCAB_SIZE) / 50},
        {"after": lambda logits: logits.float() / 3},
    ],
    ids=["plain", "scale", "soft cap", "bias", "what a model does itself"],
)
@pytest.mark.parametrize("at_a_time", [2048, 30])
def test_logits_of_some_tokens_are_the_models(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], dtype: torch.dtype, at_a_time: int
) -> None:
    monkeypatch.setattr(narrow, "TOKENS_AT_A_TIME", at_a_time)
    if "bias" in options:
        options = {"bias": options["bias"].to(dtype)}
    model = Model(dtype=dtype, **options)
    said = list[str]()
    monkeypatch.setattr(narrow.logger, "info", lambda text, *args: said.append(text % args))
    head, hidden, tokens = head_of(model), states(dtype=dtype), torch.arange(3, VOCAB_SIZE, 6)
    assert [head.most_tokens(hidden) for _ in range(2)] == [VOCAB_SIZE // narrow.PARTS] * 2
    assert said == ["searches with catalog_renormalize compute only a level's logits if it has at most 100 tokens"]
    expected = model.compute_logits(hidden)[:, tokens]
    found = head.logits_of(hidden, tokens)
    assert found.dtype == expected.dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_a_head_in_float32_of_a_model_in_half_precision_is_one_of_few_tokens_too() -> None:
    model = Model(dtype=torch.bfloat16)
    model.logits_processor.head_dtype = torch.float32
    hidden, tokens = states(dtype=torch.bfloat16), torch.tensor([0, 7, 499])
    head = head_of(model)
    assert head.most_tokens(hidden) > 0
    found = head.logits_of(hidden, tokens)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, model.compute_logits(hidden)[:, tokens], rtol=1e-5, atol=1e-4)


def other_column(logits: torch.Tensor) -> torch.Tensor:
    """The model bars a token, by its place."""
    return logits.index_fill(-1, torch.tensor([1]), -torch.inf)


def quantized() -> Model:
    model = Model()
    model.lm_head.quant_method = SimpleNamespace(apply=lambda layer, x, bias: x @ layer.weight.T)
    return model


def without_layer() -> nn.Module:
    model = nn.Module()
    model.compute_logits = lambda hidden: torch.zeros(len(hidden), VOCAB_SIZE)
    return model


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (quantized, {}, "its head is quantized, by SimpleNamespace"),
        (without_layer, {}, "the model has 0 layers that compute logits, not one"),
        (lambda: Model(after=other_column), {}, "logits of a few tokens differ when they are computed alone"),
        (lambda: Model(after=lambda logits: logits + torch.zeros(VOCAB_SIZE)), {}, "must match the size"),
        (
            lambda: Model(after=lambda logits: logits.new_zeros(len(logits), VOCAB_SIZE)),
            {},
            "even from a part of its head",
        ),
        (Model, {"lora": object()}, "adapters may change its head"),
        (Model, {"ranks": 2}, "tensor-parallel ranks have parts of its head"),
        (Model, {"counts_nans": True}, "VLLM_COMPUTE_NANS_IN_LOGITS counts NaNs in all logits"),
    ],
    ids=["quantized", "no layer", "a place", "a vector", "all anyway", "adapters", "ranks", "nans"],
)
def test_where_few_are_not_the_models_all_are_computed_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], options: dict[str, Any], reason: str
) -> None:
    said = list[str]()
    monkeypatch.setattr(narrow.logger, "info", lambda text, *args: said.append(text % args))
    model = make()
    head = head_of(model, **options)
    assert [head.most_tokens(states()) for _ in range(3)] == [0, 0, 0]
    (line,) = said
    assert line.startswith("searches with catalog_renormalize compute the logits of all tokens: ")
    assert reason in line
    assert model.compute_logits(states()).shape[-1] == VOCAB_SIZE, "it still has few rows of its head"


class Bytes(TorchDispatchMode):
    """Counts what operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.total += made.nbytes if isinstance(made, torch.Tensor) and not made._is_view() else 0
        return made


def test_the_logits_of_a_wide_search_take_megabytes() -> None:
    """Of 5,000 beams along 256 codes a level; all logits are gigabytes."""
    num_beams, num_codes, vocab_size, hidden_size = 5000, 256, 151_936, 1024
    model = Model((vocab_size, hidden_size), dtype=torch.bfloat16, device="meta")
    hidden = torch.empty(num_beams, hidden_size, dtype=torch.bfloat16, device="meta")
    cohort = SimpleNamespace(of_hidden_states=slice(None))
    plan: Any = SimpleNamespace(narrow=[cohort], whole=[])
    head = head_of(model)
    head._processor = model.logits_processor  # there is no content to compare
    with Bytes() as few:
        found = head.project(plan, [torch.empty(num_codes, dtype=torch.int64, device="meta")], hidden)
    with Bytes() as everything:
        model.compute_logits(hidden)
    assert isinstance(found, SelectionLogits)
    assert (found.narrow[0].values.shape, len(found.whole)) == ((num_beams, num_codes), 0)
    assert few.total <= 20_000_000 < 1_500_000_000 < everything.total
