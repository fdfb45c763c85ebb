"""Checks requests with structured outputs: only some backends can follow beams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams

from vllm_trie.entrypoints.requests.request_data import REASONING, RequestReasoning
from vllm_trie.sampling_params import sampling_params_stops

if TYPE_CHECKING:
    from vllm.config import StructuredOutputsConfig
    from vllm.tokenizers import TokenizerLike

_BACKENDS = ("xgrammar", "guidance")  # whose state can be copied


def prepare_request_grammar(
    params: SamplingParams, prompt: list[int], config: StructuredOutputsConfig, tokenizer: TokenizerLike | None
) -> None:
    """Check a request's grammar, and end it by the tokens that end hypotheses.

    Args:
        params: The request's own copy, for which vLLM has chosen a backend. It is changed.
        prompt: Its tokens.
        config: Of the engine.
        tokenizer: Of the engine.

    Raises:
        ValueError: the search cannot follow the grammar; names the option, its value and what would work.
    """
    assert params.structured_outputs is not None
    if (backend := params.structured_outputs._backend) not in _BACKENDS:
        raise ValueError(
            f'structured_outputs of the backend "{backend}" cannot follow beams, as its state cannot be '
            f"copied; start the engine with structured_outputs_config.backend={' or '.join(_BACKENDS)}"
        )
    reasoning: RequestReasoning = (params.extra_args or {}).get(REASONING, RequestReasoning())
    if config.reasoning_parser and not config.enable_in_reasoning and not reasoning.has_ended:
        from vllm.reasoning import ReasoningParserManager  # here: most engines never need it

        parser_cls = ReasoningParserManager.get_reasoning_parser(config.reasoning_parser)
        parser = parser_cls(tokenizer, **(reasoning.parser_kwargs or {}))  # as the engine makes it
        if not parser.is_reasoning_end(prompt):
            raise ValueError(
                f'structured_outputs cannot begin after reasoning (reasoning_parser="{config.reasoning_parser}") in a '
                "beam search; switch it off in the prompt or by chat_template_kwargs, or leave one of the two out"
            )
    params._all_stop_token_ids = set(sampling_params_stops(params))
