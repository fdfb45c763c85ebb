"""Two engines behind one server: whole groups go to either, and drafts come from a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import openai
import pytest

from benchmarks.common import TARGET
from benchmarks.server import Server, serving
from tests.support.forks import Fork
from tests.support.served import beams, complete

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two engines, each with a draft model. On 0.33 each takes a NUMA node for itself, unless this is set."""
    drafts = {"method": "draft_model", "model": str(TARGET.with_name("draft")), "num_speculative_tokens": 3}
    options = ["--data-parallel-size", "2", "--speculative-config", json.dumps(drafts)]
    with (
        mock.patch.dict("os.environ", VLLM_CPU_SIM_MULTI_NUMA="0"),
        serving(tmp_path_factory.mktemp("parallel") / "log", "--plugin", "trie_beam", *options, start=Fork) as server,
    ):
        yield server


def test_data_parallel_engines_get_whole_groups(parallel: Server, server: Server) -> None:
    def of_each_engine(name: str) -> np.ndarray:
        return np.array([parallel.gauge(name, engine=engine) for engine in ("0", "1")])

    counters = ("vllm:prompt_tokens_total", "vllm:trie_beam_groups_finished_total")
    prompts = [f"def f{i}(" for i in range(12)]
    before = [of_each_engine(name) for name in counters]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda prompt: complete(parallel, prompt, n=4, **beams(6)), prompts))
    parallel.wait_until_idle("vllm:trie_beam_groups_running")
    prompt_tokens, groups = (of_each_engine(name) - old for name, old in zip(counters, before, strict=True))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert [c.text for c in answer.choices] == [c.text for c in complete(server, prompt, n=4, **beams(6)).choices]
    assert min(prompt_tokens) > 0, "one engine did everything"
    assert sum(prompt_tokens) == sum(answer.usage.prompt_tokens for answer in answers)
    assert min(groups) > 0
    assert sum(groups) == 12, "several API servers add up to the truth"


def test_a_catalog_is_refused_where_engines_have_none(parallel: Server) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        complete(parallel, **beams(4, catalog="x"))
    message = 'this engine has none; start it with additional_config={"trie_beam": {"catalogs": {NAM'
    assert message in refusal.value.message


@pytest.mark.nightly
def test_speculation_is_asked_for_over_http(parallel: Server) -> None:
    def found(**options: Any) -> tuple[list[str], dict[str, Any] | None]:
        response = complete(parallel, n=4, **options)
        took = response.model_dump().get("kv_transfer_params")
        return [c.text for c in response.choices], took and took["trie_beam"]

    plain, exact = (found(**beams(4, speculation=how)) for how in ("off", "exact"))
    wide, default = found(**beams(4, speculation="exact", draft_width=16)), found(**beams(4))
    assert plain[0] == exact[0] == wide[0] == default[0]
    assert plain[1] is None
    drafted_per_forward = [one[1]["drafted"] / one[1]["target_forwards"] for one in (wide, exact)]
    assert drafted_per_forward[0] > drafted_per_forward[1] > 0
    assert default[1]["target_forwards"] > 0, "by default a search speculates as far as it pays"
    as_vllm, off = (
        found(use_beam_search=True, vllm_xargs={"speculation": speculation}) for speculation in ("exact", "off")
    )
    assert as_vllm[0] == off[0]
    sampled = {"seed": 3, "temperature": 0.7}
    one, again, other = (found(**sampled | {"seed": s}, **beams(4, do_sample=1, threshold=0.8)) for s in (3, 3, 4))
    assert one[0] == again[0] != other[0] != plain[0]
    assert one[1]["mean_width"] < 4
    assert found(**sampled, **beams(4, do_sample=1))[0] != found(seed=3, **beams(4, do_sample=1))[0], (
        "temperature counts"
    )
    contrasted = found(**beams(4, contrast='{"beta": 2.0}'))
    assert contrasted[0] != plain[0]
    assert contrasted[1] is None
    for options, message in [
        (beams(4, contrast='{"beta": -1}'), "contrast={'beta': -1} is not {"),
        (beams(4, speculation=1), "speculation=1 is unknown; known: 'auto', 'exact', 'sample', 'off'"),
        (beams(4, do_sample=2), "do_sample=2 is neither true nor false"),
        (beams(4, draft_widht=8), "unknown option draft_widht=8; did you mean draft_width?"),
        (beams(4, memory_mode=1), 'memory_mode=True has no effect unless beams are sampled; set speculation="sample"'),
        (beams(4, threshold="0.7", do_sample=1), "threshold='0.7' is not a probability"),
    ]:
        with pytest.raises(openai.BadRequestError) as refusal:
            found(**options)
        assert message in refusal.value.message
