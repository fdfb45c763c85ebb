"""No field of a request, at its bound or beyond, lets one request hold an engine: it is refused, or costs as others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from tests.behaviour.search.test_sampling_params_table import IN_PARTS, WORKS
from tests.support.calls import num_calls
from tests.support.engine import TRAINED_TARGET, Engine, Engines
from tests.support.field_bounds import LARGE, MAX_TOKENS, OF_FIELDS, OF_OPTIONS, WIDTH
from vllm_trie.options import OPTIONS
from vllm_trie.options.shown import MOST_QUOTED

LONGEST = 32  # tokens, of plain searches; a longer one here ends by its stop tokens
MOST_TIMES = 5  # as much work as a plain search
DRAWS_REQUESTS = {"unit"}  # ordinary requests, as many as are asked for, which are as much work each
PROMPT = [20, 25, 30]
_PLAIN: dict[tuple[Any, ...], tuple[int, int]] = {}  # what plain searches took


def test_every_field_has_its_bounds_here() -> None:
    assert OF_OPTIONS.keys() == OPTIONS.keys()
    assert OF_FIELDS.keys() == WORKS.keys() | IN_PARTS.keys()


def params_of(case: dict[str, Any]) -> SamplingParams:
    """As a server makes them, which checks nothing of ours."""
    fields = {name: value for name, value in case.items() if name in SamplingParams.__struct_fields__}
    others = {name: value for name, value in case.items() if name not in fields}
    extra_args = others if {"beam_width", "beam_widths"} & others.keys() else {"beam_width": WIDTH, **others}
    defaults = {"n": min(2, case.get("n", 2)), "max_tokens": MAX_TOKENS, "ignore_eos": True}
    return SamplingParams(
        **{**defaults, "output_kind": RequestOutputKind.FINAL_ONLY, **fields}, extra_args=extra_args, skip_clone=True
    )


class Asked:
    """What became of requests to an engine, and what work each was."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def work(self, params: SamplingParams) -> tuple[int, int]:
        """Steps of the engine, and calls of functions in them: what a request is read by takes no turn of others."""
        core, num_steps = self._engine.llm.llm_engine, 0
        core.add_request("asked", {"prompt_token_ids": PROMPT}, params)
        for request in self._engine.scheduler.requests.values():
            while request.structured_output_request and not request.structured_output_request.is_grammar_ready:
                time.sleep(0.01)  # a thread compiles it meanwhile, and the engine takes as many idle steps as it can

        def search() -> None:
            nonlocal num_steps
            while core.has_unfinished_requests():
                core.step()
                num_steps += 1

        calls = num_calls(search)
        return num_steps, calls

    def plain(self, params: SamplingParams) -> tuple[int, int]:
        """Of a plain search as wide, as long, and with as many hypotheses."""
        options = params.extra_args or {}
        width = options.get("beam_width") or max(options["beam_widths"])
        max_tokens = params.max_tokens if (params.max_tokens or LARGE) < LONGEST else MAX_TOKENS
        key = width, params.n, max_tokens
        if key not in _PLAIN:
            _PLAIN[key] = self.work(params_of({"beam_width": width, "n": params.n, "max_tokens": max_tokens}))
        return _PLAIN[key]


@pytest.fixture
def asked(engines: Engines) -> Iterator[Asked]:
    engine = engines(TRAINED_TARGET, enable_prefix_caching=True)
    asked = Asked(engine)
    if not _PLAIN:
        asked.work(params_of({}))  # with what comes once
    yield asked
    engine.check_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("field", [*OF_OPTIONS, *OF_FIELDS])
def test_a_field_at_its_bound_is_refused_in_a_sentence_or_costs_little(asked: Asked, field: str) -> None:
    refusals = []
    for case in {**OF_OPTIONS, **OF_FIELDS}[field]():
        try:
            params = params_of(case)
        except (VLLMValidationError, TypeError, ValueError):
            continue  # vLLM's own refusal, of ordinary requests, too
        try:
            work = asked.work(params)
        except (VLLMValidationError, ValueError) as error:
            refusals.append(str(error))
            continue
        plain = asked.plain(params)
        if work[1] > MOST_TIMES * plain[1]:
            work = asked.work(params)  # without what comes once in a process, as vLLM's imports for grammars
        if not DRAWS_REQUESTS & case.keys():
            assert work[0] <= MOST_TIMES * plain[0], (field, work, plain)
            assert work[1] <= MOST_TIMES * plain[1], (field, work, plain)
    assert [why for why in refusals if not 0 < len(why) <= MOST_QUOTED or "\n" in why] == []
    steps, _ = asked.work(params_of({}))  # the engine serves on
    assert steps <= MAX_TOKENS + 2
