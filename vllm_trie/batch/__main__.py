"""Run a batch job: `python -m vllm_trie.entrypoints.batch --help`, or `python -m vllm_trie.batch`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import IO

from tqdm import tqdm

from vllm_trie.batch.files import (
    JobError,
    JobPrompt,
    open_job_output,
    read_job_prompts,
    refuse_one_job_file,
    write_job_line,
)
from vllm_trie.batch.options import PROGRAM, Job, parse_job

INTERRUPTED = 130


def main() -> None:
    """Search all prompts that the output does not answer yet. Exits with status 1 if some could not be searched."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    job = parse_job()
    try:
        if find_spec("ray") is None:
            raise JobError("Ray is missing; pip install 'vllm_trie[ray]'")
        refuse_one_job_file(job.input, job.output)
        prompts = read_job_prompts(job.input, job.field)
        with open_job_output(job.output, prompts, job.search) as (file, answered):
            pending = [prompt for prompt in prompts if prompt.id not in answered]
            num_failed = sum(not is_found for is_found in answered.values())
            num_failed += _search_job_prompts(job, pending, len(answered), file) if pending else 0
    except JobError as error:
        sys.exit(f"{PROGRAM}: {error}")
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted; run the same command again to continue {job.output}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    if num_failed:
        sys.exit(f'{PROGRAM}: {num_failed} prompts could not be searched; see "error" in {job.output}')


def _search_job_prompts(job: Job, pending: Sequence[JobPrompt], num_answered: int, file: IO[str]) -> int:
    """Search prompts, and write a line for each. Returns how many could not be searched."""
    from vllm_trie.batch.search import job_lines, job_on_ray  # Ray is an extra

    num_failed, total = 0, num_answered + len(pending)
    with (
        job_on_ray(job.num_engines),
        tqdm(desc="Beam search", unit=" prompts", total=total, initial=num_answered) as bar,
    ):
        for line in job_lines(job, pending):
            write_job_line(file, line)
            num_failed += "error" in json.loads(line)
            bar.update()
    return num_failed


if __name__ == "__main__":
    main()
