"""What the forge is told to run exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.engine import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def steps_of(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_targets_that_exist(workflow: Path) -> None:
    commands = [step["run"] for step in steps_of(workflow) if "run" in step]
    targets = {target for command in commands for target in re.findall(r"\bmake ([\w.-]+)", command)}
    assert targets
    assert targets <= TARGETS


def test_what_needs_a_gpu_runs_where_the_repository_names_a_runner_and_keeps_its_tables() -> None:
    gpu = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())["jobs"]["gpu"]
    assert (gpu["if"], gpu["runs-on"]) == ("vars.GPU_RUNNER != ''", "${{ vars.GPU_RUNNER }}")
    *_, checked, measured, kept = gpu["steps"]
    assert (checked["run"], measured["run"]) == ("make test-gpu", "make bench-gpu")
    assert measured["if"] == kept["if"] == "${{ !cancelled() }}", "tables are kept although a test fails"
    assert kept["with"]["path"] == "results/"


def test_ci_tests_each_python_that_the_metadata_name() -> None:
    ci = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert ci["jobs"]["fast"]["strategy"]["matrix"]["python"] == named


def test_ci_lints_once_and_tests_the_newer_vllm_in_a_job_of_its_own() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert [name for name, run in commands.items() if {"make lint", "make test"} & {*run}] == ["all"], "`test` lints"
    assert [name for name, run in commands.items() if run == ["make test-0.33"]] == ["vllm-0-33"]
