"""The type, range, default and meaning of each option of requests; each belongs to one of these classes.

`matrix.py` has the combinations that are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, Strict, WrapValidator

from vllm_trie.options.contrast import MOST_BETA, ContrastOption
from vllm_trie.options.item_ids import MOST_EXCLUDED, ItemIds
from vllm_trie.options.shown import shown_option
from vllm_trie.options.table import Number, Options, option
from vllm_trie.search.stopping import EarlyStopping

MOST_SCALE = 1_000  # of log-probabilities; by then only the most probable hypothesis counts
MOST_PENALTY = 6  # a million tokens to the power of 6 still fits float32
MOST_VLLM_PENALTY = 40  # ten million to the power of 40 still fits float64, which vLLM's rules use
MOST_NGRAM = 64  # tokens, compared one by one in every step
MOST_WIDTHS = 4_096  # entries of `beam_widths`
MOST_DIVERSITY = 1e4  # outweighs any log-probability; float32 sums of such penalties still tell these apart
MOST_SEQUENCES, MOST_SEQUENCE_TOKENS = 100_000, 2_000_000  # in a request; larger sets belong in a catalog
MOST_SEQUENCE_CHARACTERS = 8_000_000  # of strings: about as long as 2,000,000 tokens
MOST_EXCLUDED_JSON = 2_200_000  # characters: 100,000 ids of twenty digits, a comma and a space
MOST_STRING = 100_000  # characters of one sequence, far more than a model writes as one item
MOST_SEQUENCE_JSON = 20_000_000  # characters: 2,000,000 tokens of seven digits, a comma and a space

MOST_PHRASES, MOST_PHRASE_TOKENS = 1_000, 10_000  # in a request; every step reads all of their tokens
MOST_PHRASE_LENGTH = 256  # tokens; the tokens that a step reads grow with the longest phrase
MOST_PHRASE_CHARACTERS = 100_000  # of all phrases
MOST_PHRASE_JSON = 500_000  # characters
MOST_STOPS, MOST_STOP_LENGTH = 64, 256  # stop strings, or delimiters of steps, and characters of each
MOST_STOP_CHARACTERS = 4_096  # of all stop strings: their matcher is built within an engine step
MOST_URL = 2_000  # characters
MOST_WEIGHT = 100  # nats, far beyond the log-probabilities of models

Semantics = Literal["hf", "vllm", "tridecode"]
Speculation = Literal["auto", "exact", "sample", "off"]
Acceptance = Literal["exact", "top_k"]
Allot = Literal["even", "rebase", "dvts"]
Order = Literal["breadth", "best", "mcts"]
MetricName = Literal["chrf", "chrf++", "bleu", "ter"]

FAIL_FAST = Field(fail_fast=True)  # a refusal names the option, not its entries, so the first wrong one is enough
Tokens = Annotated[list[int], Field(min_length=1), FAIL_FAST]
Int64 = Annotated[int, Field(ge=-1 << 63, lt=1 << 63)]


@dataclass(frozen=True)
class SequencesText:
    """`allowed_sequences` as a JSON text, which may be long: it is parsed only where it is needed."""

    text: str

    def __repr__(self) -> str:
        return shown_option(self.text)


Sequences = Annotated[
    Annotated[list[str], FAIL_FAST] | Annotated[list[Annotated[list[Int64], FAIL_FAST]], FAIL_FAST],
    Field(min_length=1, max_length=MOST_SEQUENCES),
    WrapValidator(lambda value, check: value if isinstance(value, SequencesText) else check(value)),
]
ExcludedItems = Annotated[list[int] | ItemIds, PlainValidator(ItemIds.of)]
Weight = Annotated[int | float, Field(ge=-MOST_WEIGHT, le=MOST_WEIGHT)]
# A phrase, or all ways to write it, and its weight. A list is accepted as JSON has no pairs.
PhraseBoost = Annotated[
    tuple[
        Annotated[str, Field(min_length=1)] | Tokens | Annotated[list[Tokens], Field(min_length=1), FAIL_FAST],
        Weight,
    ],
    Strict(False),
]

# How the refusal of a value goes on after the option and the value.
_RATIO = "is not a ratio of probabilities; pass a number in (0, 1]"
_DIFFERENCE = "is not a difference of log-probabilities; pass a number >= 0"
_DIVERSITY = f"is not a difference of log-probabilities; pass a number from 0 to {MOST_DIVERSITY:,.0f}"
_WAYS = "is not a number of continuations; pass an integer >= 1"
_NGRAM = f"is not a number of tokens; pass an integer from 0 to {MOST_NGRAM}"
_WIDTHS = f"is not a list of numbers of beams; pass 1 to {MOST_WIDTHS:,} integers >= 1"
_TOKENS = "is not a number of tokens; pass an integer >= 0"
WRONG_SEQUENCES = f"is not a list of 1 to {MOST_SEQUENCES:,} strings, or lists of token ids"
_ITEMS = f"is not a list of at most {MOST_EXCLUDED:,} item ids; pass a list, set or array of integers"
_PHRASES = (
    f"is not a list of 1 to {MOST_PHRASES:,} pairs of a phrase, a string or token ids, and a weight from "
    f"-{MOST_WEIGHT} to {MOST_WEIGHT}"
)
_DELIMITERS = f"is not a list of delimiters; pass strings, at most {MOST_STOPS}, of 1 to {MOST_STOP_LENGTH} characters"
_CONTRAST = f'is not {{"model": "draft", "alpha": a number in (0, 1], "beta": a number from 0 to {MOST_BETA:,}}}'
_TEMPERATURE = "is not a temperature; pass a number > 0"
_PRICE = "is not a price of KV; pass a number >= 0"
_EXPLORATION = "is not a factor; pass a number >= 0"
_SCALE = f"is not a power of probabilities; pass a number from 0 to {MOST_SCALE:,}"
_EXPONENT = (
    f'is not a number above -{MOST_PENALTY} and below {MOST_PENALTY}, or with semantics="vllm" above '
    f"-{MOST_VLLM_PENALTY} and below {MOST_VLLM_PENALTY}; 1.0 compares means, 0.0 sums"
)
_VLLM_EXPONENT = (
    f"is not a number above -{MOST_VLLM_PENALTY} and below {MOST_VLLM_PENALTY}; 1.0 compares means, 0.0 sums"
)
NO_BEAMS = "is not a number of beams; pass an integer >= 1"
NO_SCORER = "is not a scorer; pass a callable, an `LLM` of a pooling model, or the name or URL of an endpoint"


class Core(Options):
    """The options of every search, by tokens or by steps.

    Args:
        beam_width: Beams that are searched in parallel; `n` hypotheses are returned. One beam is greedy search by
            transformers' rules.
        early_stopping: When `beam_width` hypotheses are finished, True stops; False goes on while the best running
            beam, at its present length, can beat one of them; "never" while it can at any length. As in transformers'
            `generate`, where one beam stops at the first stop token.
        unit: What beams grow by: "token", or "step", a text up to a delimiter that is sampled and then scored. See
            docs/step_search.md.
    """

    beam_width: int = option(..., "is not a whole number of beams; pass an integer of at least 1", ge=1)
    early_stopping: EarlyStopping = option(False, 'is not False, True or "never"')
    unit: Literal["token", "step"] = option("token")


class Ranking(Options):
    """Which beams go on, and by whose rules.

    Args:
        semantics: Whose rules decide what may finish and when to stop: "hf" is transformers' `generate`, "vllm" is
            vLLM's `LLM.beam_search`, "tridecode" is the published code of Efficient Beam Search for LLMs Using
            Trie-Based Decoding. By default the engine's.
        length_penalty: Hypotheses compete by cumulative log-probability / length to this power: > 0 favours long ones.
        beam_widths: The number of beams after each step; the last one holds for all further steps. The greatest is the
            `beam_width`, which may be left out: so many hypotheses compete in the end.
        num_beam_groups: Group beam search: the beams form so many groups of equal width, each of which avoids tokens
            that earlier groups take in the same step. As in transformers 4's `generate`.
        diversity_penalty: Subtracted from a token's log-probability for each beam of an earlier group that takes this
            token.
        prune_relative: Drop a continuation less than this many times as probable as the best of all beams.
        prune_absolute: Drop a continuation whose cumulative log-probability trails the best by more than this, in nats.
        prune_relative_local: Drop a continuation whose last token is less than this many times as probable as the most
            probable one after any beam.
        max_candidates_per_parent: Continue each beam in at most this many ways.
        phrase_boosts: Phrases and weights, as in `[("Kubernetes", 2.0)]`: hypotheses compete by their cumulative
            log-probability plus, for each phrase, its weight times the number of times that it occurs in them. A phrase
            is a text or a list of token ids; a weight may be negative. At most 10,000 tokens in all, 256 of a phrase,
            and 100,000 characters. In `vllm_xargs` also as a JSON text. See docs/constraints.md.
        contrast: Contrastive decoding, as in `{"model": "draft", "alpha": 0.1, "beta": 0.5}`, which are the defaults:
            hypotheses compete by the sum of `(1 + beta) * log p - beta * log q` over their tokens, where p is the
            model's probability and q the draft model's. A token must be at least `alpha` times as probable as the most
            probable one at its position. In `vllm_xargs` a JSON text. See docs/constraints.md.
        no_repeat_ngram_size: A hypothesis never completes an n-gram of this many tokens that occurs before in it or in
            the prompt; 0 allows all. As in transformers' `generate`.
    """

    semantics: Semantics | None = option(None)
    length_penalty: Number = option(1.0, _EXPONENT, gt=-MOST_VLLM_PENALTY, lt=MOST_VLLM_PENALTY)
    beam_widths: list[Annotated[int, Field(ge=1, lt=1 << 63)]] | None = option(
        None, _WIDTHS, min_length=1, max_length=MOST_WIDTHS, fail_fast=True
    )
    num_beam_groups: int = option(1, "is not a number of groups; pass an integer >= 1", ge=1)
    diversity_penalty: Number = option(0.0, _DIVERSITY, ge=0, le=MOST_DIVERSITY)
    prune_relative: Number | None = option(None, _RATIO, gt=0, le=1)
    prune_absolute: Number | None = option(None, _DIFFERENCE, ge=0, lt=math.inf)
    prune_relative_local: Number | None = option(None, _RATIO, gt=0, le=1)
    max_candidates_per_parent: int | None = option(None, _WAYS, ge=1)
    phrase_boosts: list[PhraseBoost] | None = option(
        None, _PHRASES, MOST_PHRASE_JSON, min_length=1, max_length=MOST_PHRASES, fail_fast=True
    )
    contrast: ContrastOption | None = option(None, _CONTRAST)
    no_repeat_ngram_size: int = option(0, _NGRAM, ge=0, le=MOST_NGRAM)

    @classmethod
    def fault(cls, name: str, options: Mapping[str, Any]) -> str:
        is_of_vllm = name == "length_penalty" and options.get("semantics") == "vllm"
        return _VLLM_EXPONENT if is_of_vllm else super().fault(name, options)


class Delivery(Options):
    """How hypotheses are returned.

    Args:
        compact: Return all hypotheses, `beam_width` of them, as arrays in the one output of the request (`n=1`), which
            `vllm_trie.hypotheses` reads.
        trace: Also return the search itself, as lists: the beams, finished hypotheses and drafts of all steps, which
            `vllm_trie.Trace` reads and `python -m vllm_trie.trace` draws. See docs/trace.md.
        beam_results: Return the `n` hypotheses a second time, with their scores, in SGLang's format. See
            docs/coming_from.md.
    """

    compact: bool = option(False)
    trace: bool = option(False)
    beam_results: bool = option(False)


class Reranking(Options):
    """In which order hypotheses are returned, offline and in batch jobs.

    Args:
        rerank: "mbr": by minimum Bayes risk. All `beam_width` hypotheses form a pool; the best `n` are those most
            similar to the whole pool by the metric. See docs/reranking.md.
        metric: The similarity of two texts: the name of one of sacrebleu's sentence metrics, or a callable that takes a
            list of `vllm_trie.HypothesisPair` and returns a number for each, the higher the better.
        rerank_scale: The weight of each hypothesis in the pool is its probability to this power; 0 weighs all equally,
            which is right for sampled hypotheses.
        rerank_confidence: Compare fewer pairs: drop a hypothesis once resampling shows with this confidence that it is
            not the best. None compares all.
    """

    rerank: Literal["mbr"] | None = option(None)
    metric: MetricName | Callable[..., Any] = option(
        "chrf", 'is not a metric; pass a callable, or one of "chrf", "chrf++", "bleu", "ter"'
    )
    rerank_scale: Number = option(0.0, _SCALE, ge=0, le=MOST_SCALE)
    rerank_confidence: Number | None = option(
        None, "is not a confidence; pass a number in (0, 1), such as 0.99", gt=0, lt=1
    )


class Sampling(Options):
    """Sampling of beams; an engine may set defaults for requests. None is unset.

    Args:
        do_sample: Sample the beams of each step from all continuations of all beams, by the product of their
            probabilities, instead of taking the best. Temperature and filters act on that joint distribution.
        replacement: Whether the same continuation may be sampled more than once.
    """

    do_sample: bool | None = option(None)
    replacement: bool | None = option(None)


class RequestSampling(Sampling):
    """Options of sampling that only requests have.

    Args:
        stochastic: Sample whole hypotheses without replacement by stochastic beam search, and return them in sampling
            order: the probability of each is the model's, at this temperature and after filters.
        sample_first: Sample this many tokens for each beam, independently and with replacement, before the search
            begins. A beam that samples a stop token is finished; beams that sample the same tokens stay identical.
    """

    stochastic: bool = option(False)
    sample_first: int = option(0, _TOKENS, ge=0)


class Catalogs(Options):
    """Items that hypotheses must be.

    Args:
        catalog: The engine's catalog whose items hypotheses must be. See docs/catalogs.md.
        allowed_sequences: The items themselves, strings or lists of token ids, instead of a catalog's name; in
            `extra_args` and `vllm_xargs` also as a JSON text. At most 2,000,000 tokens in all, and `max_model_len` of
            an item; or 8,000,000 characters in all, and 100,000 of an item.
        catalog_items: Items of a hypothesis, one after the other.
        catalog_after: Hypotheses begin freely; the items follow this token, an id or its text.
        catalog_stop: Whether a stop token must follow the last item, with its log-probability; otherwise the item
            itself ends the hypothesis.
        catalog_renormalize: Normalize each row's log-probabilities over the tokens that the catalog allows.
        catalog_unique: Return each item once, as its best hypothesis, even if several sequences have its id or several
            texts precede it: `beam_width` different items compete.
        exclude_items: Ids of items of the catalog that no hypothesis may have, up to 100,000, such as items that a user
            has seen or that are out of stock. In `vllm_xargs` also as a JSON text.
        exclude_list: The name of a list of such items, from the engine's option `exclude`.
    """

    catalog: str | None = option(None, "is not the name of a catalog; pass a string")
    allowed_sequences: Sequences | None = option(None, WRONG_SEQUENCES, MOST_SEQUENCE_JSON, MOST_SEQUENCES)
    catalog_items: int = option(1, "is not a number of items; pass an integer >= 1", ge=1)
    catalog_after: int | str | None = option(None, "is not a token; pass its id or its text")
    catalog_stop: bool = option(False)
    catalog_renormalize: bool = option(False)
    catalog_unique: bool = option(False)
    exclude_items: ExcludedItems | None = option(None, _ITEMS, MOST_EXCLUDED_JSON, MOST_EXCLUDED)
    exclude_list: str | None = option(None, "is not the name of a list of items; pass a string")


class Steps(Options):
    """Search by steps, `unit="step"`: each step is a text that is sampled and then scored.

    Args:
        step_stop: The delimiters that end a step; they are part of it.
        scorer: Scores each candidate: a callable, vLLM's `LLM` of a pooling model, or an endpoint: the name of one of
            the engine's `scorers`, or offline its URL.
        candidates: Steps that are sampled per beam: `beam_width` times as many per round in all.
        max_steps: Rounds; in the last one candidates go on to their end. By default as many as it takes.
        allot: How the candidates of a round are shared out: "even" evenly over the best `beam_width` candidates;
            "rebase" by softmax of scores among all that have not ended, less one for each that has; "dvts" over
            `beam_width` subtrees, each of which continues its best candidate.
        allot_temperature: Of the softmax of scores under "rebase": the lower, the more the best get.
        prefer_shared: Under "rebase", the price that beams pay from their shares of the candidates, which sum to 1,
            for the part of the KV cache that only they need; those that cannot pay are dropped. As ETS's lambda; 0
            drops none.
        order: What a round expands: "breadth" the candidates of the round before it; "best" the best of all that were
            never expanded, wherever they are in the tree; "mcts" those selected by the rule of Monte Carlo tree search
            (UCT), with scores as values.
        exploration: How strongly "mcts" prefers rarely visited candidates, for scores from 0 to 1.
        pool: Candidates that did not go on but may be returned to, and whose KV blocks are held as far as memory
            allows; the KV of others is computed again, with the same result. By default as many as a round samples.
        lookahead: Tokens that the model writes greedily after each candidate, for the scorer only; they are not part of
            the hypothesis.
    """

    step_stop: list[Annotated[str, Field(min_length=1, max_length=MOST_STOP_LENGTH)]] | None = option(
        None, _DELIMITERS, min_length=1, max_length=MOST_STOPS, fail_fast=True
    )
    scorer: Any = option(None, NO_SCORER, most_text=MOST_URL)
    candidates: int = option(4, "is not a number of candidates; pass an integer >= 1", ge=1)
    max_steps: int | None = option(None, "is not a number of steps; pass an integer >= 1", ge=1)
    allot: Allot = option("even")
    allot_temperature: Number = option(0.2, _TEMPERATURE, gt=0, lt=math.inf)
    prefer_shared: Number = option(0.0, _PRICE, ge=0, lt=math.inf)
    order: Order = option("breadth")
    exploration: Number = option(1.0, _EXPLORATION, ge=0, lt=math.inf)
    pool: int | None = option(None, "is not a number of candidates; pass an integer >= 0", ge=0)
    lookahead: int = option(0, _TOKENS, ge=0)


class Speculating(Options):
    """How a search speculates; an engine may set defaults for requests. None is unset.

    Args:
        speculation: "exact" takes several steps of plain beam search per forward pass of the model, with a draft model
            or n-grams; "sample" takes several steps of beam sampling, with a draft model; "off" does not speculate.
            "auto", the default in an engine with suitable drafts, is "sample" if beams are sampled, and otherwise
            "exact"; with a draft model, its forests then are of the size that pays, or none.
        draft_width: Drafts per layer, at least `beam_width`; by default twice as many, under "auto" up to four times.
        memory_mode: Of the beams after a forward pass, only the best goes on; the others need no KV blocks.
        min_width: With a threshold, the fewest beams of a layer, by default 1; `beam_width` is the most.
        threshold: A layer has as many beams as are accepted with this probability. By default it has `beam_width`.
    """

    speculation: Speculation | None = option(None)
    draft_width: int | None = option(None, NO_BEAMS, ge=1)
    memory_mode: bool | None = option(None)
    min_width: int | None = option(None, NO_BEAMS, ge=1)
    threshold: Number | None = option(None, "is not a probability; pass a number in (0, 1]", gt=0, le=1)


class RequestSpeculating(Speculating):
    """Options of speculation that only requests have.

    Args:
        accept: How drafts of sampled beams are accepted. "exact" keeps the target's distribution. "top_k" is inexact:
            it accepts every draft among the `accept_top_k` most probable continuations of all beams, and its outputs
            are marked `"is_exact": false`.
        accept_top_k: The rank up to which accept="top_k" accepts drafts; by default `beam_width`.
    """

    accept: Acceptance = option("exact")
    accept_top_k: int | None = option(None, _WAYS, ge=1)
