"""Adds `--plugin trie_beam` wherever vLLM's command line takes engine arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any

from vllm_trie.compat.patch import wraps_vllm
from vllm_trie.options import PLUGIN_NAME

ENGINE_ARGS = "vllm.engine.arg_utils:EngineArgs"


def cli_plugin_name(name: str) -> str:
    """Check the name of a plugin.

    Raises:
        argparse.ArgumentTypeError: no plugin of this name is installed, or `VLLM_PLUGINS` leaves it out.
    """
    import vllm.envs as envs

    installed = sorted({plugin.name for plugin in entry_points(group="vllm.general_plugins")})
    if name not in installed:
        meant = get_close_matches(name, installed, n=1)
        hint = f"did you mean {meant[0]}?" if meant else f"installed: {', '.join(installed)}"
        raise argparse.ArgumentTypeError(f"unknown plugin {name!r}; {hint}")
    if envs.VLLM_PLUGINS is not None and name not in envs.VLLM_PLUGINS:
        raise argparse.ArgumentTypeError(f"the environment variable VLLM_PLUGINS leaves out plugin {name!r}; add it")
    return name


@wraps_vllm("add_cli_args", ENGINE_ARGS)
def add_cli_args(original: Callable[..., Any], parser: Any, **kwargs: Any) -> Any:
    """Add `--plugin` to a parser of engine arguments."""
    parser = original(parser, **kwargs)
    group = parser.add_argument_group(title="plugins", description="Plugins that act only in engines that select them.")
    text = f"Use a plugin in this engine; may be repeated. {PLUGIN_NAME}: beam search inside the engine."
    group.add_argument("--plugin", action="append", type=cli_plugin_name, metavar="NAME", help=text)
    return parser


@wraps_vllm("from_cli_args", ENGINE_ARGS)
def from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace, **kwargs: Any) -> Any:
    if PLUGIN_NAME in (vars(args).get("plugin") or ()):  # in `args`, which vLLM hands to its API server processes
        args.additional_config = {PLUGIN_NAME: {}, **args.additional_config}
    return original(cls, args, **kwargs)
