"""The command line of a batch job: its files, the search, and all engine options of vLLM."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_trie.entrypoints.answers.beam_results import BEAM_RESULTS
from vllm_trie.entrypoints.cli import cli_plugin_name
from vllm_trie.entrypoints.requests.beam_params import beam_params
from vllm_trie.options import OPTIONS, PLUGIN_NAME, EngineOptions
from vllm_trie.options.table import option_choices

PROGRAM = "python -m vllm_trie.entrypoints.batch"
EARLY_STOPPING = {"true": True, "false": False, "never": "never"}
SEARCH = ("beam_width", "n", "max_tokens", "length_penalty", "early_stopping", "semantics", "stop")


@dataclass(frozen=True)
class Job:
    """A batch job, as parsed from the command line."""

    input: Path
    output: Path
    field: str
    num_engines: int
    batch_size: int
    search: dict[str, Any]  # the model, and options that the search or else the engine sets: what answers depend on
    params: SamplingParams
    engine_args: EngineArgs


class _JobParser(FlexibleArgumentParser):
    """Reports a mistake in one sentence, without the usage, which has hundreds of lines of engine options."""

    def error(self, message: str) -> NoReturn:
        print(f"{PROGRAM}: {message}", file=sys.stderr)
        sys.exit(2)


def parse_job(arguments: Sequence[str] | None = None) -> Job:
    """Parse the command line. A mistake ends the process with one sentence and status 2."""
    load_general_plugins()  # adds the --plugin flag to the parser
    parser = _job_parser()
    args = parser.parse_args(arguments)
    try:
        if args.model is None:
            raise ValueError("--model is missing; name the model to search with")
        if args.output.suffix == ".gz":
            raise ValueError("--output cannot be compressed, since lines are appended to it; compress it afterwards")
        for name in ("num_engines", "batch_size"):
            if getattr(args, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')}={getattr(args, name)} is too few; pass at least 1")
        search = _job_search_options(args)
        files, sizes = (args.input, args.output, args.field), (args.num_engines, args.batch_size)
        params, engine_args = _job_search(search), _job_engine_args(args)
        recorded = {"model": args.model} | search | _engine_defaults_of_job(search, engine_args)
        return Job(*files, *sizes, recorded, params, engine_args)
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))


def _job_parser() -> _JobParser:
    parser = _JobParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} --model MODEL --input FILE --output FILE --beam-width N [options]",
        description="Search a file of prompts with beams, on one or more engines that run on Ray. "
        "Run the same command again to continue a job that was interrupted.",
    )
    job = parser.add_argument_group(title="batch job")
    job.add_argument("--input", type=Path, required=True, metavar="FILE", help="JSON lines, or these in .gz.")
    job.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON lines, one per prompt.")
    job.add_argument("--field", default="prompt", help="The key of the prompt in each line of the input.")
    job.add_argument("--num-engines", type=int, default=1, help="Engines that work in parallel.")
    job.add_argument("--batch-size", type=int, default=128, help="Prompts that an engine takes and answers at a time.")
    search = parser.add_argument_group(title="beam search")
    search.add_argument("--beam-width", type=int, required=True, help="Beams searched in parallel.")
    search.add_argument("--n", type=int, default=1, help="Hypotheses per prompt.")
    search.add_argument("--max-tokens", type=int, default=64, help="Tokens of the longest hypothesis.")
    search.add_argument("--length-penalty", type=float, default=1.0, help="Above 0 favours longer hypotheses.")
    search.add_argument("--early-stopping", choices=EARLY_STOPPING, default="false")
    search.add_argument(
        "--semantics", choices=option_choices(OPTIONS["semantics"]), help="Whose rules the search follows."
    )
    search.add_argument("--stop", action="append", metavar="TEXT", help="Ends a hypothesis; may be repeated.")
    search.add_argument(
        "--search-options",
        type=_job_json_object,
        default={},
        metavar="JSON",
        help='Further arguments of vllm_trie.beam_params, such as \'{"min_tokens": 8, "prune_relative": 0.01}\'.',
    )
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model=None)
    return parser


def _job_json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object; pass '{{\"option\": value}}'")
    return value


def _job_search_options(args: argparse.Namespace) -> dict[str, Any]:
    for name in args.search_options:
        if name in SEARCH:
            raise ValueError(f"--search-options sets {name}, which has its own option: --{name.replace('_', '-')}")
        if name in ("compact", "trace", BEAM_RESULTS, "unit"):
            raise ValueError(f"--search-options sets {name}, which batch jobs do not support; leave it out")
    own = {name: getattr(args, name) for name in SEARCH}
    return own | {"early_stopping": EARLY_STOPPING[args.early_stopping]} | args.search_options


def _engine_defaults_of_job(search: Mapping[str, Any], engine_args: EngineArgs) -> dict[str, Any]:
    """The defaults for searches that the engine is started with, except those that this search sets itself."""
    defaults = EngineOptions.from_additional_config(engine_args.additional_config).params()
    return {name: value for name, value in defaults.items() if name in OPTIONS and search.get(name) is None}


def _job_search(search: dict[str, Any]) -> SamplingParams:
    try:
        return beam_params(**{**search, **_job_search_of_json(search), BEAM_RESULTS: True})
    except (TypeError, VLLMValidationError) as error:  # a wrong value of one of vLLM's options
        name = getattr(error, "parameter", None)
        flag = f"--{name.replace('_', '-')}" if name in SEARCH else "--search-options"
        raise ValueError(f"{flag}: {error}") from None


def _job_search_of_json(search: Mapping[str, Any]) -> dict[str, Any]:
    """Options whose values JSON cannot express, converted from what it can."""
    found: dict[str, Any] = {}
    if isinstance(biases := search.get("logit_bias"), dict):
        if words := [token for token in biases if not token.isdecimal()]:
            raise ValueError(f"logit_bias has a key that is not a token id: {words[0]!r}")
        found["logit_bias"] = {int(token): bias for token, bias in biases.items()}
    if isinstance(outputs := search.get("structured_outputs"), dict):
        known = [field.name for field in fields(StructuredOutputsParams) if field.init]
        if unknown := [name for name in outputs if name not in known]:
            raise ValueError(f"structured_outputs has no {unknown[0]!r}; it has: {', '.join(known)}")
        found["structured_outputs"] = StructuredOutputsParams(**outputs)
    return found


def _job_engine_args(args: argparse.Namespace) -> EngineArgs:
    cli_plugin_name(PLUGIN_NAME)
    args.additional_config = {PLUGIN_NAME: {}, **args.additional_config}
    EngineOptions.from_additional_config(args.additional_config)
    if args.data_parallel_size > 1:
        raise ValueError(f"--data-parallel-size={args.data_parallel_size} is not for a batch job; use --num-engines")
    if args.distributed_executor_backend == "ray":
        raise ValueError(
            "--distributed-executor-backend=ray is not for a batch job, where each engine runs on one Ray node; "
            "leave it out"
        )
    try:
        return EngineArgs.from_cli_args(args)
    except OSError as error:  # vLLM looks for the model here if it may not download it
        raise ValueError(f"--model={args.model} cannot be found: {error}") from None
