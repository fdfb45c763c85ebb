"""A search sends its prompt to the engine once, however many outputs it has, and gets its hypotheses back at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.serial_utils import MsgpackEncoder

from tests.support.engine import TRAINED_TARGET, Engine, Engines
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

WIDTH, NUM_TOKENS, PROMPT_LENGTH = 256, 5, 1000
PROMPT = [300 + place % 700 for place in range(PROMPT_LENGTH)]  # a token takes three bytes
A_FEW = 8  # bytes by which messages may differ whose numbers do
MOST_ELSE = 400  # bytes of an answer besides


class Messages:
    """What the front end and the engine send each other, as bytes, were they in different processes."""

    def __init__(self) -> None:
        self.requests = list[bytes]()
        self.outputs = list[EngineCoreOutput]()
        self.num_output_bytes = 0  # of all messages that have outputs

    @property
    def num_prompts(self) -> int:
        """How often the prompt is sent."""
        return b"".join(self.requests).count(encoded(PROMPT))


def encoded(message: Any) -> bytes:
    return b"".join(MsgpackEncoder().encode(message))


@contextmanager
def recorded(engine: Engine) -> Iterator[Messages]:
    messages, client = Messages(), engine.llm.llm_engine.engine_core
    add_request, get_output = client.add_request, client.get_output

    def record_request(request: Any) -> None:
        messages.requests.append(encoded(request))
        add_request(request)

    def record_outputs() -> Any:
        outputs = get_output()
        messages.outputs += outputs.outputs
        messages.num_output_bytes += len(encoded(outputs)) if outputs.outputs else 0
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "add_request", record_request)
        patch.setattr(client, "get_output", record_outputs)
        yield messages


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines(TRAINED_TARGET, max_model_len=1100, max_num_seqs=WIDTH)


def messages_of(engine: Engine, params: SamplingParams) -> Messages:
    with recorded(engine) as messages:
        (output,) = engine.generate([PROMPT], params)
    assert len(output.outputs) == params.n
    return messages


def search(engine: Engine, **options: Any) -> Messages:
    return messages_of(engine, beam_params(WIDTH, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, **options))


def test_the_prompt_is_sent_once_however_many_outputs_a_search_has(engine: Engine) -> None:
    best, every = search(engine, n=1), search(engine, n=WIDTH)
    assert (best.num_prompts, every.num_prompts) == (1, 1)
    (for_best,), (for_every,) = best.requests, every.requests
    assert abs(len(for_best) - len(for_every)) <= A_FEW


def test_prompts_that_are_sent_n_times_are_counted_n_times(engine: Engine) -> None:
    """As vLLM sends those of other requests."""
    samples = messages_of(engine, SamplingParams(n=3, max_tokens=1, seed=1, detokenize=False))
    assert (samples.num_prompts, len(samples.requests)) == (3, 3)


@pytest.mark.parametrize(
    ("options", "of_token", "of_hypothesis"),
    [
        ({"n": WIDTH}, 3, 9 + 3),  # a sum; a length, a reason and no stop token take a byte each
        ({"n": WIDTH, "logprobs": 2}, 3 + 3 * (4 + 4) + 4, 9 + 3),
        ({"compact": True}, 3, 2 * 9 + 1 + 7),  # a sum and a score; a length, and a reason in letters
    ],
    ids=["outputs", "log-probabilities", "arrays"],
)
def test_hypotheses_come_back_as_arrays_in_one_message(
    engine: Engine, options: dict[str, Any], of_token: int, of_hypothesis: int
) -> None:
    messages = search(engine, **options)
    (answer,) = messages.outputs
    assert answer.finished
    assert messages.num_output_bytes <= WIDTH * (NUM_TOKENS * of_token + of_hypothesis) + MOST_ELSE
