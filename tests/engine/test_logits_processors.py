"""Logits processors of the engine's user act on every beam, by the beam's own history, as on any request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from tests.conftest import Engine, Engines
from tests.engine.test_limits import prompt_of
from tests.loop import adjusted, loop_beams
from tests.reference import agree, engine_answers
from vllm_trie import beam_params

EOS, WIDTH = 1, 5
NEVER = float("-inf")


def spaced(logits: torch.Tensor, prompt: list[int], generated: list[int], favoured: int) -> torch.Tensor:
    """Never the token two places back; a token to favour, the more the longer the text."""
    logits = logits.clone()
    if len(generated) > 1:
        logits[generated[-2]] = NEVER
    logits[(favoured + prompt[0]) % len(logits)] += 0.5 * len(generated)
    return logits


def cut(logits: torch.Tensor, width: float) -> torch.Tensor:
    """Only what lies within `width` of the best."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) - width, NEVER)


class Spaced(AdapterLogitsProcessor):
    """`spaced`, for requests that name a token to favour."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        favoured = (params.extra_args or {}).get("favoured")
        if favoured is None:
            return None
        return lambda prompt, generated, logits: spaced(logits, prompt, generated, favoured)


class Cut(LogitsProcessor):
    """`cut`, for requests that name a width."""

    def __init__(self, *_: Any) -> None:
        self.widths: dict[int, float] = {}

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.widths, batch_update, lambda params, *_: (params.extra_args or {}).get("cut"))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, width in self.widths.items():
            logits[row] = cut(logits[row], width)
        return logits


@pytest.fixture
def model(random_model: Callable[[str], Path]) -> Path:
    return random_model("gqa")


@pytest.fixture
def engine(engines: Engines, model: Path) -> Engine:
    return engines(model, logits_processors=[Spaced, Cut])


REQUESTS: list[dict[str, Any]] = [
    {},
    {"favoured": 20},
    {"favoured": 77, "frequency_penalty": 0.4},
    {"cut": 1.5},
    {"cut": 1.0, "temperature": 2.0},
    {"favoured": 140, "cut": 2.0, "temperature": 0.5},
]


def params_of(request: dict[str, Any]) -> SamplingParams:
    fields = dict(request)
    extra_args = {name: fields.pop(name) for name in ("favoured", "cut") if name in fields}
    return beam_params(WIDTH, n=WIDTH, max_tokens=20, stop_token_ids=[EOS], extra_args=extra_args, **fields)


def adjustment(request: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """The processors in vLLM's order: `Spaced`, penalties, temperature, `Cut`."""

    def adjust(logits: torch.Tensor, prompt: list[int], generated: list[int]) -> torch.Tensor:
        if "favoured" in request:
            logits = spaced(logits, prompt, generated, request["favoured"])
        logits = adjusted(logits, prompt, generated, **request)
        return cut(logits, request["cut"]) if "cut" in request else logits

    return adjust


def test_processors_see_the_history_of_each_beam(engine: Engine, model: Path) -> None:
    prompts = [prompt_of(25, seed) for seed in range(len(REQUESTS))]
    ordinary = SamplingParams(temperature=0, max_tokens=20, extra_args={"favoured": 9})
    alone = engine.generate(prompts, ordinary)
    together = [params for request in REQUESTS for params in (params_of(request), ordinary)]
    outputs = engine.generate([prompt for prompt in prompts for _ in range(2)], together)
    assert [o.outputs[0].token_ids for o in outputs[1::2]] == [o.outputs[0].token_ids for o in alone]
    plain = [loop_beams(model, prompt, WIDTH, WIDTH, 20, stop_token_ids=[EOS]) for prompt in prompts]
    for request, prompt, output, unchanged in zip(REQUESTS, prompts, outputs[::2], plain, strict=True):
        adjust = adjustment(request)
        theirs = loop_beams(model, prompt, WIDTH, WIDTH, 20, stop_token_ids=[EOS], adjust=adjust)
        assert (theirs == unchanged) == (not request), "a processor must make a difference"
        agree([a for a, o in zip(engine_answers(output, 1.0), output.outputs, strict=True) if o.token_ids], [*theirs])


def test_beams_without_their_own_history_go_wrong(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt_of(25, seed) for seed in range(4)]
    right, wrong = [], []
    for answers in (right, wrong):
        for output in engine.generate(prompts, params_of({"favoured": 20})):
            answers.append([o.token_ids for o in output.outputs])
        monkeypatch.setattr("vllm_trie.worker.rows.BeamRows.copy_output_tokens", lambda *_: None)
    assert right != wrong


def test_vllms_own_beam_search_ignores_processors_as_it_does_in_vllm(engine: Engine) -> None:
    def found(**extra_args: Any) -> list[list[int]]:
        params = beam_params(2, n=2, max_tokens=8, semantics="vllm", ignore_eos=True, extra_args=extra_args)
        (output,) = engine.generate([prompt_of(25)], params)
        return [list(o.token_ids) for o in output.outputs]

    plain = found()
    assert found(favoured=20) != plain
    assert found(favoured=20, trie_beam_from_llm=True) == plain
