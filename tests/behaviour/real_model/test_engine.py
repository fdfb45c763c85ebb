"""Beams of the real model are transformers' and those of vLLM's own loop, however they are found."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

from benchmarks.demo_prompts import PERSON, REAL_TASKS
from benchmarks.watch import total_counts
from examples.retrieve.client import QUESTIONS
from tests.support.disturb import Clumsy
from tests.support.documents import are_shown_alike
from tests.support.engine import ROOT, Engine, Engines
from tests.support.pairs import drafting, looking_up
from tests.support.reference import agree, engine_answers, transformers_beams_of_all
from tests.support.running import MOST_TIES, count_ties, run
from vllm_trie import beam_params
from vllm_trie.entrypoints.llm import llm_beam_search

pytestmark = pytest.mark.slow

RETRIEVE = ROOT / "examples" / "retrieve"
EOS = 2
WIDTH = 4
TOKENS = 32
FEWER_TOKENS = 12  # where two searches are compared that both are ours
NUM_LAYERS = 4
FEW_BLOCKS = 20  # one search fits, six do not
LEAST_STEPS_OF_ONE_BEAM = 1.2  # per forward
MOST_BFLOAT16 = 0.05  # nats per token between bfloat16 and float32, and between what near-ties in bfloat16 lead to


@pytest.fixture
def engine(engines: Engines, real_model: Path, real_draft: Path) -> Engine:
    """In float32, with the draft model; searches speculate if they say so."""
    grammars = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
    return engines(real_model, **drafting(real_draft, NUM_LAYERS), **grammars)


def search(**options: Any) -> Any:
    return beam_params(WIDTH, n=WIDTH, **{"max_tokens": TOKENS, "speculation": "off", **options})


def test_beams_are_those_of_transformers(engine: Engine, real_model: Path, prompts: list[list[int]]) -> None:
    outputs = run(engine, [(prompt, search()) for prompt in prompts])
    same = 0
    answers = transformers_beams_of_all(real_model, prompts, WIDTH, WIDTH, TOKENS, eos_token_id=EOS)
    for output, theirs in zip(outputs, answers, strict=True):
        same += agree(engine_answers(output, 1.0), theirs)
    assert same == len(prompts)
    assert {hypothesis.finish_reason for output in outputs for hypothesis in output.outputs} == {"stop", "length"}


def test_the_retrieval_example_finds_what_its_readme_shows(engine: Engine) -> None:
    items = [json.loads(line) for line in (RETRIEVE / "items.jsonl").read_text().splitlines()]
    named = {"allowed_sequences": [item["text"] for item in items], "length_penalty": 0.0, "speculation": "off"}
    params = beam_params(len(items), n=len(items), max_tokens=16, **named)
    lines = list[str]()
    for prompt, output in zip(QUESTIONS, engine.llm.generate(QUESTIONS, params, use_tqdm=False), strict=True):
        lines.append(prompt)
        ids = output.kv_transfer_params["trie_beam"]["item_ids"]
        for index, hypothesis in list(zip(ids, output.outputs, strict=True))[:3]:
            lines.append(f"  {hypothesis.cumulative_logprob:8.4f}  item {items[index]['id']}")
    (shown,) = re.findall(r"`--dtype float32`:\n\n((?:    .*\n)+)", (RETRIEVE / "README.md").read_text())
    assert are_shown_alike("\n".join(lines) + "\n", shown)


@pytest.mark.nightly
def test_forests_find_what_plain_steps_find(engine: Engine, prompts: list[list[int]]) -> None:
    plain = run(engine, [(prompt, search(max_tokens=FEWER_TOKENS)) for prompt in prompts])
    for speculation in ("exact", "auto"):
        outputs = run(
            engine, [(prompt, search(max_tokens=FEWER_TOKENS, speculation=speculation)) for prompt in prompts]
        )
        assert count_ties(outputs, plain) <= MOST_TIES * WIDTH * len(prompts)
        if speculation == "exact":
            counts = total_counts(outputs)
            assert counts.accepted > 0
            assert counts.steps_per_forward > 1, "its draft model was trained for that"


@pytest.mark.nightly
def test_one_beam_gets_far_with_drafts(engine: Engine, prompts: list[list[int]]) -> None:
    jobs = [(prompt, beam_params(1, max_tokens=FEWER_TOKENS, speculation="exact", draft_width=4)) for prompt in prompts]
    assert total_counts(run(engine, jobs)).steps_per_forward > LEAST_STEPS_OF_ONE_BEAM


@pytest.mark.nightly
def test_sampled_beams_follow_their_seed_with_drafts_too(engine: Engine, prompts: list[list[int]]) -> None:
    sampled = {"max_tokens": FEWER_TOKENS, "do_sample": True, "temperature": 0.7, "speculation": "sample"}
    first, again = (run(engine, [(prompts[0], search(**sampled, seed=5))])[0] for _ in range(2))
    (other,) = run(engine, [(prompts[0], search(**sampled, seed=6))])
    tokens = [[list(hypothesis.token_ids) for hypothesis in output.outputs] for output in (first, again, other)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert first.kv_transfer_params["trie_beam"]["accepted"] > 0


def test_every_hypothesis_under_a_schema_fits_it(engine: Engine) -> None:
    (task,) = (task for task in REAL_TASKS if task.schema is not None)
    tokenizer = engine.llm.get_tokenizer()
    prompt = tokenizer(task.prompt(tokenizer))["input_ids"]
    schema = StructuredOutputsParams(json=PERSON)
    (output,) = run(engine, [(prompt, search(max_tokens=40, structured_outputs=schema))])
    assert [hypothesis.finish_reason for hypothesis in output.outputs] == ["stop"] * WIDTH
    people = [json.loads(hypothesis.text) for hypothesis in output.outputs]
    assert all({*person} == {*PERSON["properties"]} and isinstance(person["age"], int) for person in people)
    assert people[0] == {"name": "Anna", "age": 34, "city": "Lyon"}


@pytest.mark.nightly
def test_preempted_searches_find_the_same(engine: Engine, prompts: list[list[int]]) -> None:
    jobs = [(prompt, search(max_tokens=12)) for prompt in prompts[:3]]
    quiet, clumsy = run(engine, jobs), Clumsy(engine)
    outputs = run(engine, jobs, clumsy.preempt_whenever_a_search_is_further)
    assert clumsy.num_preempted > 3
    assert count_ties(outputs, quiet) == 0


@pytest.mark.nightly
def test_a_pool_too_small_for_all_preempts_some_and_changes_no_answer(
    engine: Engine, engines: Engines, real_model: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [(prompt, search(max_tokens=24, ignore_eos=True)) for prompt in prompts]
    roomy = run(engine, jobs)
    tight, preempted = engines(real_model, num_gpu_blocks_override=FEW_BLOCKS, max_model_len=256), []
    preempt = tight.scheduler._preempt_request

    def counting(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    monkeypatch.setattr(tight.scheduler, "_preempt_request", counting)
    outputs = run(tight, jobs)
    assert preempted
    assert count_ties(outputs, roomy) == 0


@pytest.mark.nightly
def test_n_grams_find_what_plain_steps_find(engines: Engines, real_model: Path, prompts: list[list[int]]) -> None:
    engine = engines(real_model, **looking_up(NUM_LAYERS))
    repeating = [prompt + prompt[len(prompt) // 2 :] for prompt in prompts]
    plain = run(engine, [(prompt, search(max_tokens=FEWER_TOKENS)) for prompt in repeating])
    outputs = run(engine, [(prompt, search(max_tokens=FEWER_TOKENS, speculation="exact")) for prompt in repeating])
    assert count_ties(outputs, plain) <= MOST_TIES * WIDTH * len(prompts)
    assert total_counts(outputs).accepted > 0


@pytest.mark.nightly
def test_beams_in_bfloat16_are_as_good_as_those_of_vllms_own_loop(
    engines: Engines, real_model: Path, prompts: list[list[int]]
) -> None:
    """Which of two beams that bfloat16 cannot tell apart goes on depends on how a processor rounds."""
    engine, prompts = engines(real_model, dtype="bfloat16"), prompts[:3]
    outputs = run(engine, [(prompt, search(ignore_eos=True)) for prompt in prompts])
    client = BeamSearchParams(WIDTH, max_tokens=TOKENS, ignore_eos=True)
    theirs = llm_beam_search.original(engine.llm, [{"prompt_token_ids": prompt} for prompt in prompts], client)
    reference = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32).eval()
    for prompt, output, loop in zip(prompts, outputs, theirs, strict=True):
        for hypothesis in output.outputs:
            by_reference = forced(reference, prompt, list(hypothesis.token_ids))
            assert hypothesis.cumulative_logprob == pytest.approx(by_reference, abs=MOST_BFLOAT16 * TOKENS)
        answers = list(output.outputs[0].token_ids), loop.sequences[0].tokens[len(prompt) :]
        ours, other = (forced(reference, prompt, answer) for answer in answers)
        assert ours == pytest.approx(other, abs=MOST_BFLOAT16 * TOKENS)


@torch.inference_mode()
def forced(model: Any, prompt: list[int], answer: list[int]) -> float:
    """The sum of log-probabilities of an answer, by one forward of it alone."""
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).sum().item()
