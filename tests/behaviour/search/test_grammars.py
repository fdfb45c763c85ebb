"""Beams under a grammar: those of transformers and of a plain loop, each of which matches or was cut by length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import vllm
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.support.cases import COMMA, PENALTIES, Case, grid_of, num_changed, prompted, run
from tests.support.engine import TRAINED_TARGET, Engine, Engines
from tests.support.grammars import EOS, GRAMMARS, MATCHES, may_come, structured
from tests.support.pairs import TRAINED, drafting
from tests.support.reference import agree, engine_answers, transformers_beams
from tests.support.running import answers, trained_prompts
from tests.support.sweep import sweep
from vllm_trie import beam_params
from vllm_trie.compat.sources import minor_vllm_version
from vllm_trie.engine import grammar

pytestmark = pytest.mark.slow


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines(TRAINED_TARGET)


@pytest.mark.parametrize("name", sweep([*GRAMMARS], "regex", "grammar", "choice"))
def test_beams_are_those_of_transformers_with_the_same_masks(engine: Engine, name: str) -> None:
    prompts, max_tokens, compared = trained_prompts([9, 40, 31]), 16, 0
    for width in (3, 8):
        for early_stopping in (False, True):
            params = beam_params(
                width,
                n=width,
                early_stopping=early_stopping,
                max_tokens=max_tokens,
                structured_outputs=structured(name),
            )
            for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
                theirs = transformers_beams(
                    TRAINED_TARGET,
                    prompt,
                    width,
                    width,
                    max_tokens,
                    early_stopping=early_stopping,
                    prefix_allowed_tokens_fn=lambda _, ids: may_come(name, tuple(ids[len(prompt) :].tolist())) or [EOS],  # noqa: B023
                    renormalize_logits=True,
                )
                real = [o for o in output.outputs if o.stop_reason != "no further hypothesis"]
                output.outputs = real
                agree(engine_answers(output, 1.0), theirs[: len(real)])
                assert all(answer.score < -100 for answer in theirs[len(real) :])
                compared += len(real)
    assert compared > 40


def test_every_hypothesis_matches_or_was_cut_by_length(engine: Engine) -> None:
    num_matches = num_cut = 0
    lengths = {"schema": 40, "structural tag": 60, "object": 30}
    jobs = [
        (
            name,
            prompt,
            beam_params(8, n=8, structured_outputs=structured(name), max_tokens=lengths.get(name, 12), **more),
        )
        for name in GRAMMARS
        for longest in [lengths.get(name, 12)]
        for more in ({}, {"semantics": "vllm"}, {"semantics": "tridecode"}, {"do_sample": True, "seed": 3})
        for prompt in trained_prompts([5, 30])
    ]
    names, prompts, params = zip(*jobs, strict=True)
    for name, output in zip(names, engine.generate([*prompts], [*params]), strict=True):
        for hypothesis in output.outputs:
            if hypothesis.finish_reason == "length":
                num_cut += 1
            elif hypothesis.stop_reason != "no further hypothesis":
                assert MATCHES[name](hypothesis.text), (name, hypothesis)
                num_matches += 1
    assert num_matches > 150
    assert num_cut > 25


@pytest.mark.nightly
def test_controls_stops_and_lengths_act_with_a_grammar_as_in_a_plain_loop(engine: Engine) -> None:
    semantics, stops = ["hf", "tridecode"], [(), (COMMA,)]
    controls = ["none", *list(PENALTIES)[-2:], "bias", "hot", "all filters"]
    grid = {"grammar": [*GRAMMARS], "semantics": semantics, "stop_token_ids": stops, "controls": controls}
    grid |= {"pruning": ["none", "absolute"], "stop": [(), ("e", "re")], "ignore_eos": [False], "min_tokens": [0, 4]}
    cases = prompted([c for c in grid_of(0, **grid) if not (c.semantics == "tridecode" and c.early_stopping)])
    assert num_changed(cases, grammar="") > 0.9 * len(cases)
    run(engine, cases)


def test_where_a_grammar_leaves_nothing_a_beam_ends(engine: Engine) -> None:
    some = Case(4, grammar="choice", ignore_eos=False, min_tokens=9, max_tokens=12)
    run(engine, prompted([some, replace(some, min_tokens=3), replace(some, beam_width=1)]))


def test_guidance_works_too_and_others_are_refused(engines: Engines) -> None:
    engine = engines(TRAINED_TARGET, structured_outputs_config={"backend": "guidance"})
    prompts = trained_prompts([12, 33])
    for name in ("choice", "regex", "schema"):
        (one, other) = (structured(name) for _ in range(2))
        greedy = SamplingParams(temperature=0, max_tokens=30, structured_outputs=one)
        (first,) = engine.generate(prompts[:1], greedy)
        alone = beam_params(1, max_tokens=30, structured_outputs=other)
        searches = [alone, beam_params(6, n=6, max_tokens=30, structured_outputs=other)]
        same, found = engine.generate(prompts[:1] * 2, searches)
        assert same.outputs[0].text == first.outputs[0].text
        assert len({tuple(o.token_ids) for o in found.outputs}) == 6
        stopped = [o.text for o in found.outputs if o.finish_reason == "stop"]
        assert stopped, name
        assert all(map(MATCHES[name], stopped))
    engine = engines(TRAINED_TARGET, structured_outputs_config={"backend": "lm-format-enforcer"})
    with pytest.raises(ValueError, match=r'of the backend "lm-format-enforcer" cannot follow beams'):
        engine.generate(prompts, beam_params(2, structured_outputs=structured("regex")))


def test_rows_that_share_a_matcher_are_found_out(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    params = beam_params(4, n=4, max_tokens=12, structured_outputs=structured("regex"))
    monkeypatch.setattr(grammar, "_fork_group_grammar", lambda matcher: matcher)
    (output,) = engine.generate(trained_prompts([20]), params)
    assert {o.finish_reason for o in output.outputs} == {"error"}
    assert all("the grammar of structured_outputs refuses token" in o.stop_reason for o in output.outputs)


def test_a_grammar_that_does_not_compile_ends_its_group_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    beam = beam_params(3, n=3, max_tokens=6, structured_outputs=structured("regex"))
    engine.generate(trained_prompts([9]), beam)  # now there is a backend
    backend = engine.scheduler.structured_output_manager.backend
    compile_grammar = type(backend).compile_grammar

    def fails(self: Any, kind: Any, spec: str, **kwargs: Any) -> Any:
        if "q" in spec:
            raise RuntimeError("no q")
        return compile_grammar(self, kind, spec, **kwargs)

    monkeypatch.setattr(type(backend), "compile_grammar", fails)
    bad = beam_params(3, n=3, max_tokens=6, structured_outputs=StructuredOutputsParams(regex="q+"))
    alone = engine.generate(trained_prompts([9]), bad)
    together = engine.generate(trained_prompts([9, 9, 9]), [bad, beam, SamplingParams(max_tokens=4, temperature=0)])
    for output in (*alone, together[0]):
        assert [o.finish_reason for o in output.outputs] == ["error"] * 3
        assert "structured_outputs cannot be compiled: no q" in output.outputs[0].stop_reason
    assert {o.finish_reason for output in together[1:] for o in output.outputs} <= {"stop", "length"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"ignore_eos": True},
            "ignore_eos=True is not supported together with structured_outputs .*, which .*; leave it out",
        ),
        ({"memory_mode": True}, "memory_mode=True is not supported together with structured_outputs"),
    ],
)
def test_what_cannot_be_combined_is_refused(engines: Engines, more: dict[str, Any], message: str) -> None:
    engine = engines(TRAINED_TARGET, **drafting(TRAINED[1], 3))
    with pytest.raises(ValueError, match=message):
        engine.generate(trained_prompts([9]), beam_params(3, structured_outputs=structured("regex"), **more))


def test_an_engine_that_speculates_passes_over_groups_with_a_grammar(engines: Engines) -> None:
    """With drafting neighbours, groups and ordinary requests, each with and without a grammar."""
    prompts = trained_prompts([9, 20, 33, 41, 12])
    asked = [
        beam_params(4, n=4, max_tokens=14, structured_outputs=structured("regex")),
        beam_params(3, n=3, max_tokens=14),
        beam_params(2, n=2, max_tokens=14, structured_outputs=structured("object"), semantics="vllm"),
        SamplingParams(temperature=0, max_tokens=14, structured_outputs=structured("schema")),
        SamplingParams(temperature=0, max_tokens=14),
    ]
    plain = engines(TRAINED_TARGET).generate(prompts, asked)
    outputs = engines(TRAINED_TARGET, **drafting(TRAINED[1], 3)).generate(prompts, asked)
    assert [[t for t, _ in output] for output in answers(outputs)] == [[t for t, _ in o] for o in answers(plain)]
    assert [output.kv_transfer_params is not None for output in outputs[:3]] == [False, True, False]


def test_reasoning_must_be_over_in_the_prompt(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.reasoning import ReasoningParserManager

    class Parser:
        def __init__(self, tokenizer: Any) -> None: ...

        def is_reasoning_end(self, prompt: list[int]) -> bool:
            return prompt[0] == 7

    engine = engines(TRAINED_TARGET)
    config = engine.llm.llm_engine.vllm_config.structured_outputs_config
    monkeypatch.setattr(ReasoningParserManager, "get_reasoning_parser", lambda name: Parser)
    monkeypatch.setattr(config, "reasoning_parser", "some")
    params = beam_params(2, n=2, max_tokens=4, structured_outputs=structured("choice"))
    with pytest.raises(ValueError, match=r'cannot begin after reasoning \(reasoning_parser="some"\) in a beam search'):
        engine.generate([[5, 7]], params)
    assert engine.generate([[7, 5]], params)


def test_one_beam_is_the_ordinary_request_at_temperature_zero(engine: Engine) -> None:
    (prompt,) = trained_prompts([25])
    ordinary = [SamplingParams(temperature=0, max_tokens=10, structured_outputs=structured(name)) for name in GRAMMARS]
    beams = [beam_params(1, max_tokens=10, structured_outputs=structured(name)) for name in GRAMMARS]
    outputs = engine.generate([prompt] * 2 * len(GRAMMARS), [*ordinary, *beams])
    found = [output.outputs[0].text for output in outputs]
    assert found[: len(GRAMMARS)] == found[len(GRAMMARS) :]


@pytest.mark.skipif(
    minor_vllm_version(vllm.__version__) != "0.32", reason="from vLLM 0.33 on vLLM refuses such a request itself"
)
def test_an_engine_bound_to_another_backend_ends_the_search_alone(engines: Engines) -> None:
    engine = engines(TRAINED_TARGET, max_num_seqs=9)
    pattern = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "patternProperties": {"^x": {"type": "null"}},
    }
    ordinary = SamplingParams(structured_outputs=StructuredOutputsParams(json=pattern), max_tokens=4)
    engine.generate([[5] * 9], ordinary)
    assert ordinary.structured_outputs is not None
    assert ordinary.structured_outputs._backend == "outlines"
    params = beam_params(3, structured_outputs=StructuredOutputsParams(regex="[a-z]+"), max_tokens=4)
    (failed,) = engine.generate([[5] * 9], params)
    assert failed.outputs[0].finish_reason == "error"
    assert "an earlier request has bound the engine to a backend" in failed.outputs[0].stop_reason
    (found,) = engine.generate([[5] * 9], beam_params(3, max_tokens=4))
    assert len(found.outputs[0].token_ids) == 4
    engines.close()  # nobody else is to meet this backend
