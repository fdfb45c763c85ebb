"""The options of one engine, parsed from its `additional_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator

from vllm_trie.options.matrix import refuse_options
from vllm_trie.options.parts import NO_BEAMS, Sampling, Semantics, Speculating
from vllm_trie.options.request import OPTIONS
from vllm_trie.options.shown import shown_option
from vllm_trie.options.table import option, option_meant_by

PLUGIN_NAME = "trie_beam"
MOST_TABLES = 1 << 31  # bytes: searches number the parts of these tables by 19 bits
_TABLES = f"is not a number of bytes; pass an integer from 0 to {MOST_TABLES:,}"


def _checked_url(url: str) -> str:
    parts = urlsplit(url)  # raises a ValueError, as its port does
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError
    return url


class EngineOptions(Speculating, Sampling):
    """The options of one engine.

    Those of sampling and speculation are defaults for requests that do not set them, unless they clash with these.

    Args:
        reclaim_interval: Steps after which a group returns KV blocks that no beam uses any more to vLLM's pool. They
            are returned earlier when free blocks run low, and in any case when the group ends.
        max_beam_width: The widest search a request may ask for; without `memory_mode`, `max_num_seqs` limits it in
            any case. On a GPU CUDA graphs are captured up to it, unless the sizes to capture are set.
        semantics: The semantics of requests that name none.
        check_invariants: Check every trie after every step; for tests and bug reports, slow.
        debug_rank_check: Compare the decisions of all tensor parallel ranks in every step, and stop the engine if they
            differ; for tests and bug reports, slow.
        catalogs: Files of catalogs, by the names that requests use; `python -m vllm_trie.catalog build` makes them.
        catalog_folder: The folder from which a running engine may load new versions of its catalogs and lists.
        exclude: Files of item ids, one per line, by the names by which requests exclude these items.
        request_tables_bytes: Bytes of each device for the tables of running requests: `allowed_sequences`, 9 bytes for
            each distinct prefix of one, and `phrase_boosts`. Requests that do not fit at the moment wait; a request
            that needs more is refused. On a GPU this memory is set aside while vLLM measures what is left for its KV
            cache.
        scorers: Endpoints that score steps, by the names that requests use; clients of a server can use no others.
        shared_prefix_attention: Attention reads the KV blocks that all beams share once for all of them: "auto" where
            measurements on CPUs and on a GPU, there in FlashAttention layers, showed that it pays; "on" wherever it
            can; "off" never.
        vllm_check: What to do if vLLM differs from the recorded version: "strict" refuses to start; "warn" starts with
            a warning if the difference may still fit; "off" does not compare. By default the value of
            `VLLM_TRIE_CHECK`, or else "warn".
    """

    prefix: ClassVar[str] = f"{PLUGIN_NAME}."
    reclaim_interval: int = option(15, "is not a number of steps; pass an integer >= 1", ge=1)
    max_beam_width: int | None = option(None, NO_BEAMS, ge=1)
    semantics: Semantics = option("hf")
    check_invariants: bool = option(False)
    debug_rank_check: bool = option(False)
    catalogs: dict[str, str] = option({}, 'is not a mapping of names to files; pass {"items": "items.catalog"}')
    exclude: dict[str, str] = option({}, 'is not a mapping of names to files; pass {"blocked": "blocked.txt"}')
    catalog_folder: str | None = option(None, "is not a folder; pass its path")
    request_tables_bytes: int = option(128 << 20, _TABLES, ge=0, le=MOST_TABLES)
    scorers: dict[str, Annotated[str, AfterValidator(_checked_url)]] = option(
        {}, 'is not a mapping of names to URLs; pass {"prm": "http://host:8000/classify"}'
    )
    shared_prefix_attention: Literal["auto", "on", "off"] = option("auto")
    vllm_check: Literal["strict", "warn", "off"] | None = option(None)

    @classmethod
    def from_additional_config(cls, additional_config: Mapping[str, Any] | None) -> EngineOptions:
        """Parse `additional_config["trie_beam"]`.

        Raises:
            ValueError: an unknown option, or a value out of range.
        """
        options = (additional_config or {}).get(PLUGIN_NAME, {})
        if not isinstance(options, Mapping):
            raise ValueError(
                f'additional_config["{PLUGIN_NAME}"]={shown_option(options)} is not a mapping of options; pass {{}}'
            )
        return cls(**{str(name): value for name, value in options.items()})

    @property
    def has_files(self) -> bool:
        """Whether the engine reads catalogs or lists when it starts."""
        return bool({**self.catalogs, **self.exclude})

    def check(self) -> None:
        """Refuse defaults of `do_sample` and `speculation` that contradict each other."""
        refuse_options({"do_sample": self.do_sample, "speculation": self.speculation}, self.prefix)

    @classmethod
    def cure(cls, name: str) -> str:
        meant = option_meant_by(name, [*cls.model_fields, *OPTIONS], cutoff=0.6)
        is_of_requests = meant is not None and " " not in meant and meant not in cls.model_fields
        return f"{meant} is an option of requests, not of the engine" if is_of_requests else super().cure(name)
