"""Catalogs in the front end: checks requests that use them, and new versions of their files."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import ref

from vllm.tokenizers import cached_tokenizer_from_config

from vllm_trie.catalog import Catalog, CatalogStore, check_structure, tokenizer_digest
from vllm_trie.engine.catalog_exclusion import (
    SentExclusion,
    item_list_digest,
    read_item_list,
    why_nothing_is_excluded,
)
from vllm_trie.engine.catalogs import num_engine_beams_along
from vllm_trie.entrypoints.requests.refusals import refuse_request_half_characters
from vllm_trie.options import PLUGIN_NAME, BeamParams
from vllm_trie.options.item_ids import ItemIds
from vllm_trie.options.shown import listed_option_names, shown_option, shown_option_name
from vllm_trie.sampling_params import sampling_params_stops
from vllm_trie.supported_engines import has_beams, plugin_config_of, why_without_beams

if TYPE_CHECKING:
    import numpy as np
    from vllm.config import ModelConfig, VllmConfig
    from vllm.sampling_params import SamplingParams

_stores: dict[str, CatalogStore] = {}  # by engine instance
_item_lists: dict[str, dict[str, ItemListVersion]] = {}  # by engine instance, by name


class ItemListVersion(NamedTuple):
    """What the front end keeps of a list of items to exclude; the engine has the list itself."""

    items: int
    digest: str

    @classmethod
    def of(cls, ids: np.ndarray) -> Self:
        """The version with these ids [n] int64."""
        return cls(len(ids), item_list_digest(ids))


def catalogs_for_requests(vllm_config: VllmConfig) -> CatalogStore:
    """The catalogs of an engine, checked when they are opened.

    Raises:
        ValueError: a file is not a catalog, is not a valid trie, or is for another vocabulary; or a list is not valid.
    """
    if (store := _stores.get(vllm_config.instance_id)) is None:
        files = plugin_config_of(vllm_config).catalogs.items()
        store = CatalogStore(
            {name: _checked_catalog_for_requests(path, vllm_config.model_config) for name, path in files}
        )
        item_lists_for_requests(vllm_config)  # checked at the start, too
        _stores[vllm_config.instance_id] = store
    return store


def item_lists_for_requests(vllm_config: VllmConfig) -> dict[str, ItemListVersion]:
    """The lists of items to exclude of an engine, by name.

    Raises:
        ValueError: a file is not a list of items.
    """
    if (known := _item_lists.get(vllm_config.instance_id)) is None:
        files = plugin_config_of(vllm_config).exclude.items()
        known = _item_lists[vllm_config.instance_id] = {
            name: ItemListVersion.of(read_item_list(path)) for name, path in files
        }
    return known


def new_catalog_for_requests(vllm_config: VllmConfig, name: str, file: str) -> tuple[str, Catalog]:
    """Open a file that is to become a catalog of a running engine. Returns its path and the catalog.

    Raises:
        ValueError: there is no such catalog, or the engine may not take this file.
    """
    path = _new_file_for_requests(vllm_config, "catalog", name, file)
    return path, _checked_catalog_for_requests(path, vllm_config.model_config)


def new_item_list_for_requests(vllm_config: VllmConfig, name: str, file: str) -> tuple[str, ItemListVersion]:
    """Read a file that is to become a list of items of a running engine. Returns its path and the version.

    Raises:
        ValueError: there is no such list, or the engine may not take this file.
    """
    path = _new_file_for_requests(vllm_config, "exclude_list", name, file)
    return path, ItemListVersion.of(read_item_list(path))


def _new_file_for_requests(vllm_config: VllmConfig, option: str, name: str, file: str) -> str:
    """The path of a file that is to replace the catalog or list `name`."""
    if not has_beams(vllm_config):
        raise ValueError(f"there are no catalogs {why_without_beams(vllm_config)}")
    config = plugin_config_of(vllm_config)
    _refuse_unknown_name(option, name, config.exclude if option == "exclude_list" else config.catalogs)
    if config.catalog_folder is None:
        start = f'additional_config={{"{PLUGIN_NAME}": {{"catalogs": {{NAME: FILE}}, "catalog_folder": FOLDER}}}}'
        raise ValueError(f"this engine does not load new catalogs; start it with {start}")
    folder = Path(config.catalog_folder).resolve()
    try:
        path = (folder / file).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # such as a loop of links
        raise ValueError(f"file={shown_option(file)} cannot be read: {shown_option_name(error)}") from None
    if path.parent != folder:
        raise ValueError(
            f"file={shown_option(file)} is not in {PLUGIN_NAME}.catalog_folder; pass the name of a file there"
        )
    return str(path)


def resolve_request_items(
    params: SamplingParams,
    beam: BeamParams,
    item_set: Catalog | None,
    vllm_config: VllmConfig,
    tokenizer: Any,
) -> tuple[BeamParams, int]:
    """Check a request against its catalog. If items end hypotheses, their last tokens become part of the text.

    Args:
        params: The request's own copy, with `max_tokens` and stop tokens filled in.
        beam: Its options.
        item_set: The set that came with it; if None, it names a catalog.
        tokenizer: None if the engine has none.

    Returns:
        The options with ids in place of text, and how many different beams there can be.

    Raises:
        ValueError: names the option, its value and what would work.
    """
    if not beam.catalog_stop:
        params.include_stop_str_in_output = True
    if item_set is not None:
        catalog, what = item_set, "allowed_sequences"
    else:
        catalog, what = _catalog_of_request(beam, vllm_config), f"catalog={shown_option(beam.catalog)}"
    after = _request_catalog_token(beam.catalog_after, vllm_config.model_config.get_vocab_size(), tokenizer)
    if after in sampling_params_stops(params):
        raise ValueError(
            f"catalog_after={shown_option(beam.catalog_after)} is a stop token, which ends hypotheses before "
            "their items; "
            "pass another one, or leave it out of stop_token_ids, or if it is an EOS token set ignore_eos=True"
        )
    _check_catalog_fits_request(params, beam, catalog, what)
    beam = beam.model_copy(update={"allowed_sequences": None, "catalog_after": after, "exclude_items": None})
    return beam, num_engine_beams_along(beam, catalog.num_items, len(sampling_params_stops(params)))


def _check_catalog_fits_request(params: SamplingParams, beam: BeamParams, catalog: Catalog, what: str) -> None:
    """Refuse a request that this catalog cannot answer."""
    needed = beam.catalog_items * catalog.shortest + (beam.catalog_after is not None)
    if params.max_tokens is not None and params.max_tokens < needed:
        raise ValueError(
            f"max_tokens={params.max_tokens} is too few for {what}, whose shortest hypothesis has {needed} tokens; "
            f"raise it"
        )
    if beam.catalog_items > 1 and not catalog.is_prefix_free:
        raise ValueError(
            f"catalog_items={beam.catalog_items} does not work with {what}, in which one item is a prefix of another: "
            f"where an item ends would be ambiguous; end each item with a token that no item has elsewhere"
        )
    if beam.catalog_stop and not sampling_params_stops(params):
        raise ValueError("catalog_stop=True needs a stop token; leave ignore_eos out, or add stop_token_ids")
    if beam.catalog_unique:
        _check_unique_items_fit_request(beam, catalog, what, len(sampling_params_stops(params)))


def _check_unique_items_fit_request(beam: BeamParams, catalog: Catalog, what: str, num_stop_tokens: int) -> None:
    """Refuse a search that would have to consider too many continuations to find different items."""
    from vllm_trie.engine.unique_catalog_items import MOST_ENDING, widest_engine_search_of_unique_items  # few need it

    widest = widest_engine_search_of_unique_items(beam, catalog, num_stop_tokens)
    if widest < beam.beam_width:
        raise ValueError(
            f"catalog_unique=True with {beam.beam_width} beams would look for different items of {what} among more "
            f"than {MOST_ENDING:,} continuations in a step; search with at most {widest} beams"
        )


def sent_request_exclusion(beam: BeamParams, vllm_config: VllmConfig) -> SentExclusion | None:
    """The items of `exclude_items`, looked up in the catalog of the request.

    Raises:
        ValueError: names the option and what would work.
    """
    if beam.exclude_list is not None:
        _refuse_unknown_name("exclude_list", beam.exclude_list, plugin_config_of(vllm_config).exclude)
    catalog = _catalog_of_request(beam, vllm_config)
    if refusal := why_nothing_is_excluded(catalog, beam.catalog_items):
        raise ValueError(refusal)
    if beam.exclude_items is None:
        return None
    try:
        return _looked_up_exclusion(ref(catalog), ItemIds.of(beam.exclude_items))
    except ValueError as error:
        raise ValueError(f"exclude_items: {error}") from None


@lru_cache(maxsize=8)  # prompts with the same parameters, and returning users, exclude the same items
def _looked_up_exclusion(catalog: ref[Catalog], item_ids: ItemIds) -> SentExclusion:
    version = catalog()
    assert version is not None
    return SentExclusion.of(version, item_ids.numbers)


def _catalog_of_request(beam: BeamParams, vllm_config: VllmConfig) -> Catalog:
    """The present version of the catalog that a request names."""
    known = catalogs_for_requests(vllm_config)
    _refuse_unknown_name("catalog", beam.catalog, known.names)
    return known[str(beam.catalog)]


def _refuse_unknown_name(option: str, name: str | None, known: Collection[str]) -> None:
    """Refuse the name of a catalog or list that the engine does not have."""
    if name not in known:
        of_engine = "catalogs" if option == "catalog" else "exclude"
        start = f'start it with additional_config={{"{PLUGIN_NAME}": {{"{of_engine}": {{NAME: FILE}}}}}}'
        names = f"known: {listed_option_names(known)}" if known else f"this engine has none; {start}"
        raise ValueError(f"{option}={shown_option(name)} is unknown; {names}")


def _request_catalog_token(token: int | str | None, vocab_size: int, tokenizer: Any) -> int | None:
    """The token id of `catalog_after`."""
    if isinstance(token, str):
        if tokenizer is None:
            raise ValueError(f"catalog_after={shown_option(token)} needs a tokenizer; pass the token's id")
        refuse_request_half_characters("catalog_after", token)
        ids = tokenizer.encode(token, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(
                f"catalog_after={shown_option(token)} is {len(ids)} tokens; pass text that is one token, or its id"
            )
        return int(ids[0])
    if token is not None and not 0 <= token < vocab_size:
        raise ValueError(f"catalog_after={shown_option(token)} is not a token id; the vocabulary has {vocab_size}")
    return token


def _checked_catalog_for_requests(path: str, model_config: ModelConfig) -> Catalog:
    catalog = Catalog.open(path)
    check_structure(catalog)
    digest = None
    if catalog.tokenizer is not None and not model_config.skip_tokenizer_init:
        digest = tokenizer_digest(cached_tokenizer_from_config(model_config))
    catalog.check_fits(model_config.get_vocab_size(), digest)
    return catalog
