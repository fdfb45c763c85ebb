"""A draft model that can propose few tokens says what it says alone, and answers stay those of plain steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.smollm2.draft_model import ARCHITECTURE, DraftInTransformers
from tests.support.draft_alone import Alone, search
from tests.support.engine import BLOCK_SIZE, Engine, Engines
from tests.support.pairs import NOISE, Pair, check_exact, count_differing, drafting, speculating
from tests.support.running import prompt_of, run
from vllm_trie import beam_params
from vllm_trie.speculation.worker.draft_model import DraftModel

pytestmark = pytest.mark.slow

VOCABULARY = torch.tensor([token for token in range(300) if token % 3 != 2])
OUTSIDE = torch.tensor([token for token in range(300) if token % 3 == 2])


def make(draft: Path, folder: Path) -> Path:
    """Save a draft model with all but the rows of `VOCABULARY` taken out of its output projection."""
    folder.mkdir()
    weights = load_file(draft / "model.safetensors")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    weights |= {"lm_head.weight": head[VOCABULARY].clone(), "d2t": VOCABULARY - torch.arange(len(VOCABULARY))}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    own = {"architectures": [ARCHITECTURE], "draft_vocab_size": len(VOCABULARY), "tie_word_embeddings": False}
    write_config(folder, json.loads((draft / "config.json").read_text()) | own)
    return folder


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )


@pytest.fixture(scope="module")
def pair(random_pair: Callable[[str, float], Pair], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    target, draft = random_pair("gqa", NOISE)
    return target, make(draft, tmp_path_factory.mktemp("few") / "draft")


@pytest.fixture
def engine(engines: Engines, pair: Pair) -> Engine:
    return speculating(engines, pair, 3, max_num_batched_tokens=64)


@pytest.mark.nightly
def test_it_says_what_it_says_alone_and_nothing_of_other_tokens(
    engine: Engine, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, drafted = DraftModel.logits, list[torch.Tensor]()

    def logits(model: DraftModel, *args: Any) -> torch.Tensor:
        drafted.append(stock(model, *args))
        return drafted[-1]

    monkeypatch.setattr(DraftModel, "logits", logits)
    alone = Alone(engine, DraftInTransformers.from_pretrained(pair[1], dtype=torch.float32).eval(), monkeypatch)
    assert count_differing(*search(engine, monkeypatch)) == 0
    rows = torch.cat(drafted)
    assert alone.num_wrong == 0
    assert alone.num_compared > 500
    assert rows[:, OUTSIDE].eq(float("-inf")).all()
    assert rows[:, VOCABULARY].isfinite().all()


def test_answers_are_those_of_plain_steps_though_they_hold_other_tokens(engine: Engine) -> None:
    asked = [
        (
            prompt_of(BLOCK_SIZE - 3 + w, w),
            {"beam_width": w, "draft_width": 2 * w, "max_tokens": 40, "ignore_eos": True},
        )
        for w in (1, 2, 4, 8)
    ]
    outputs = check_exact(engine, asked)
    found = [token for output in outputs for hypothesis in output.outputs for token in hypothesis.token_ids]
    assert set(found) & set(OUTSIDE.tolist()), "all could have been drafted"
    assert all(output.kv_transfer_params["trie_beam"]["accepted"] for output in outputs)


def test_beams_that_are_sampled_hold_other_tokens_too_and_follow_their_seed(engine: Engine) -> None:
    params = beam_params(4, n=4, max_tokens=40, ignore_eos=True, do_sample=True, seed=3, draft_width=8)
    (first,), (again,) = (run(engine, [(prompt_of(20, 1), params)]) for _ in range(2))
    found = [list(hypothesis.token_ids) for hypothesis in first.outputs]
    assert found == [list(hypothesis.token_ids) for hypothesis in again.outputs]
    assert {token for tokens in found for token in tokens} & set(OUTSIDE.tolist())
    assert first.kv_transfer_params["trie_beam"]["accepted"] > 0


def test_a_draft_that_is_silent_on_some_tokens_is_not_contrasted(engine: Engine) -> None:
    why = "this engine has .*draft.*, which proposes only a part of the tokens; start it"
    with pytest.raises(ValueError, match=r"contrast=\{\} needs a draft model, and " + why):
        engine.generate([prompt_of(9)], beam_params(3, contrast={}, max_tokens=9))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"draft_vocab_size": None}, "draft_vocab_size=None .* is not in 1..300"),
        ({"draft_vocab_size": 301}, "draft_vocab_size=301 .* is not in 1..300"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
    ],
    ids=["no size", "a size that is too large", "tied"],
)
def test_a_checkpoint_that_cannot_be_such_a_draft_is_refused(
    engines: Engines, pair: Pair, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    weights = load_file(pair[1] / "model.safetensors")
    weights.pop("lm_head.weight")  # or vLLM unties them by itself
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    write_config(tmp_path, json.loads((pair[1] / "config.json").read_text()) | config)
    with pytest.raises(ValueError, match=said):
        engines(pair[0], **drafting(tmp_path, 3))
