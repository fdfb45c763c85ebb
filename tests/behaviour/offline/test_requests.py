"""Bad requests are refused by `LLM.generate` before anything is scheduled, and the engine goes on."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams, RequestOutputKind

from benchmarks.server import CHAT_TEMPLATE
from tests.support.engine import TRAINED_TARGET, Engine, Engines
from vllm_trie import beam_params
from vllm_trie.entrypoints.requests.requests import process_request_inputs

pytestmark = pytest.mark.slow

PROMPT = "def main():"


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines(TRAINED_TARGET)


def extra(**extra_args: object) -> SamplingParams:
    return SamplingParams(max_tokens=4, extra_args=extra_args)


def extra_with(beam_width: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=4, extra_args={"beam_width": beam_width}, **fields)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (extra(beam_width=0), "beam_width=0 is not a whole number"),
        (extra(beam_width="8"), "beam_width='8' is not a whole number"),
        (extra(beam_width=10**6), "beam_width=1000000 exceeds max_num_seqs=64; lower it, or raise"),
        (extra(beam_width=2, sample_first=5), "sample_first=5 exceeds max_tokens=4; lower it"),
        (extra(beam_width=2, prune_absolute=float("inf")), "prune_absolute=inf is not a difference"),
        (extra(trie_beam_fork={"x": 1}), "trie_beam_fork is reserved for the front end; leave it out"),
        (extra(beam_widht=4), "did you mean beam_width"),
        (extra(num_beams=4), "unknown option num_beams=4; did you mean beam_width"),
        (extra(beam_width=2, best_of=4), "unknown option best_of=4; beam_width is the number of beams"),
        (extra(beam_width=2, stop="x"), "stop='x' has no effect in vllm_xargs .*; it is a field of the request"),
        (extra(beam_width=2, somebody_elses=1), "unknown option somebody_elses=1; "),
        (extra(beam_width=2, no_repeat_ngram_size=-1), "no_repeat_ngram_size=-1 is not a number of tokens"),
        (SamplingParams(n=3, extra_args={"beam_width": 2}), "n=3 exceeds beam_width=2"),
        (SamplingParams(seed=5, extra_args={"beam_width": 2}), "seed=5 has no effect in a search that does not sample"),
        (extra(beam_width=2, length_penalty=float("nan")), "length_penalty=nan is not a number above -6 and below 6"),
        (
            extra_with(beam_width=2, allowed_token_ids=[*range(1025)]),
            "1025 allowed_token_ids are more than the 1024 that Model Runner V2 supports; leave some out",
        ),
        (
            SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)),
            "1025 logit_bias are more than the 1024 that Model Runner V2 supports; leave some out",
        ),
        (
            SamplingParams(thinking_token_budget=3),
            "thinking_token_budget=3 is not supported .* on a CPU without Triton",
        ),
    ],
)
def test_bad_request_is_refused_and_the_next_one_served(engine: Engine, params: SamplingParams, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.llm.generate([PROMPT], params, use_tqdm=False)
    engine.check_nothing_is_left()
    (output,) = engine.llm.generate([PROMPT], beam_params(2, n=2, max_tokens=4), use_tqdm=False)
    assert len(output.outputs) == 2


@pytest.mark.parametrize("entry", ["generate", "chat"])
@pytest.mark.parametrize("is_list", [False, True])
def test_parameters_of_another_call_are_refused_by_its_name(engine: Engine, entry: str, is_list: bool) -> None:
    of_vllm = BeamSearchParams(beam_width=3, max_tokens=5)
    asked: Any = [[{"role": "user", "content": PROMPT}]] * 2 if entry == "chat" else [PROMPT] * 2
    options = {"chat_template": CHAT_TEMPLATE} if entry == "chat" else {}
    params = [beam_params(2, max_tokens=4), of_vllm] if is_list else of_vllm
    right = r"only for LLM.beam_search; call that, or pass vllm_trie.beam_params\(3, n=3, max_tokens=5\) here"
    with pytest.raises(ValueError, match=right):
        getattr(engine.llm, entry)(asked, params, use_tqdm=False, **options)
    engine.check_nothing_is_left()


@pytest.mark.parametrize(
    ("params", "right"),
    [
        (
            beam_params(3, max_tokens=5),
            r"not SamplingParams; call LLM.generate\(prompts, params\) with what beam_params",
        ),
        (SamplingParams(), "not SamplingParams; pass one BeamSearchParams"),
        ([BeamSearchParams(beam_width=3, max_tokens=5)], "not list; pass one BeamSearchParams"),
        (None, "not NoneType; pass one BeamSearchParams"),
        ({"beam_width": 3}, "not dict; pass one BeamSearchParams"),
    ],
)
def test_beam_search_names_the_call_that_takes_other_parameters(engine: Engine, params: Any, right: str) -> None:
    with pytest.raises(ValueError, match=right):
        engine.llm.beam_search([{"prompt": PROMPT}], params)
    engine.check_nothing_is_left()


def test_a_pause_answers_with_the_best_so_far_and_leaves_nothing(engine: Engine) -> None:
    llm, core = engine.llm.llm_engine, engine.core
    llm.add_request("search", {"prompt": PROMPT}, beam_params(3, n=2, max_tokens=60, ignore_eos=True))
    for _ in range(8):
        llm.step()
    core.pause_scheduler(mode="abort")
    core.resume_scheduler()
    found = [found for output in llm.step() for found in output.outputs]
    assert [one.finish_reason for one in found] == ["abort"] * 2
    assert all(one.text for one in found)
    assert not llm.has_unfinished_requests()
    engine.check_nothing_is_left()


def test_beam_results_need_all_hypotheses_in_one_output(engine: Engine) -> None:
    (output,) = engine.llm.generate([PROMPT], beam_params(2, n=2, beam_results=True, max_tokens=4), use_tqdm=False)
    results = output.kv_transfer_params["trie_beam"]["beam_results"]
    assert [one["output_ids"] for one in results] == [list(one.token_ids) for one in output.outputs]
    in_parts = beam_params(2, n=2, beam_results=True, max_tokens=4, output_kind=RequestOutputKind.CUMULATIVE)
    with pytest.raises(ValueError, match="beam_results=True with n=2 needs all hypotheses in one output; set"):
        engine.llm.llm_engine.add_request("parts", {"prompt": PROMPT}, in_parts)
    engine.check_nothing_is_left()


def test_a_bad_request_in_a_batch_stops_it_before_any_work(engine: Engine) -> None:
    with pytest.raises(ValueError, match="beam_width=-1"):
        engine.llm.generate([PROMPT] * 2, [beam_params(2, max_tokens=4), extra(beam_width=-1)], use_tqdm=False)
    engine.check_nothing_is_left()


def test_options_of_others_reach_the_engine_untouched(engine: Engine) -> None:
    (output,) = engine.llm.generate([PROMPT], extra(somebody_elses=1), use_tqdm=False)
    assert output.outputs[0].token_ids


def test_temperature_zero_is_taken_for_what_it_is(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, extra_args={"beam_width": 3})
    same = beam_params(3, max_tokens=8)
    a, b = engine.llm.generate([PROMPT] * 2, [params, same], use_tqdm=False)
    assert a.outputs[0].token_ids == b.outputs[0].token_ids


def test_the_callers_params_are_left_as_they_were(engine: Engine) -> None:
    params = beam_params(3, n=2, max_tokens=4)
    before = repr(params)
    engine.llm.generate([PROMPT] * 2, params, use_tqdm=False)
    assert repr(params) == before


def test_images_are_refused_where_a_model_attends_them_in_both_directions(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As such a prompt arrives from a multimodal model's processor."""
    stock = process_request_inputs.original

    def with_an_image(*args: Any, **kwargs: Any) -> Any:
        request = stock(*args, **kwargs)
        request.mm_features = [object()]
        return request

    processor = engine.llm.llm_engine.input_processor
    monkeypatch.setitem(vars(processor.vllm_config.model_config), "is_mm_prefix_lm", True)
    asked = {"type": "token", "prompt_token_ids": [5]}, beam_params(2), ("generate",)
    with pytest.raises(ValueError, match="a model whose images are attended in both directions; send only text"):
        process_request_inputs.function(with_an_image, processor, "0", *asked)
    engine.check_nothing_is_left()
