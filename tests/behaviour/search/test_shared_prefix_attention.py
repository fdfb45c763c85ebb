"""Searches find the same whether attention reads what their beams share once for all beams or once for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.support.disturb import preempt_all
from tests.support.engine import Engine, Engines
from tests.support.pairs import NOISE, TRAINED, count_differing, drafting
from tests.support.running import MOST_TIES, Job, prompt_of, run, trained_prompts
from tests.support.sweep import sweep
from vllm_trie import beam_params
from vllm_trie.worker.attention import check_attention, compiled, cpu_backend
from vllm_trie.worker.attention.cpu_backend import SharedPrefixAttentionImpl, SharedPrefixAttentionMetadata
from vllm_trie.worker.attention.shared_rows import SharedAttentionTokens
from vllm_trie.worker.runner import BeamModelRunner

pytestmark = pytest.mark.slow

KINDS = ("gqa", "mha", "opt", "mistral", "gemma2", "gemma2_uncapped", "mixtral", "gpt_oss")


def option(value: str) -> dict[str, Any]:
    """Of an engine."""
    return {"additional_config": {"trie_beam": {"check_invariants": True, "shared_prefix_attention": value}}}


@contextmanager
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SharedAttentionTokens]]:
    """What the kernel is asked for, layer by layer."""
    asked, forward = list[SharedAttentionTokens](), SharedPrefixAttentionImpl.forward

    def watched(
        self: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, *rest: Any, **named: Any
    ) -> Any:
        if isinstance(metadata, SharedPrefixAttentionMetadata):
            asked.append(metadata.plan.shared)
        return forward(self, layer, query, key, value, kv_cache, metadata, *rest, **named)

    with monkeypatch.context() as patched:
        patched.setattr(SharedPrefixAttentionImpl, "forward", watched)
        yield asked


def searches_among_others(prompts: Sequence[list[int]], num_tokens: int = 70) -> list[Job]:
    """Searches that are long enough to share some of their answers, on these prompts, and ordinary requests."""
    widths = (8, 3, 1, 6)
    params = [beam_params(width, n=width, max_tokens=num_tokens, ignore_eos=True) for width in widths]
    params += [SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)] * 3
    return [*zip(prompts, params, strict=True)]


def compare(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raise AssertionError where hypotheses differ by more than a near-tie, and more often than these come up."""
    assert count_differing(found, expected) <= MOST_TIES * sum(len(output.outputs) for output in expected)


@pytest.mark.parametrize("kind", sweep(KINDS, "gemma2", "gpt_oss"))
def test_searches_among_ordinary_requests_find_the_same(
    engines: Engines, random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Also in layers that have windows, soft caps or sinks."""
    jobs = searches_among_others([prompt_of(length, length) for length in (100, 70, 40, 64, 30, 90, 150)])
    limits = {"max_num_batched_tokens": 96}  # prompts are computed in parts, in a batch with rows that decode
    with seen(monkeypatch) as asked:
        expected = run(engines(random_model(kind), **limits, **option("off")), jobs)
        assert not asked
        found = run(engines(random_model(kind), **limits, **option("on")), jobs)
    compare(found, expected)
    assert max(len(shared.num_shared) for shared in asked) > 1, "no groups side by side"
    # Beyond their prompts, what the random model's beams have in common is little, but not in all groups nothing.
    assert max(shared.num_shared.max() for shared in asked) >= 96


@pytest.mark.nightly
def test_the_blocks_of_an_answer_are_shared_as_soon_as_all_beams_agree_on_them(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt,) = trained_prompts([100])
    params = beam_params(4, n=4, max_tokens=200, ignore_eos=True)
    with seen(monkeypatch) as asked:
        found = run(engines(TRAINED[0], **option("on")), [(prompt, params)])
    compare(found, run(engines(TRAINED[0], **option("off")), [(prompt, params)]))
    shared = [int(shared.num_shared[0]) for shared in asked]
    assert shared == sorted(shared)
    assert (shared[0], shared[-1]) == (96, 256)


def test_forests_and_preempted_groups_find_the_same(
    engines: Engines,
    random_pair: Callable[[str, float], tuple[Path, Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, draft = random_pair("gqa", NOISE)
    jobs = searches_among_others([prompt_of(length, length) for length in (100, 70, 40, 64, 30, 90, 150)])
    expected = run(engines(target, **drafting(draft, 3), **option("off")), jobs)
    steps = 0

    def disturb(engine: Engine) -> None:
        nonlocal steps
        steps += 1
        if steps in (12, 20):
            preempt_all(engine)

    with seen(monkeypatch) as asked:
        engine = engines(target, **drafting(draft, 3), **option("on"))
        found = run(engine, jobs, lambda: disturb(engine))
    compare(found, expected)
    assert steps > 20
    assert max(len(shared.rows) - len(set(shared.rows.tolist())) for shared in asked) > 0, "no row of several tokens"


def test_what_does_not_pay_is_left_to_vllm(
    engines: Engines, random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = [(prompt_of(150), beam_params(16, max_tokens=4, ignore_eos=True))]
    narrow = [(prompt_of(150), beam_params(1, max_tokens=4, ignore_eos=True))]
    with seen(monkeypatch) as asked:
        run(engines(random_model("gqa"), **option("auto")), narrow)
        assert not asked
        run(engines(random_model("gqa"), **option("auto")), wide)
    num_layers, num_steps = 2, 3
    assert len(asked) == num_layers * num_steps


def test_steps_that_read_shared_blocks_once_ask_for_no_full_graph(
    engines: Engines, random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(random_model("gqa"), **option("on"))
    gather, counts = GPUModelRunner.gather_batch_req_state, list[Any]()
    seen_by_vllm = BeamModelRunner.gather_batch_req_state

    def watched(*args: Any) -> Any:
        found = seen_by_vllm(*args)
        counts.append((gather(*args)[1], found[1]))
        return found

    monkeypatch.setattr(BeamModelRunner, "gather_batch_req_state", watched)
    for length in (20, 40):  # less than a block, and more
        counts.append(length)
        run(engine, [(prompt_of(length), beam_params(3, max_tokens=4, ignore_eos=True))])
    of_steps = [count for count in counts if count != (None, None)]
    assert of_steps == [20, *[(1, 1)] * 3, 40, *[(1, None)] * 3]


def test_an_unknown_choice_is_refused(random_model: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="shared_prefix_attention='yes' is unknown; known: 'auto', 'on', 'off'"):
        Engine(random_model("gqa"), **option("yes"))


def test_without_a_compiler_vllms_attention_is_used(
    engines: Engines,
    random_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(*_: int) -> None:
        raise compiled.CompilerError("there is no compiler")

    warnings: list[str] = []
    monkeypatch.setattr(compiled, "check_compiled_attention", none)
    monkeypatch.setattr(cpu_backend.logger, "warning_once", lambda text, *given: warnings.append(text % given))
    jobs = [(prompt_of(150), beam_params(16, max_tokens=4, ignore_eos=True))]
    with seen(monkeypatch) as asked:
        run(engines(random_model("gqa"), **option("auto"), max_num_seqs=63), jobs)
    assert not asked
    without = "Attention reads shared blocks once per row, as in vLLM, and does not support draft trees: %s"
    assert warnings == [without % "there is no compiler"]


def test_what_is_demanded_and_cannot_be_is_refused(
    random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def configure(**options: Any) -> None:
        EngineArgs(str(random_model("gqa")), skip_tokenizer_init=True, **option("on"), **options).create_engine_config()

    configure(dtype="float32")
    configure(dtype="bfloat16")

    def no_compiler(_: str) -> None:
        raise compiled.CompilerError("there is no compiler")

    monkeypatch.setattr(compiled, "compiled_attention", no_compiler)
    with pytest.raises(
        ValueError, match='shared_prefix_attention="on" is not possible: there is no compiler; use "auto"'
    ):
        configure(dtype="float32")


def test_a_model_none_of_whose_layers_can_is_refused(
    random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_backend, "is_decoder_attention", lambda _: False)
    message = (
        r'shared_prefix_attention="on" is not possible: trie_beam has no kernel for the attention of any layer of '
        r'this model \(2 by CPU_ATTN\); use "auto"'
    )
    with pytest.raises(ValueError, match=message):
        Engine(random_model("gqa"), **option("on"))


def test_layers_that_cannot_stay_vllms_and_are_named(
    engines: Engines, random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(check_attention.logger, "warning_once", lambda text, *given: warnings.append(text % given))
    monkeypatch.setattr(cpu_backend, "is_decoder_attention", lambda impl: impl.sliding_window < 0)
    engines(random_model("gemma2_uncapped"), **option("on"), max_num_seqs=61)
    (warning,) = warnings
    assert 'shared_prefix_attention="on" has no effect on 2 layers, for whose attention (CPU_ATTN)' in warning
