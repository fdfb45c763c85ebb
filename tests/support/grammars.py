"""Grammars for the trained model's tokens: as requests name them, and what may come next by them, found by no fork."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import xgrammar
from transformers import AutoTokenizer
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.utils import choice_as_grammar

from tests.support.engine import TRAINED_TARGET
from vllm_trie.compat.sources import installed_vllm, minor_vllm_version

EOS = 1
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["self", "value", "None"]}, "size": {"type": "integer", "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
CHOICES = ["self", "self.value", "return", "return None", "import os"]
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"},
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "schema": {"json": SCHEMA},
    "regex": {"regex": "[a-z]{2,6}(_[a-z]{2,4})?"},
    "choice": {"choice": CHOICES},
    "grammar": {"grammar": 'root ::= "(" inside ")"\ninside ::= [a-z]+ | root'},
    "structural tag": {"structural_tag": json.dumps(TAG)},
    "object": {"json_object": True},
}


def structured(name: str) -> StructuredOutputsParams:
    """What a request says of it."""
    return StructuredOutputsParams(**GRAMMARS[name])


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _fits_schema(text: str) -> bool:
    return _is_object(text) and {"name", "size"} == {*json.loads(text)} and json.loads(text)["size"] <= 99


def _in_balance(text: str) -> bool:
    while (shorter := re.sub(r"\(([a-z]+|#)\)", "#", text)) != text:
        text = shorter
    return text == "#"


MATCHES: dict[str, Callable[[str], bool]] = {
    "schema": _fits_schema,
    "regex": lambda text: re.fullmatch(GRAMMARS["regex"]["regex"], text) is not None,
    "choice": lambda text: text in CHOICES,
    "grammar": _in_balance,
    "structural tag": lambda text: text[:3] == "<f>" and text[-4:] == "</f>" and _fits_schema(text[3:-4]),
    "object": _is_object,
}


@cache
def _tokens(name: str) -> xgrammar.TokenizerInfo:
    tokenizer = AutoTokenizer.from_pretrained(TRAINED_TARGET)
    tokens = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    if minor_vllm_version(installed_vllm().version) == "0.32" or name == "structural tag":
        return tokens
    return XgrammarBackend._filter_special_tokens(tokenizer, tokens)  # they are not part of any text


@cache
def _compiled(name: str) -> xgrammar.CompiledGrammar:
    ((kind, spec),) = GRAMMARS[name].items()
    compiler = xgrammar.GrammarCompiler(_tokens(name))
    return {
        "json": lambda: compiler.compile_json_schema(json.dumps(spec)),
        "json_object": lambda: compiler.compile_json_schema('{"type": "object"}'),
        "regex": lambda: compiler.compile_regex(spec),
        "choice": lambda: compiler.compile_grammar(choice_as_grammar(spec)),
        "grammar": lambda: compiler.compile_grammar(spec),
        "structural_tag": lambda: compiler.compile_structural_tag(spec),
    }[kind]()


@cache
def may_come(name: str, generated: tuple[int, ...], stops: tuple[int, ...] = (EOS,)) -> list[int]:
    """The tokens that a hypothesis may go on with, by a matcher that has read it from its first token."""
    matcher = xgrammar.GrammarMatcher(_compiled(name), override_stop_tokens=[*stops])
    if not all(matcher.accept_token(token) for token in generated) or matcher.is_terminated():
        return []
    mask = xgrammar.allocate_token_bitmask(1, _tokens(name).vocab_size)
    matcher.fill_next_token_bitmask(mask)
    bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little", count=_tokens(name).vocab_size)
    return torch.from_numpy(bits).nonzero()[:, 0].tolist()
