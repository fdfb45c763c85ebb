"""Run by a test: two engines in one process, one with beams, each in processes of its own.

Prints a word for every promise kept: the engines do not disturb each other; an interrupt leaves
nothing running; a deleted engine takes its searches with it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import psutil
from vllm import LLM
from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
from vllm.sampling_params import BeamSearchParams

from vllm_trie import beam_params

MODEL = str(Path(__file__).parents[2] / "benchmarks" / "stdlib_pair" / "target")
PROMPTS: list[Any] = [{"prompt": "def is_prime(number):"}, {"prompt": "import os\n"}]
LONG = beam_params(32, n=4, max_tokens=480, ignore_eos=True)


def start(**options: Any) -> LLM:
    return LLM(
        MODEL,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=512,
        max_num_seqs=64,
        kv_cache_memory_bytes=1 << 28,
        disable_log_stats=False,
        **options,
    )


def raised_by(kind: type[BaseException], act: Callable[[], Any]) -> BaseException:
    try:
        act()
    except kind as error:
        return error
    raise AssertionError(f"it ended without {kind.__name__}")


def living() -> set[int]:
    """The engines' processes: multiprocessing's own tracker of shared memory lives as long as we do."""
    children = psutil.Process().children(recursive=True)
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return {child.pid for child in alive if "resource_tracker" not in " ".join(child.cmdline())}


def running(llm: LLM) -> float:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_requests_running")


def engines_do_not_disturb_each_other(with_beams: LLM, without: LLM) -> None:
    loop_steps = []
    stock_step = BeamSearchOfflineMixin._beam_search_step

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        loop_steps.append(self)
        return stock_step(self, *args, **kwargs)

    BeamSearchOfflineMixin._beam_search_step = counting
    params = BeamSearchParams(4, max_tokens=12)
    ours, theirs = (llm.beam_search(PROMPTS, params) for llm in (with_beams, without))
    assert set(map(id, loop_steps)) == {id(without)}, "the loop ran where it should not, or not where it should"
    assert [[s.tokens for s in o.sequences] for o in ours] == [[s.tokens for s in o.sequences] for o in theirs]
    refusal = raised_by(ValueError, lambda: without.generate(PROMPTS, LONG, use_tqdm=False))
    assert "beam_width=32 on an engine without beam search; start it with additional_config" in str(refusal)
    print("apart")


def interrupt_once_it_runs(llm: LLM) -> None:
    while running(llm) == 0:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


def an_interrupt_leaves_nothing_running(llm: LLM) -> None:
    for search in (
        lambda: llm.generate(PROMPTS, LONG, use_tqdm=False),
        lambda: llm.beam_search(PROMPTS, BeamSearchParams(32, max_tokens=480, ignore_eos=True)),
    ):
        threading.Thread(target=interrupt_once_it_runs, args=[llm]).start()
        raised_by(KeyboardInterrupt, search)
        assert not llm.llm_engine.has_unfinished_requests()
        outputs = llm.generate(PROMPTS[:1], beam_params(2, max_tokens=4), use_tqdm=False)
        assert len(outputs) == 1, "an interrupted search answered"
        assert running(llm) == 0
    print("interrupted")


def a_deleted_engine_ends_its_processes(engines: list[LLM]) -> None:
    before = living()
    assert before
    llm = engines.pop()
    llm.llm_engine.add_request("long", PROMPTS[0], LONG)
    for _ in range(3):
        llm.llm_engine.step()
    del llm
    gc.collect()
    deadline = time.monotonic() + 30
    while before & living():
        assert time.monotonic() < deadline, "processes outlived their engine"
        time.sleep(0.1)
    print("deleted")


if __name__ == "__main__":
    without = start(max_logprobs=64)
    engines = [start(additional_config={"trie_beam": {}})]
    engines_do_not_disturb_each_other(engines[0], without)
    an_interrupt_leaves_nothing_running(engines[0])
    without.llm_engine.engine_core.shutdown()
    a_deleted_engine_ends_its_processes(engines)
    sys.stdout.flush()
