"""Logits processors of the engine's user act on every beam, by the beam's own history, as on any request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from tests.support.engine import Engine, Engines
from tests.support.loop import adjusted, loop_beams
from tests.support.pairs import NOISE
from tests.support.reference import agree, engine_answers
from tests.support.running import count_ties, prompt_of
from vllm_trie import beam_params
from vllm_trie.entrypoints.requests.requests import CALLER
from vllm_trie.messages import LLM_BEAM_SEARCH

pytestmark = pytest.mark.slow

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


class Spaced(LogitsProcessor):
    """`spaced`, for requests that name a token to favour, by the tokens that vLLM keeps."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self.states = req_states
        self.favoured: dict[int, int | None] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self.favoured[req_idx] = (sampling_params.extra_args or {}).get("favoured")
        return self.favoured[req_idx] is not None

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        slots = ctx.expanded_idx_mapping.tolist()
        for row, (slot, drafts) in enumerate(zip(slots, ctx.expanded_local_pos.tolist(), strict=True)):
            if self.favoured.get(slot) is not None:
                length, end = int(self.states.prompt_len.np[slot]), int(self.states.total_len.gpu[slot])
                tokens = self.states.all_token_ids.gpu[slot, :end].tolist()
                tokens += ctx.input_ids[row - drafts + 1 : row + 1].tolist()
                logits[row] = spaced(logits[row], tokens[:length], tokens[length:], self.favoured[slot])
        return logits


class Counting(LogitsProcessor):
    """Bars the tokens that a request has been fed an odd number of times, by counts of its own."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self.counts = torch.zeros(req_states.max_num_reqs, req_states.vocab_size, dtype=torch.int64)
        self.asked = torch.zeros(req_states.max_num_reqs, dtype=torch.bool)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self.counts[req_idx] = 0
        self.asked[req_idx] = bool((sampling_params.extra_args or {}).get("counting"))
        return bool(self.asked[req_idx])

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        slots = ctx.expanded_idx_mapping
        self.counts[slots, ctx.input_ids.long()] += 1
        counts = self.counts[slots]
        return logits.masked_fill_(self.asked[slots][:, None] & (counts % 2 == 1), NEVER)

    def reorder_rows(self, slots: torch.Tensor, sources: torch.Tensor) -> None:
        self.counts[slots] = self.counts[sources]


class Cut(LogitsProcessor):
    """`cut`, for requests that name a width."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self.widths = torch.full((req_states.max_num_reqs,), float("inf"))

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        width = (sampling_params.extra_args or {}).get("cut")
        self.widths[req_idx] = float("inf") if width is None else width
        return width is not None

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        least = logits.amax(-1, keepdim=True) - self.widths[ctx.expanded_idx_mapping][:, None]
        return logits.masked_fill_(logits < least, NEVER)


@pytest.fixture
def model(random_model: Callable[[str], Path]) -> Path:
    return random_model("gqa")


@pytest.fixture
def engine(engines: Engines, model: Path) -> Engine:
    return engines(model, logits_processors=[Spaced, Counting, Cut])


REQUESTS: list[dict[str, Any]] = [
    {},
    {"favoured": 20},
    {"favoured": 77, "frequency_penalty": 0.4},
    {"cut": 1.5},
    {"cut": 1.0, "temperature": 2.0},
    {"favoured": 140, "cut": 2.0, "temperature": 0.5},
    {"counting": 1},
    {"counting": 1, "favoured": 20},
]


def params_of(request: dict[str, Any]) -> SamplingParams:
    fields = dict(request)
    extra_args = {name: fields.pop(name) for name in ("favoured", "counting", "cut") if name in fields}
    return beam_params(WIDTH, n=WIDTH, max_tokens=20, stop_token_ids=[EOS], extra_args=extra_args, **fields)


def adjustment(request: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """The processors in vLLM's order: penalties, those of `engine`, temperature."""
    fields = {name: value for name, value in request.items() if name != "temperature"}

    def adjust(logits: torch.Tensor, prompt: list[int], generated: list[int]) -> torch.Tensor:
        logits = adjusted(logits, prompt, generated, **fields)
        if "favoured" in request:
            logits = spaced(logits, prompt, generated, request["favoured"])
        if "counting" in request:  # when beams begin, they are requests of their own, and are fed what is generated
            counts = Counter(generated or prompt[-1:])
            logits[[token for token, count in counts.items() if count % 2 == 1]] = NEVER
        if "cut" in request:
            logits = cut(logits, request["cut"])
        return logits / request.get("temperature", 1.0)

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
        for output in engine.generate(prompts, params_of({"counting": 1})):
            answers.append([o.token_ids for o in output.outputs])
        monkeypatch.setattr("vllm_trie.worker.rows.rows.Rows._reorder_controls", lambda *_: None)
    assert right != wrong


def test_vllms_own_beam_search_ignores_processors_as_it_does_in_vllm(engine: Engine) -> None:
    def found(**extra_args: Any) -> list[list[int]]:
        params = beam_params(2, n=2, max_tokens=8, semantics="vllm", ignore_eos=True, extra_args=extra_args)
        (output,) = engine.generate([prompt_of(25)], params)
        return [list(o.token_ids) for o in output.outputs]

    plain = found()
    assert found(favoured=20) != plain
    assert found(favoured=20, **{CALLER: LLM_BEAM_SEARCH}) == plain


def test_processors_act_on_each_node_of_a_forest(
    engines: Engines, random_pair: Callable[[str, float], tuple[Path, Path]]
) -> None:
    model, draft = random_pair("gqa", NOISE)
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    engine = engines(model, logits_processors=[Spaced, Cut], speculative_config=config)
    requests = [{"favoured": 20}, {"favoured": 77, "frequency_penalty": 0.4}, {"cut": 1.5}]
    prompts = [prompt_of(25, seed) for seed in range(len(requests))]
    found = {}
    for speculation in ("exact", "off"):
        params = [params_of(request) for request in requests]
        for one in params:
            one.extra_args["speculation"] = speculation
        found[speculation] = engine.generate(prompts, params)
    assert count_ties(found["exact"], found["off"]) == 0
    assert max(output.kv_transfer_params["trie_beam"]["steps_per_forward"] for output in found["exact"]) > 1
