"""The table of SamplingParams in docs/semantics.md is complete, and every row of it is true."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

from tests.support.engine import ROOT, TRAINED_TARGET, Engine, Engines
from vllm_trie import beam_params

_, SECTION = (ROOT / "docs/semantics.md").read_text().split("## Fields of `SamplingParams` in a beam request")
ROWS = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (\w+) \|", SECTION.partition("##")[0], re.MULTILINE)
NAMED = [(field, verdict) for names, verdict in ROWS for field in re.findall(r"`(\w+)`", names)]

EOS, COMMA = 1, 13
WIDTH = 4
PROMPT = """import os


class A(B):
    def open(self):
        self.x = 1

    def stop(self):
        self.x = 0

    def close(self):
    pass
"""
BASE: dict[str, Any] = {"n": WIDTH, "max_tokens": 20}
SPECIAL = {"ignore_eos": True, "allowed_token_ids": [EOS, COMMA], "skip_special_tokens": False}


def answer(output: Any) -> list[tuple[Any, ...]]:
    return [(o.text, tuple(o.token_ids)) for o in output.outputs]


def differs(without: Any, with_field: Any) -> bool:
    """By more than rounding."""
    scores = [[o.cumulative_logprob for o in output.outputs] for output in (without, with_field)]
    return answer(without) != answer(with_field) or scores[0] != pytest.approx(scores[1], abs=1e-3)


# field: its value, the other fields of both requests, and how the answers with and without it must differ
WORKS: dict[str, tuple[Any, dict[str, Any], Callable[[Any, Any], bool]]] = {
    "n": (2, {}, lambda a, b: answer(b) == answer(a)[:2]),
    "max_tokens": (3, {}, lambda a, b: max(len(o.token_ids) for o in b.outputs) == 3),
    "min_tokens": (
        9,
        {},
        lambda a, b: min(len(o.token_ids) for o in a.outputs) < 9 < min(len(o.token_ids) for o in b.outputs),
    ),
    "stop": (["("], {}, lambda a, b: "(" in {o.stop_reason for o in b.outputs}),
    "stop_token_ids": ([COMMA], {}, lambda a, b: COMMA in {o.stop_reason for o in b.outputs}),
    "ignore_eos": (True, {}, lambda a, b: {o.finish_reason for o in b.outputs} == {"length"} and differs(a, b)),
    "presence_penalty": (1.5, {}, differs),
    "frequency_penalty": (1.5, {}, differs),
    "repetition_penalty": (1.5, {}, differs),
    "logit_bias": ({COMMA: 9.0}, {}, differs),
    "allowed_token_ids": ([EOS, COMMA], {}, lambda a, b: {t for o in b.outputs for t in o.token_ids} == {EOS, COMMA}),
    "bad_words": (["self"], {}, lambda a, b: any("self" in o.text for o in a.outputs) and differs(a, b)),
    "temperature": (0.5, {}, differs),
    "min_p": (0.3, {}, differs),
    "top_k": (1, {}, lambda a, b: [bool(o.token_ids) for o in b.outputs] == [True, False, False, False]),
    "top_p": (0.3, {}, differs),
    "seed": (5, {"extra_args": {"sample_first": 3}, "ignore_eos": True, "temperature": 2.0}, differs),
    "logprobs": (1, {}, lambda a, b: a.outputs[0].logprobs is None and len(b.outputs[0].logprobs[0]) in (1, 2)),
    "flat_logprobs": (
        True,
        {"logprobs": 1},
        lambda a, b: {type(o.outputs[0].logprobs).__name__ for o in (a, b)} == {"list", "FlatLogprobs"},
    ),
    "detokenize": (False, {}, lambda a, b: {o.text for o in b.outputs} == {""} and differs(a, b)),
    "skip_special_tokens": (
        False,
        {"ignore_eos": True, "allowed_token_ids": [EOS, COMMA]},
        lambda a, b: not any("</s>" in o.text for o in a.outputs) and all("</s>" in o.text for o in b.outputs),
    ),
    "spaces_between_special_tokens": (False, SPECIAL, lambda a, b: any("</s></s>" in o.text for o in b.outputs)),
    "include_stop_str_in_output": (
        True,
        {"stop": ["("]},
        lambda a, b: not any("(" in o.text for o in a.outputs) and any(o.text.endswith("(") for o in b.outputs),
    ),
    "structured_outputs": (
        StructuredOutputsParams(regex="[a-z]{3}"),
        {},
        lambda a, b: all(re.fullmatch("[a-z]{3}", o.text) for o in b.outputs) and differs(a, b),
    ),
    "extra_args": ({"length_penalty": -1.0}, {}, differs),
    "skip_reading_prefix_cache": (True, {}, lambda a, b: a.num_cached_tokens > 0 == b.num_cached_tokens),
}
# Of fields of a stream, which `LLM.generate` has no use for: how long its parts are with them, in tokens.
IN_PARTS: dict[str, tuple[Any, dict[str, Any], list[int]]] = {
    "output_kind": (RequestOutputKind.DELTA, {}, [1] * 12),
    "stream_interval": (5, {"output_kind": RequestOutputKind.DELTA}, [1, 5, 5, 1]),
}
IGNORED: dict[str, Any] = {
    "watermarking": True,
    "skip_clone": True,
    "output_text_buffer_length": 7,
    "routed_experts_prompt_start": 2,
}
REFUSED: dict[str, Any] = {
    "prompt_logprobs": 1,
    "prompt_logprob_token_ids": [[1]],
    "prompt_logprob_start": 2,
    "logprob_token_ids": [1],
    "thinking_token_budget": 3,
    "repetition_detection": RepetitionDetectionParams(2, 1, 2),
    "trace_decode_token_ids": [1],
}


def params_of(**fields: Any) -> SamplingParams:
    options = fields.pop("extra_args", {})
    return SamplingParams(**{**BASE, **fields}, extra_args={"beam_width": WIDTH, **options})


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines(TRAINED_TARGET, enable_prefix_caching=True)


def run(engine: Engine, *params: SamplingParams) -> list[Any]:
    return engine.llm.generate([PROMPT] * len(params), list(params), use_tqdm=False)


def test_the_table_lists_every_field_once() -> None:
    public = [field.name for field in msgspec.structs.fields(SamplingParams) if not field.name.startswith("_")]
    assert sorted(field for field, _ in NAMED) == sorted(public)
    for verdict, cases in {"works": WORKS | IN_PARTS, "ignored": IGNORED, "refused": REFUSED}.items():
        assert {field for field, said in NAMED if said == verdict} == cases.keys(), verdict


@pytest.mark.parametrize("field", REFUSED)
def test_a_refused_field_is_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}(=.*)? is not supported together with beam_width"):
        beam_params(2, **{field: REFUSED[field]})


@pytest.mark.slow
def test_ignored_fields_change_no_answer(engine: Engine) -> None:
    plain, *others = run(engine, params_of(), *(params_of(**{field: value}) for field, value in IGNORED.items()))
    for field, other in zip(IGNORED, others, strict=True):
        assert [o.token_ids for o in other.outputs] == [o.token_ids for o in plain.outputs], field
        assert [o.text for o in other.outputs] == [o.text for o in plain.outputs], field


@pytest.mark.slow
@pytest.mark.parametrize("field", IN_PARTS)
def test_a_field_of_a_stream_shows_in_its_parts(engine: Engine, field: str) -> None:
    value, others, lengths = IN_PARTS[field]
    core = engine.llm.llm_engine
    (prompt,) = engine.llm._preprocess_cmpl([PROMPT])
    asked = {"n": 1, "max_tokens": 12, "ignore_eos": True, "extra_args": {"beam_width": 1}, **others}
    core.add_request("stream", prompt, params_of(**asked, **{field: value}))
    parts = []
    while core.has_unfinished_requests():
        parts += [len(output.outputs[0].token_ids) for output in core.step()]
    assert parts == lengths


@pytest.mark.slow
def test_every_working_field_shows_in_the_answer(engine: Engine) -> None:
    run(engine, params_of(max_tokens=1))  # fills the prefix cache
    pairs = []
    for field, (value, others, _) in WORKS.items():
        options = {**others.get("extra_args", {}), **(value if field == "extra_args" else {})}
        pairs.append(params_of(**others))
        pairs.append(params_of(**{**others, field: value, "extra_args": options}))
    outputs = run(engine, *pairs)
    results = zip(WORKS.items(), outputs[::2], outputs[1::2], strict=True)
    assert [field for (field, (_, _, shows)), *pair in results if not shows(*pair)] == []
