"""Runs a batch job on Ray: each engine is an actor that turns prompts into lines of the output."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from math import ceil
from typing import Any

import ray
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayError
from vllm import LLM
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams

from vllm_trie.batch.files import JobError, JobPrompt, job_line
from vllm_trie.batch.options import Job
from vllm_trie.entrypoints.answers.beam_results import BEAM_RESULTS
from vllm_trie.entrypoints.answers.compact import answer_of_search
from vllm_trie.entrypoints.requests.limits import BlocksNeeded, request_limits_of_engine, validate_request
from vllm_trie.entrypoints.requests.requests import search_of_request
from vllm_trie.messages import NO_HYPOTHESIS
from vllm_trie.reranking.metrics import rerank_metric_of

CARRIED = ("VLLM_", "HF_")  # prefixes of environment variables that engines on other nodes also need


class BatchSearcher:
    """An engine in a Ray actor.

    Args:
        engine_args: A reference to the `EngineArgs`: Ray Data would send the arguments themselves to its statistics
            actor, which would import vLLM for them.
        params: Of every prompt. They ask for `beam_results`, which have the scores.
        options: The value of "search" in each line.
    """

    def __init__(self, engine_args: ray.ObjectRef, params: SamplingParams, options: dict[str, Any]) -> None:
        self._llm = LLM.from_engine_args(ray.get(engine_args))
        self._params, self._options = params, options
        vllm_config = self._llm.llm_engine.vllm_config
        beam = search_of_request(params, vllm_config)
        assert beam is not None
        # What would fail for every prompt ends the job at once.
        if beam.rerank is not None:
            rerank_metric_of(beam.metric)
        validate_request(params, beam, request_limits_of_engine(vllm_config), BlocksNeeded(1, beam.beam_width))

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Lines of the output, for columns "id" (as JSON) and "prompt"."""
        prompts = [JobPrompt(json.loads(own_id), str(text)) for own_id, text in zip(*batch.values(), strict=True)]
        answers = zip(prompts, self._search([prompt.prompt for prompt in prompts]), strict=True)
        return {"line": [job_line(prompt, self._options, answer) for prompt, answer in answers]}

    def _search(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        """The answer to each text. A refusal of one does not stop the search of others."""
        answers, accepted = [dict[str, Any]() for _ in texts], []
        for answer, text in zip(answers, texts, strict=True):
            try:
                self._llm.enqueue(text, self._params, use_tqdm=False)
                accepted.append(answer)
            except (VLLMValidationError, ValueError) as refusal:
                answer.update(hypotheses=[], error=str(refusal))
        outputs = self._llm.wait_for_completion(RequestOutput, use_tqdm=False)  # in the order of their prompts
        for answer, output in zip(accepted, outputs, strict=True):
            answer.update(self._answer(output))
        return answers

    def _answer(self, output: RequestOutput) -> dict[str, Any]:
        best = output.outputs[0]
        if best.finish_reason == "error":
            return {"hypotheses": [], "error": best.stop_reason}
        found = [hypothesis for hypothesis in output.outputs if hypothesis.stop_reason != NO_HYPOTHESIS]
        answer = answer_of_search(output)
        hypotheses = [
            {
                "text": hypothesis.text,
                "token_ids": list(hypothesis.token_ids),
                "cumulative_logprob": hypothesis.cumulative_logprob,
                "score": result["meta_info"]["sequence_score"],
                "finish_reason": hypothesis.finish_reason,
            }
            for hypothesis, result in zip(found, answer.get(BEAM_RESULTS, ()), strict=True)
        ]
        item_ids = answer.get("item_ids", ())  # with a catalog
        for hypothesis, item_id in zip(hypotheses, item_ids, strict=False):
            hypothesis["item_id"] = item_id
        for hypothesis, utility in zip(hypotheses, answer.get("utilities", ()), strict=False):  # if reranked
            hypothesis["utility"] = utility
        return {"hypotheses": hypotheses}


def job_on_ray(num_engines: int) -> AbstractContextManager[Any]:
    """Connect to the cluster that `RAY_ADDRESS` names, or else start one on this machine, for a `with` block.

    Raises:
        JobError: Ray does not start.
    """
    options: dict[str, Any] = {"logging_level": logging.ERROR}
    if "RAY_ADDRESS" not in os.environ:
        cores = max(os.cpu_count() or 1, num_engines + 1)  # engines wait for devices, not for cores
        options |= {"num_cpus": cores, "include_dashboard": False}
    try:
        return ray.init(**options)
    except Exception as error:  # Ray raises no narrower one
        raise JobError(f"Ray does not start: {error}") from None


def job_lines(job: Job, prompts: Sequence[JobPrompt]) -> Iterator[str]:
    """Lines of the output, in the order of the prompts, a batch at a time.

    Raises:
        JobError: an engine does not start, or fails.
    """
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # failures are reported at the end
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    rows = [{"id": json.dumps(prompt.id), "prompt": prompt.prompt} for prompt in prompts]
    num_batches = ceil(len(rows) / job.batch_size)
    num_gpus = job.engine_args.tensor_parallel_size * job.engine_args.pipeline_parallel_size
    found = ray.data.from_items(rows, override_num_blocks=num_batches).map_batches(
        BatchSearcher,
        fn_constructor_args=(ray.put(job.engine_args), job.params, job.search),
        batch_size=job.batch_size,
        compute=ActorPoolStrategy(size=job.num_engines),
        num_cpus=1,
        num_gpus=0 if current_platform.is_cpu() else num_gpus,
        runtime_env={"env_vars": {k: v for k, v in os.environ.items() if k.startswith(CARRIED)}},
    )
    try:
        for row in found.iter_rows():
            yield row["line"]
    except RayError as error:
        raise JobError(
            f"an engine failed: {job_error_reason(str(error))}; run the same command again to continue {job.output}"
        ) from None


def job_error_reason(traceback: str) -> str:
    """The message of an engine's error, extracted from the traceback that Ray returns as text."""
    errors = re.findall(r"^(?!ray\.)[\w.]+(?:Error|Exception): .+", traceback, re.MULTILINE)
    return errors[-1] if errors else traceback.strip().splitlines()[-1]
