"""`LLM.beam_search` in the engine returns what vLLM's own client loop returns."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams
from vllm.v1.structured_output.utils import choice_as_grammar

from tests.support import forks
from tests.support.engine import ROOT, TRAINED_TARGET, Engine, Engines
from tests.support.grammars import CHOICES, GRAMMARS, structured
from tests.support.reference import NEAR_TIE, SCORE_TOLERANCE
from tests.support.sweep import sweep
from vllm_trie.compat.versions import own_vllm_beams
from vllm_trie.entrypoints import llm as beam_search

pytestmark = pytest.mark.slow

SEVERAL_EOS = [1, *range(5, 300, 7)]  # the tokenizer's, and so many more that all of a beam's best may be of them

OPTIONS = {"max_logprobs": 64}  # vLLM's own loop asks for 2b of them
TEXTS = ["def is_prime(number):", "class Foo:\n    def close(self):", "import os\n", "    return"]


@pytest.fixture(params=sweep(["trained", "gqa", "mha"], "gqa"))
def engine(request: pytest.FixtureRequest, engines: Engines, random_model: Callable[[str], Path]) -> Engine:
    return engines(
        TRAINED_TARGET if request.param == "trained" else with_tokenizer(random_model(request.param)), **OPTIONS
    )


@pytest.fixture
def trained(engines: Engines) -> Engine:
    return engines(TRAINED_TARGET, **OPTIONS)


def with_tokenizer(model: Path) -> Path:
    """A copy of a random model with a word for every token, as `LLM.beam_search` needs a tokenizer."""
    folder = model.with_name(f"{model.name}-words")
    if not folder.exists():
        folder.mkdir()
        for file in model.iterdir():
            (folder / file.name).symlink_to(file)
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(300)}, unk_token="w2"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1").save_pretrained(folder)
    return folder


def with_several_eos(model: Path) -> Path:
    """A copy of a model with a generation_config.json that names further EOS tokens."""
    folder = model.with_name(f"{model.name}-several-eos")
    if not folder.exists():
        folder.mkdir()
        for file in model.iterdir():
            if file.name != "generation_config.json":
                (folder / file.name).symlink_to(file)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": SEVERAL_EOS}))
    return folder


def prompts_for(engine: Engine) -> list[Any]:
    if engine.llm.get_tokenizer().vocab_size > 300:
        return [{"prompt": text} for text in TEXTS]
    return [{"prompt_token_ids": [2 + (i * 37 + k * 11) % 290 for i in range(5 + 9 * k)]} for k in range(4)]


def original(engine: Engine, prompts: list[Any], params: BeamSearchParams) -> list[Any]:
    return beam_search.llm_beam_search.original(engine.llm, prompts, params)


def score(sequence: Any, params: BeamSearchParams, eos_token_id: int) -> float:
    length = len(sequence.tokens) - (sequence.tokens[-1] == eos_token_id)
    if not own_vllm_beams().counts_prompt:
        length = len(sequence.logprobs)
    return sequence.cum_logprob / length**params.length_penalty


@pytest.mark.parametrize(
    "width", [1, pytest.param(2, marks=pytest.mark.nightly), 4, pytest.param(8, marks=pytest.mark.nightly)]
)
def test_tokens_scores_and_order_are_those_of_vllms_own_loop(engine: Engine, width: int) -> None:
    prompts, eos_token_id = prompts_for(engine), engine.llm.get_tokenizer().eos_token_id
    num_compared = num_tied = num_stopped = 0
    for length_penalty, ignore_eos in product([0.0, 1.0, 2.0, -1.0], [False, True]):
        params = BeamSearchParams(width, max_tokens=16, length_penalty=length_penalty, ignore_eos=ignore_eos)
        ours, theirs = engine.llm.beam_search(prompts, params), original(engine, prompts, params)
        for our, their in zip(ours, theirs, strict=True):
            assert len(our.sequences) == len(their.sequences) == width
            for x, y in zip(our.sequences, their.sequences, strict=True):
                num_compared += 1
                num_stopped += y.tokens[-1] == eos_token_id and not ignore_eos
                a, b = (score(sequence, params, eos_token_id) for sequence in (x, y))
                assert abs(a - b) < SCORE_TOLERANCE * max(1.0, abs(b))
                if x.tokens != y.tokens:
                    assert abs(a - b) < NEAR_TIE * max(1.0, abs(b))
                    num_tied += 1
    assert num_tied <= (0 if engine.llm.get_tokenizer().vocab_size > 300 else 0.02 * num_compared)
    assert num_stopped > 0


def test_no_tokens_are_one_empty_hypothesis_and_great_penalties_are_taken(trained: Engine) -> None:
    prompts = prompts_for(trained)
    nothing = BeamSearchParams(3, max_tokens=0)
    ours, theirs = trained.llm.beam_search(prompts, nothing), original(trained, prompts, nothing)
    for our, their in zip(ours, theirs, strict=True):
        (empty,), (expected,) = our.sequences, their.sequences
        assert replace(empty, orig_prompt=None) == replace(expected, orig_prompt=None)
    for length_penalty in (9.0, -39.0):
        params = BeamSearchParams(4, max_tokens=12, length_penalty=length_penalty)
        ours, theirs = trained.llm.beam_search(prompts, params), original(trained, prompts, params)
        for our, their in zip(ours, theirs, strict=True):
            assert [x.tokens for x in our.sequences] == [x.tokens for x in their.sequences]


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_eos_tokens_of_generation_config_act_as_in_vllms_own_loop(
    width: int, ignore_eos: bool, engines: Engines, random_model: Callable[[str], Path]
) -> None:
    engine = engines(with_several_eos(with_tokenizer(random_model("gqa"))), **OPTIONS)
    prompts = [{"prompt_token_ids": [2 + (i * 37 + k * 11) % 290 for i in range(5 + k)]} for k in range(8)]
    params = BeamSearchParams(width, max_tokens=12, length_penalty=0.5, ignore_eos=ignore_eos)
    ours, theirs = engine.llm.beam_search(prompts, params), original(engine, prompts, params)
    assert [[s.tokens for s in one.sequences] for one in ours] == [[s.tokens for s in one.sequences] for one in theirs]
    stopped = {s.tokens[-1] for one in theirs for s in one.sequences if len(s.logprobs) < params.max_tokens}
    assert bool(stopped - {1}) == (own_vllm_beams().stops_by_generation_config and not ignore_eos)


@pytest.mark.skipif(not own_vllm_beams().has_allowlist, reason="this vLLM's beams ignore allowed_token_ids")
def test_an_allowlist_is_left_to_vllms_own_loop(trained: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[Any] = []
    monkeypatch.setattr(beam_search.logger, "info_once", lambda *args: notes.append(args))
    params = BeamSearchParams(2, max_tokens=4, allowed_token_ids=[5, 6, 7])
    (output,) = trained.llm.beam_search([{"prompt": "x"}], params)
    assert all({*sequence.tokens[-4:]} <= {5, 6, 7} for sequence in output.sequences)
    assert notes[0][1] == "with allowed_token_ids"


def test_priorities_are_those_that_vllms_own_loop_takes(trained: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    add_request = trained.scheduler.add_request
    monkeypatch.setattr(trained.scheduler, "add_request", lambda r: [seen.append(r.priority), add_request(r)])
    prompts, params = [{"prompt": text} for text in TEXTS[:2]], BeamSearchParams(1, max_tokens=2)
    if "priority" in inspect.signature(beam_search.llm_beam_search.original).parameters:
        trained.llm.beam_search(prompts, params, priority=[7, 3])
        assert sorted(seen) == [3, 7]
    else:
        with pytest.raises(TypeError, match="priority"):
            trained.llm.beam_search(prompts, params, priority=[7, 3])
        assert not seen


def test_every_field_is_that_of_vllms_own_loop(trained: Engine) -> None:
    prompts = [{"prompt": text} for text in TEXTS]
    for skip_special_tokens in (True, False):
        params = BeamSearchParams(4, max_tokens=20, length_penalty=0.0, skip_special_tokens=skip_special_tokens)
        ours, theirs = trained.llm.beam_search(prompts, params), original(trained, prompts, params)
        for our, their in zip(ours, theirs, strict=True):
            assert type(our) is type(their)
            for x, y in zip(our.sequences, their.sequences, strict=True):
                assert type(x) is type(y)
                assert (x.text, x.tokens, x.finish_reason, x.stop_reason) == (y.text, y.tokens, None, None)
                assert (x.orig_prompt["prompt_token_ids"], x.lora_request) == (y.orig_prompt["prompt_token_ids"], None)
                assert [step.keys() for step in x.logprobs] == [step.keys() for step in y.logprobs]
                for step, expected in zip(x.logprobs, y.logprobs, strict=True):
                    for token, logprob in expected.items():
                        assert math.isclose(step[token].logprob, logprob.logprob, abs_tol=1e-4)
                        assert (step[token].rank, step[token].decoded_token) == (logprob.rank, logprob.decoded_token)


def test_the_search_ends_at_max_model_len(trained: Engine) -> None:
    (output,) = trained.llm.beam_search([{"prompt_token_ids": [5] * 500}], BeamSearchParams(4, max_tokens=100))
    assert max(len(sequence.tokens) for sequence in output.sequences) == 512


@pytest.mark.parametrize("limit", [1, 3, 4, 100])
def test_no_more_prompts_than_the_limit_run_at_once(
    trained: Engine, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    scheduler = trained.scheduler

    def watching(*args: Any) -> Any:
        nonlocal most
        most = max(most, len(scheduler.groups))
        return type(scheduler).schedule(scheduler, *args)

    monkeypatch.setattr(scheduler, "schedule", watching)
    prompts, params = [{"prompt": text} for text in TEXTS], BeamSearchParams(3, max_tokens=8)
    limited = trained.llm.beam_search(prompts, params, concurrency_limit=limit)
    assert most == min(limit, len(prompts))
    assert [[s.tokens for s in o.sequences] for o in limited] == [
        [s.tokens for s in o.sequences] for o in trained.llm.beam_search(prompts, params)
    ]


def test_progress_is_shown_by_prompt_also_under_a_limit(trained: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, params = [{"prompt": text} for text in TEXTS], BeamSearchParams(2, max_tokens=4)
    trained.llm.beam_search(prompts, params)
    assert "Beam search" not in capsys.readouterr().err
    trained.llm.beam_search(prompts, params, use_tqdm=True, concurrency_limit=2)
    assert "Beam search: 100%" in (shown := capsys.readouterr().err)
    assert "4/4" in shown


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (BeamSearchParams(65, max_tokens=4), r"^BeamSearchParams\.beam_width=65 exceeds max_num_seqs=64; lower it, or"),
        (
            BeamSearchParams(2, max_tokens=4, length_penalty=math.inf),
            "length_penalty=inf is not a number above -40 and",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused(trained: Engine, params: BeamSearchParams, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained.llm.beam_search([{"prompt": "x"}], params)


def test_a_bad_prompt_is_refused_before_any_other_is_searched(trained: Engine) -> None:
    prompts = [{"prompt": "def f("}, {"prompt_token_ids": [5] * 600}]
    with pytest.raises(Exception, match="512"):
        trained.llm.beam_search(prompts, BeamSearchParams(2, max_tokens=4), concurrency_limit=1)
    trained.check_nothing_is_left()
    with pytest.raises(ValueError, match="concurrency_limit=0 allows no request"):
        trained.llm.beam_search(prompts[:1], BeamSearchParams(2, max_tokens=4), concurrency_limit=0)
    with pytest.raises(Exception, match="at least one prompt"):
        trained.llm.beam_search([], BeamSearchParams(2, max_tokens=4))


def test_vllms_own_loop_runs_what_the_engine_refuses(trained: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    notes: list[Any] = []

    def loop(self, prompts, params, lora_request=None, use_tqdm=False, concurrency_limit=None):
        calls.append((self, prompts, params, lora_request, use_tqdm, concurrency_limit))
        return []

    monkeypatch.setattr(beam_search.logger, "info_once", lambda *args: notes.append(args))
    adapter = LoRARequest("adapter", 1, "/nowhere")
    params = BeamSearchParams(2, max_tokens=4, structured_outputs=structured("regex"), ignore_eos=True)
    beam_search.llm_beam_search.function(
        loop, trained.llm, [{"prompt": "x"}], params, adapter, True, concurrency_limit=3
    )
    ((llm, _, _, lora, use_tqdm, limit),) = calls
    assert (llm, lora, use_tqdm, limit) == (trained.llm, adapter, True, 3)
    refusal = "with structured_outputs and ignore_eos"
    assert notes == [("LLM.beam_search %s: vLLM's own client loop runs it, not the engine", refusal)]


@pytest.mark.parametrize("name", sweep([*GRAMMARS], "regex", "schema"))
def test_beams_under_a_grammar_are_those_of_vllms_own_loop(trained: Engine, name: str) -> None:
    prompts, num_compared, num_tied = prompts_for(trained), 0, 0
    for width, length_penalty in ((1, 1.0), (3, 0.0), (6, 2.0)):
        params = BeamSearchParams(width, max_tokens=14, length_penalty=length_penalty)
        params.structured_outputs = structured(name)
        ours = trained.llm.beam_search(prompts, params)
        params.structured_outputs = structured(name)
        if name == "choice":  # of which vLLM's loop makes no grammar in 0.32
            params.structured_outputs = StructuredOutputsParams(grammar=choice_as_grammar(CHOICES))
        params.structured_outputs._backend = "xgrammar"  # nor does it choose a backend
        for our, their in zip(ours, original(trained, prompts, params), strict=True):
            assert len(our.sequences) == len(their.sequences)
            for x, y in zip(our.sequences, their.sequences, strict=True):
                num_compared += 1
                a, b = (score(sequence, params, 1) for sequence in (x, y))
                assert a == pytest.approx(b, rel=SCORE_TOLERANCE)
                if x.tokens != y.tokens:
                    assert a == pytest.approx(b, rel=NEAR_TIE)
                    num_tied += 1
                    continue
                for place, same in zip(x.logprobs, y.logprobs, strict=True):
                    best = {token: entry.logprob for token, entry in same.items() if entry.rank <= 2 * width}
                    found = {token: place[token].logprob for token in best}
                    assert found == pytest.approx(best, abs=SCORE_TOLERANCE)
    assert num_compared > 12
    assert num_tied < 0.02 * num_compared


def test_two_engines_interrupts_and_deletion(tmp_path: Path) -> None:
    """In processes of its own: see `two_engines.py` for the promises it checks."""
    script = ROOT / "tests" / "support" / "two_engines.py"
    result = forks.run([str(script)], seconds=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.split() == ["apart", "interrupted", "deleted"], result.stdout
