"""What a beam request's `SamplingParams` ask of each hypothesis: which fields act, and which are refused."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any

from vllm_trie.search.filters import LogitsFilters

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_trie.options import BeamParams

# Fields that act on the logits of each hypothesis, as vLLM's sampler applies them, if they are not zero or empty.
_CONTROLS = ("presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words")

# Fields that beam search does not honour (yet).
_REFUSED = (
    *("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids"),
    *("thinking_token_budget", "repetition_detection", "trace_decode_token_ids"),
)
# Fields that act on the output of a request, which in a search by steps is one step.
_OF_AN_OUTPUT = ("presence_penalty", "frequency_penalty", "bad_words", "min_tokens")
# Fields that semantics="vllm" does not honour, because vLLM's beams do not, with the values that ask nothing of it.
_NEUTRAL_AS_VLLM = {"temperature": (1.0, 0.0), "top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,)}


def stop_tokens(params: SamplingParams) -> tuple[int, ...]:
    """The tokens that end a hypothesis, ascending: EOS unless `ignore_eos`, and `stop_token_ids`."""
    tokens = set(params.stop_token_ids or ())
    if params.eos_token_id is not None:
        tokens.add(params.eos_token_id)
    return tuple(sorted(tokens))


def is_controlled(params: SamplingParams) -> bool:
    """Whether penalties, biases or bans act on the logits."""
    return params.repetition_penalty != 1.0 or any(getattr(params, name) for name in _CONTROLS)


def logits_filters(params: SamplingParams) -> LogitsFilters:
    """What temperature and filters do to each row. `temperature=0.0`, which asks for no sampling, does not scale."""
    return LogitsFilters(params.temperature or 1.0, params.min_p, max(params.top_k, 0), params.top_p)


def has_grammar(params: SamplingParams) -> bool:
    """Whether structured outputs say what hypotheses may look like."""
    return params.structured_outputs is not None and not params.structured_outputs.all_constraints_none()


def refuse_unsupported(params: SamplingParams, beam: BeamParams, feature: str = "beam_width") -> None:
    """Refuse fields of `SamplingParams` that beam search does not honour.

    Raises:
        ValueError: naming the field and its value.
    """
    if beam.by_steps:
        _refuse_in_steps(params, beam)
        return
    for name in _REFUSED:
        if (value := getattr(params, name)) is not None:
            raise ValueError(f"{_shown(name, value)} is not supported together with {feature}; leave it at None")
    for name, neutral in _NEUTRAL_AS_VLLM.items() if beam.semantics == "vllm" else ():
        if (value := getattr(params, name)) not in neutral:
            what, cure = f"{name}={value!r}", " or ".join(map(repr, neutral))
            raise ValueError(
                f'{what} is not supported under semantics="vllm", whose beams ignore it; leave it at {cure}'
            )
    may_draw = beam.draws or (beam.do_sample is None and beam.speculation != "exact")  # None: the engine says so
    if params.seed is not None and not may_draw:
        raise ValueError(
            f"seed={params.seed} has nothing to decide in a beam search; leave it out, or set do_sample or sample_first"
        )
    if params.temperature == 0 and beam.draws:
        what = beam.drawn_by if beam.sample_first == 0 else f"sample_first={beam.sample_first}"
        raise ValueError(f"temperature=0.0 leaves {what} nothing to draw; raise it")
    if has_grammar(params) and beam.speculation not in (None, "auto", "off"):
        raise ValueError(
            f'speculation="{beam.speculation}" is not supported together with structured_outputs; leave one of them out'
        )
    for field, asks in (("n", params.n > 1), ("logprobs", params.logprobs is not None)) if beam.compact else ():
        if asks:
            raise ValueError(
                f"{field}={getattr(params, field)} is not supported together with compact, which returns all in one "
                "output; leave it out"
            )
    if params.logprobs == -1:
        raise ValueError(f"logprobs=-1 is not supported together with {feature}; ask for a number of tokens")


def _shown(name: str, value: Any) -> str:
    """A field and its value; of an object its name alone."""
    return f"{name}={reprlib.repr(value)}" if isinstance(value, int | float | str | list | dict) else name


def _refuse_in_steps(params: SamplingParams, beam: BeamParams) -> None:
    """Refuse fields that a search by steps does not honour.

    Raises:
        ValueError: naming the field and its value.
    """
    given = [name for name in _REFUSED if getattr(params, name) is not None]
    given += [name for name in _OF_AN_OUTPUT if getattr(params, name)]
    for name in [*given, *(["structured_outputs"] if has_grammar(params) else [])]:
        what = _shown(name, getattr(params, name))
        raise ValueError(
            f'{what} is not supported together with unit="step", where it would see one step; leave it out'
        )
    if params.temperature == 0:
        raise ValueError('temperature=0.0 leaves unit="step" nothing to draw; raise it')
    if params.logprobs == -1:
        raise ValueError('logprobs=-1 is not supported together with unit="step"; ask for a number of tokens')
    if not params.detokenize:
        raise ValueError('detokenize=False is not supported together with unit="step", which looks for delimiters')
