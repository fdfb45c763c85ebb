"""A batch job says what is wrong before any engine starts, and goes on with what was written."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import pickle
import pickletools
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.data
from ray.data._internal.metadata_exporter import sanitize_for_struct

from tests.support.engine import ROOT, TRAINED_TARGET
from vllm_trie.batch import search
from vllm_trie.batch.__main__ import main
from vllm_trie.batch.files import JobError, JobPrompt, open_job_output, read_job_prompts, write_job_line
from vllm_trie.batch.options import parse_job
from vllm_trie.batch.search import job_error_reason, job_lines

DOCUMENT = (ROOT / "docs/batch.md").read_text()


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


# Files.


def test_prompts_have_their_own_ids_or_the_numbers_of_their_lines(tmp_path: Path) -> None:
    lines = ['{"prompt": "a", "id": "x"}', "", '{"prompt": "b", "more": 1}', '{"prompt": "c", "id": 7}']
    expected = [JobPrompt("x", "a"), JobPrompt(3, "b"), JobPrompt(7, "c")]
    assert read_job_prompts(write_lines(tmp_path / "in.jsonl", *lines), "prompt") == expected
    with gzip.open(tmp_path / "in.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    assert read_job_prompts(tmp_path / "in.jsonl.gz", "prompt") == expected


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a"}', '{"prompt": '], "line 2 is not JSON: "),
        (['{"prompt": "a"}', '["a"]'], "line 2 is not a JSON object but '[\"a\"]'"),
        ([f'"{50 * "é"}"'], "line 1 is not a JSON object but '\"éé"),
        (['{"text": "a", "id": 3}'], "line 1 has no 'prompt'; it has: text, id; choose one by --field"),
        (["{}"], "line 1 has no 'prompt'; it has: nothing"),
        (['{"prompt": [1, 2]}'], "line 1: 'prompt' is not a text but [1, 2]"),
        (['{"prompt": "a", "id": 1.5}'], 'line 1: "id" is neither a number nor a text but 1.5'),
        (['{"prompt": "a", "id": true}'], 'line 1: "id" is neither a number nor a text but true'),
        (['{"prompt": "a"}', '{"prompt": "b", "id": 1}'], "line 2 has the same id as line 1, 1; ids must differ"),
        (
            ['{"prompt": "a"}', '{"prompt": "b \\ud83d"}'],
            "line 2 has half of a surrogate pair, '\\ud83d'; fix or remove it",
        ),
        (['{"prompt": "a", "id": "\\udc00"}'], "line 1 has half of a surrogate pair, '\\udc00'; fix or remove it"),
        ([100_000 * "["], "line 1 is nested too deeply"),
        (["", " "], "has no prompts"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, lines: list[str], message: str) -> None:
    path = write_lines(tmp_path / "in.jsonl", *lines)
    with pytest.raises(JobError, match=re.escape(f"{path}") + ",? " + re.escape(message)):
        read_job_prompts(path, "prompt")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"nowhere\.jsonl cannot be read: .*No such file"):
        read_job_prompts(tmp_path / "nowhere.jsonl", "prompt")
    compressed = gzip.compress(b'{"prompt": "a"}\n' * 9)
    (tmp_path / "damaged.gz").write_bytes(compressed[:10] + b"\xff" * (len(compressed) - 10))
    with pytest.raises(JobError, match=r"damaged\.gz cannot be read: "):
        read_job_prompts(tmp_path / "damaged.gz", "prompt")
    (tmp_path / "text.gz").write_text("no gzip")
    with pytest.raises(JobError, match=r"text\.gz cannot be read: .*[Nn]ot a gzip"):
        read_job_prompts(tmp_path / "text.gz", "prompt")


PROMPTS = [JobPrompt(1, "a"), JobPrompt("x", "b"), JobPrompt(3, "c")]
ASKED = {"model": "m", "beam_width": 4, "stop": None, "min_tokens": 2}


def line_of(own_id: int | str, prompt: str, **searched: Any) -> str:
    return json.dumps({"id": own_id, "prompt": prompt, "search": ASKED | searched, "hypotheses": []}) + "\n"


def test_whole_lines_count_and_a_half_written_one_is_gone(tmp_path: Path) -> None:
    whole = line_of("x", "b") + line_of(1, "a").replace("[]}", '[], "error": "too long"}')
    path = tmp_path / "out.jsonl"
    for half in '{"id": 3, "prom', line_of(3, "c")[:-3]:
        path.write_text(whole + half)
        with open_job_output(path, PROMPTS, ASKED) as (file, answered):
            assert answered == {"x": True, 1: False}
            file.write("more\n")
        assert path.read_text() == whole + "more\n"


@pytest.mark.parametrize("text", ['{"learning_rate": 1e-3}', '{"id": 3, "prompt": "c"}', "x", line_of(3, "d")[:-1]])
def test_a_file_that_this_job_did_not_write_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    refusal = pytest.raises(JobError, match="ends with a line that this job did not write; name another --output")
    with refusal, open_job_output(path, PROMPTS, ASKED):
        pass
    assert path.read_text() == text


@pytest.mark.parametrize(
    "line",
    [
        '{"id": 9, "prompt": "a", "hypotheses": []}',
        '{"id": 1, "prompt": "other", "hypotheses": []}',
        '{"id": 1, "prompt": "a"}',
        '{"prompt": "a", "hypotheses": []}',
    ],
)
def test_the_output_of_another_job_is_left_alone(tmp_path: Path, line: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(f"{line}\nhalf")
    refusal = pytest.raises(JobError, match="line 1 answers no prompt of this job; name another --output")
    with refusal, open_job_output(path, PROMPTS, ASKED):
        pass
    assert path.read_text() == f"{line}\nhalf"


@pytest.mark.parametrize(
    ("searched", "message"),
    [
        ({"beam_width": 8, "min_tokens": 1}, "beam_width=8 instead of 4, min_tokens=1 instead of 2"),
        ({"prune_relative": 0.1}, "prune_relative=0.1 instead of None"),
    ],
)
def test_answers_of_another_search_are_not_gone_on_with(tmp_path: Path, searched: dict[str, Any], message: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(line_of(1, "a") + line_of("x", "b", **searched))
    refusal = pytest.raises(JobError, match=re.escape(f"line 2 was searched with {message}; name another --output"))
    with refusal, open_job_output(path, PROMPTS, ASKED):
        pass


def test_two_jobs_do_not_write_to_one_output(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with path.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(JobError, match="another job is writing to"), open_job_output(path, PROMPTS, ASKED):
            pass
    with pytest.raises(JobError, match="cannot be written"), open_job_output(tmp_path / "no" / "out", PROMPTS, ASKED):
        pass


def test_an_output_that_cannot_be_locked_or_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in Path("/dev/null"), Path("/dev/full"):
        with pytest.raises(JobError, match=f"{path} is not a regular file"), open_job_output(path, PROMPTS, ASKED):
            pass
    with Path("/dev/full").open("a") as full, pytest.raises(JobError, match=r"full cannot be written: .*No space"):
        write_job_line(full, "line")

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    path = tmp_path / "out.jsonl"
    with pytest.raises(JobError, match=r"cannot be locked: .*not supp"), open_job_output(path, PROMPTS, ASKED):
        pass


# The command line.

USUAL = ["--model", str(TRAINED_TARGET), "--input", "in.jsonl", "--output", "out.jsonl", "--beam-width", "4"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beam-widht", "4"], "unrecognized arguments: --beam-widht 4"),
        (["--n", "5"], "n=5 exceeds beam_width=4"),
        (["--beam-width", "0"], "beam_width=0 is not a whole number of beams"),
        (["--beam-width", "many"], "argument --beam-width: invalid int value: 'many'"),
        (["--early-stopping", "soon"], "argument --early-stopping: invalid choice: 'soon'"),
        (["--search-options", "{"], "argument --search-options: '{' is not JSON"),
        (["--search-options", "[]"], "argument --search-options: '[]' is not a JSON object"),
        (["--search-options", '{"n": 2}'], "--search-options sets n, which has its own option: --n"),
        (
            ["--search-options", '{"seed": 2, "do_sample": false}'],
            "seed=2 has no effect in a search that does not sample",
        ),
        (["--search-options", '{"prune_relativ": 2}'], "unknown option prune_relativ=2; did you mean prune_relative?"),
        (["--search-options", '{"compact": true}'], "--search-options sets compact, which batch jobs do not support"),
        (["--search-options", '{"beam_results": true}'], "sets beam_results, which batch jobs do not support"),
        (["--search-options", '{"unit": "step"}'], "--search-options sets unit, which batch jobs do not support"),
        (["--search-options", '{"zzz": 2}'], "unknown option zzz=2; known: beam_width, "),
        (["--search-options", '{"stop_token_ids": "x"}'], "--search-options: "),
        (["--search-options", '{"logit_bias": {"x": 1}}'], "logit_bias has a key that is not a token id: 'x'"),
        (["--search-options", '{"min_tokens": "x"}'], "min_tokens='x' is of the wrong type: "),
        (
            ["--search-options", '{"structured_outputs": {"regexp": "a"}}'],
            "structured_outputs has no 'regexp'; it has: json, regex, choice, ",
        ),
        (["--max-tokens", "0"], "--max-tokens: max_tokens must be at least 1"),
        (["--output", "in.jsonl"], "--output=in.jsonl is the input, too; name another file"),
        (["--output", "out.jsonl.gz"], "--output cannot be compressed"),
        (["--num-engines", "0"], "--num-engines=0 is too few; pass at least 1"),
        (["--data-parallel-size", "2"], "--data-parallel-size=2 is not for a batch job; use --num-engines"),
        (
            ["--distributed-executor-backend", "ray"],
            "--distributed-executor-backend=ray is not for a batch job",
        ),
        (["--additional-config", '{"trie_beam": {"reclaim": 1}}'], "unknown option trie_beam.reclaim"),
        (["--field", "text"], "line 1 has no 'text'; it has: prompt; choose one by --field"),
    ],
)
def test_a_mistake_is_one_sentence_before_any_engine_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}')
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(sys, "argv", ["batch", *USUAL, *options])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err if isinstance(ended.value.code, int) else f"{ended.value.code}\n"
    assert said.startswith("python -m vllm_trie.entrypoints.batch: ")
    assert message in said
    assert said.count("\n") == 1
    assert (tmp_path / "in.jsonl").read_text() == '{"prompt": "a"}'
    assert ended.value.code != 0


def test_a_job_that_is_whole_ends_as_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", '{"prompt": "a"}', '{"prompt": "b"}')
    monkeypatch.setattr(sys, "argv", ["batch", *USUAL])
    asked = parse_job(USUAL).search
    answers = [{"id": 1, "prompt": "a", "search": asked, "hypotheses": []}]
    answers += [{"id": 2, "prompt": "b", "search": asked, "hypotheses": [], "error": "too long"}]
    write_lines(tmp_path / "out.jsonl", *map(json.dumps, answers))
    with pytest.raises(SystemExit, match=r'1 prompts could not be searched; see "error" in out\.jsonl'):
        main()


def test_options_come_as_json_has_them() -> None:
    given = {"logit_bias": {"5": 1.0}, "structured_outputs": {"regex": "a+"}}
    job = parse_job([*USUAL, "--search-options", json.dumps(given)])
    assert job.params.logit_bias == {5: 1.0}
    assert job.params.structured_outputs is not None
    assert job.params.structured_outputs.regex == "a+"
    assert {name: job.search[name] for name in given} == given


def test_a_job_records_the_defaults_of_its_engine_that_it_does_not_set() -> None:
    def search_of(defaults: dict[str, Any], *options: str) -> dict[str, Any]:
        return parse_job([*USUAL, "--additional-config", json.dumps({"trie_beam": defaults}), *options]).search

    plain = parse_job(USUAL).search
    assert search_of({"semantics": "hf", "reclaim_interval": 3}) == plain
    assert search_of({"semantics": "vllm"}) == plain | {"semantics": "vllm"}
    assert search_of({"semantics": "vllm"}, "--semantics", "hf") == plain | {"semantics": "hf"}
    sampled = {"do_sample": True, "replacement": False}
    assert search_of(sampled) == plain | sampled
    assert search_of(sampled, "--search-options", '{"do_sample": false}')["do_sample"] is False


def test_the_command_of_the_document_is_understood() -> None:
    (command,) = re.findall(r"```bash\n(python -m vllm_trie\.entrypoints\.batch .*?)```", DOCUMENT, re.DOTALL)
    job = parse_job(shlex.split(command.replace("\\\n", " "))[3:])
    assert (job.params.n, job.num_engines, job.engine_args.max_model_len) == (4, 2, 1024)


def test_what_is_required_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--input", "in.jsonl", "--output", "out.jsonl", "--beam-width", "4"]
    for given, missing in ([], "--input, --output, --beam-width"), (files, "--model is missing"):
        monkeypatch.setattr(sys, "argv", ["batch", *given])
        with pytest.raises(SystemExit):
            main()
        assert missing in capsys.readouterr().err


TRACEBACK = """\
The actor died because of an error raised in its creation task, ray::MapWorker(MapBatches(BatchSearcher)).__init__()
  File "search.py", line 50, in __init__
    validate_request(params, self._beam, 1, request_limits_of_engine(vllm_config))
ValueError: beam_width=6 exceeds max_num_seqs=4; lower it, or raise --max-num-seqs

The above exception was the direct cause of the following exception:

ray.data.exceptions.UserCodeException: UDF failed to process a data block.
To change retry attempts, configure `ray.data.DataContext` if you believe this to be transient.
"""


def test_of_a_traceback_what_the_engine_said_is_told() -> None:
    assert (
        job_error_reason(TRACEBACK)
        == "ValueError: beam_width=6 exceeds max_num_seqs=4; lower it, or raise --max-num-seqs"
    )
    assert job_error_reason("The actor died unexpectedly.\nIt was killed.\n") == "It was killed."


@pytest.fixture
def asked_of_ray(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments that a job passes to Ray Data's `map_batches`, which does nothing."""
    asked = dict[str, Any]()

    class Rows:
        def map_batches(self, _: type, **options: Any) -> Any:
            asked.update(options)
            return self

        def iter_rows(self) -> list[Any]:
            return []

    monkeypatch.setattr(ray.data, "from_items", lambda *_, **__: Rows())
    monkeypatch.setattr(ray, "put", lambda _: ray.ObjectRef.nil())
    return asked


def test_an_engine_gets_a_gpu_for_each_of_its_workers(
    asked_of_ray: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = parse_job([*USUAL, "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"])
    for is_cpu, num_gpus in (False, 4), (True, 0):
        monkeypatch.setattr(search, "current_platform", SimpleNamespace(is_cpu=lambda is_cpu=is_cpu: is_cpu))
        assert [*job_lines(job, [JobPrompt(1, "x")])] == []
        assert asked_of_ray["num_gpus"] == num_gpus


def test_what_ray_data_tells_of_the_engines_needs_no_vllm(asked_of_ray: dict[str, Any]) -> None:
    """Or its actor of statistics would import it."""
    job = parse_job(USUAL)
    assert [*job_lines(job, [JobPrompt(1, "x")])] == []
    pickled, stock = (
        [op.name for op, *_ in pickletools.genops(pickle.dumps(sanitize_for_struct(arguments))) if "GLOBAL" in op.name]
        for arguments in (asked_of_ray["fn_constructor_args"], job.engine_args)
    )
    assert pickled == []
    assert stock, "engine arguments themselves are not pickled as texts alone"
