"""The committed pair is small, shares one tokenizer, and has learnt something from files it says it saw."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.stdlib_pair import corpus
from benchmarks.stdlib_pair.train import held_out_loss, pack

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PAIR = Path(corpus.__file__).parent
MEGABYTE = 1 << 20
UNIFORM_LOSS = 7.62  # ln(2048)


def test_pair_is_small_enough_to_be_committed() -> None:
    files = [path for role in ("target", "draft") for path in (PAIR / role).iterdir()]
    assert sum(path.stat().st_size for path in files) <= 8 * MEGABYTE
    target, draft = (AutoModelForCausalLM.from_pretrained(PAIR / role).num_parameters() for role in ("target", "draft"))
    assert target <= 3_300_000
    assert 7 <= target / draft <= 12


def test_pair_has_one_tokenizer() -> None:
    assert (PAIR / "target" / "tokenizer.json").read_bytes() == (PAIR / "draft" / "tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    text = "def f(x):\n\treturn 'é' * x\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_held_out_files_are_the_ones_the_rule_holds_out() -> None:
    listed = set(corpus.held_out_files())
    assert len(listed) >= 20
    assert listed == {path for path in corpus.source_files() if corpus.is_held_out(path)} & listed
    assert all(corpus.is_held_out(path) for path in listed)


@pytest.mark.parametrize(("role", "most"), [("target", 3.4), ("draft", 3.7)])
def test_models_predict_code_they_have_not_seen(role: str, most: float) -> None:
    tokenizer = AutoTokenizer.from_pretrained(PAIR / role)
    model = AutoModelForCausalLM.from_pretrained(PAIR / role, dtype=torch.float32).eval()
    units = [unit for path in corpus.held_out_files() for unit in corpus.units(path)]
    loss = held_out_loss(model, pack(tokenizer, units)[::10])
    assert loss < most < UNIFORM_LOSS


def test_prompts_end_where_a_body_must_follow() -> None:
    prompts = corpus.held_out_prompts(40)
    assert len(set(prompts)) == 40
    assert all(prompt.startswith("def ") and prompt.endswith(":") for prompt in prompts)
    with pytest.raises(ValueError, match="count=1000000 prompts asked for"):
        corpus.held_out_prompts(1_000_000)
