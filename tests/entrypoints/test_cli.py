"""`--plugin` selects, composes with other plugins, and refuses what it does not know."""

from __future__ import annotations

import json
import os

import pytest
import vllm.envs
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.support import forks
from tests.support.engine import TRAINED_TARGET
from vllm_trie.plugin import register


def parsed(*arguments: str, kind: type[EngineArgs] = AsyncEngineArgs) -> EngineArgs:
    register()
    parser = kind.add_cli_args(FlexibleArgumentParser())
    return kind.from_cli_args(parser.parse_args(["--model", str(TRAINED_TARGET), *arguments]))


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_the_flag_selects_the_engine(kind: type[EngineArgs]) -> None:
    assert parsed(kind=kind).additional_config == {}
    assert parsed("--plugin", "trie_beam", kind=kind).additional_config == {"trie_beam": {}}


def test_the_flag_leaves_the_options_of_the_engine_as_they_are() -> None:
    config = {"trie_beam": {"reclaim_interval": 3}, "other": 1}
    for arguments in (
        ["--plugin", "trie_beam", "--additional-config", json.dumps(config)],
        ["--additional-config", json.dumps(config), "--plugin", "trie_beam", "--plugin", "trie_beam"],
    ):
        assert parsed(*arguments).additional_config == config


def test_other_plugins_may_be_named_too_and_stay_what_they_are() -> None:
    args = parsed("--plugin", "lora_filesystem_resolver", "--plugin", "trie_beam")
    assert args.additional_config == {"trie_beam": {}}
    assert "VLLM_PLUGINS" not in os.environ


@pytest.mark.parametrize(
    ("name", "message"),
    [("trie_baem", "unknown plugin 'trie_baem'; did you mean trie_beam?"), ("zzz", "unknown plugin 'zzz'; installed:")],
)
def test_unknown_names_are_refused(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--plugin", name)
    assert message in capsys.readouterr().err


def test_a_name_that_vllm_plugins_leaves_out_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(vllm.envs), "VLLM_PLUGINS", ["trie_beam"])  # engines of other tests froze the real one
    assert parsed("--plugin", "trie_beam").additional_config == {"trie_beam": {}}
    with pytest.raises(SystemExit):
        parsed("--plugin", "lora_filesystem_resolver")
    assert "VLLM_PLUGINS leaves out plugin 'lora_filesystem_resolver'; add it" in capsys.readouterr().err


@pytest.mark.slow
def test_a_command_other_than_serve_knows_the_flag_too() -> None:
    result = forks.run(["-m", "vllm.entrypoints.cli.main", "bench", "latency", "--plugin", "zzz"], seconds=120)
    assert result.returncode == 2
    assert "unknown plugin 'zzz'" in result.stderr
