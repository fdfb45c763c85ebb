"""Compiles every kernel for a GPU that need not be there, and prints as JSON what each takes of it.

Run by a test, in a process of its own: where Triton interprets, it compiles nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_trie.speculation.worker.kernels import forest_growth, forest_layout
from vllm_trie.worker.attention import triton_kernels
from vllm_trie.worker.kernels import (
    CHILDREN,
    SLOTS,
    beams,
    controls,
    decide,
    in_groups,
    items,
    ordinary_rows,
    report,
    slots,
    step,
    tiles,
    wide_keys,
)
from vllm_trie.worker.kv import copies, kv_caches

HOPPER, AMPERE = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 80, 32)
ALIGNED = [["tt.divisibility", 16]]  # what Triton knows of a pointer or an int that is a multiple of 16
INT, LONG, LONGS, FLOATS = "i32", "i64", "*i64", "*fp32"
TABLES = {"table_pointers": "*u64", "table_strides": LONGS, "block_sizes": LONGS, "num_tables": INT}
SEGMENTS = {"pointers": "*u64", "of_block": LONGS, "words": LONGS} | dict.fromkeys(
    ["num_workers", "num_pieces", "num_tiles"], INT
)
OF_BATCH = "seq_lens", "expanded_local_pos", "input_ids"  # what of it is int32
MAPPINGS = "idx_mapping", "expanded_idx_mapping"
ATTENTION = (
    dict.fromkeys(["queries", "outputs", "cache"], "*bf16")
    | dict.fromkeys(["query_stride", "output_stride", "block_stride", "head_stride", "token_stride"], INT)
    | dict.fromkeys(
        ["tables", "places", "rows", "num_shared", "lengths", "spans", "first_tokens", "end_tokens"], "*i32"
    )
    | dict.fromkeys(["table_stride", "num_words", "num_parts", "count", "num_kv_heads"], INT)
    | {"sums": FLOATS, "logs": FLOATS, "scale": "fp32", "soft_cap": "fp32", "tree_starts": "*i32", "trees": LONGS}
)
SHARED: list[tuple[Any, ...]] = [  # head size, query heads per KV head, and what there is besides
    (64, 1),
    (64, 8, "window"),
    (80, 4),
    (128, 1),
    (128, 4),
    (128, 8, "window", "soft_cap"),
    (256, 4),
    (256, 8, "window", "soft_cap"),
]
OWN: list[tuple[Any, ...]] = [
    (64, 1),
    (64, 8, "window", "trees", "sinks"),
    (80, 4, "trees"),
    (128, 1, "soft_cap"),
    (128, 4),
    (128, 4, "window", "soft_cap", "trees", "sinks"),
    (128, 8, "trees"),
    (256, 4, "trees"),
    (256, 8, "window", "soft_cap", "trees"),
]


LOGITS = (
    {"logits": "*bf16", "index": LONGS, "classes": "*i8", "mixed": "*i32"}
    | dict.fromkeys(["stride", "vocab_size"], INT)
    | {"temperature": "fp32"}
)
TILES = LOGITS | dict.fromkeys(["going", "ending", "maxima", "sums"], FLOATS) | {"num_mixed": INT}
RANKED = dict.fromkeys(["num_blocks", "num_rows", "count", "first_list", "among_best"], INT) | {
    "scores": FLOATS,
    "log_min_p": "fp32",
    "keys": LONGS,
    "normal": FLOATS,
}
WORDS = {"words": "*i32"} | dict.fromkeys(["num_words", "num_ints", "width", "count", "num_rows"], INT)
SELECTED = (
    dict.fromkeys(["keys", "room", "next_parents", "next_tokens", "places", "sampled"], LONGS)
    | dict.fromkeys(["of_group", "kept", "num_bits", "num_places", "going", "ending", "num_key_bits"], INT)
    | dict.fromkeys(["num_ended", "semantics", "sampled_stride"], INT)
    | {"next_scores": FLOATS, "is_last": "u1"}
)
TRIE = {"states": LONGS, "first_child": "*i32", "node_tokens": "*i32", "num_level": INT, "level_bits": INT}
AMONG = (
    ("maxima", "sums"),
    ("level",),
)  # all tokens, or those of a level: what kernels along a catalog take in each case
CLOSED = {"closed": LONGS, "num_closed": INT, "closed_bits": INT}  # where items are excluded
ALONG = {"states": LONGS, "first_node": "*i32", "node_tokens": "*i32", "is_item": "*i8", "targets": LONGS}


def to_rank(kept: int, blocks: int = 64) -> tuple[Any, ...]:
    """The kernel that ranks each row, for so many continuations of it."""
    sizes = tiles.kernel_sizes_to_rank(blocks, kept)
    return tiles._rank_rows_kernel, TILES | RANKED, sizes, tiles.warps_to_rank(kept)


def to_select(slots: int, is_along: bool, excludes: bool = False) -> tuple[Any, ...]:
    """The kernel that decides what goes on and what finishes; 0: of many beams, whose keys are in order."""
    types = SELECTED | WORDS | (ALONG if is_along else {}) | (CLOSED if excludes else {})
    nodes = dict.fromkeys((*(() if is_along else ALONG), *(() if excludes else CLOSED)))
    if not slots:
        sizes = decide.kernel_sizes_to_select_of_many()
        return decide._select_kernel, types | {"room": "*i32"}, sizes | nodes, decide.NUM_WARPS
    sizes = decide.kernel_sizes_to_select(slots, slots)
    return decide._select_kernel, types, sizes | nodes, decide.warps_to_select(sizes["lanes"])


def to_select_in_groups(slots: int, per_row: int) -> tuple[Any, ...]:
    """The kernel that does so group after group."""
    sizes = decide.kernel_sizes_to_select(slots, per_row)
    of_groups = dict.fromkeys(["num_groups", "most", "padding", "num_done"], INT) | {"penalty": "fp32", "may_end": "u1"}
    of_groups |= {"normal": FLOATS, "scores": FLOATS, "done": LONGS, "taken": LONGS}
    types = LOGITS | SELECTED | WORDS | of_groups
    return in_groups._select_in_groups_kernel, types, sizes, decide.warps_to_select(sizes["lanes"])


IN_GROUPS = (4, 16), (16, 16), (4, 64), (16, 64), (32, 64)  # slots, and continuations kept of each row


def along(
    kernel: Any, types: dict[str, str], sizes: dict[str, Any], num_warps: int, if_closed: int | None = None
) -> Iterator[tuple[Any, ...]]:
    """A kernel along a catalog, of rows that are normalised among all tokens, and among those of a level.

    Both without items that are excluded, and with some, for which it may have another number of warps.
    """
    for (taken, left_out), closed in product((AMONG, AMONG[::-1]), ({}, CLOSED)):
        own = {name: kind for name, kind in types.items() if name not in left_out} | closed
        own |= {"level": LONGS} if "level" in taken else {}
        nothing = (*left_out, *(() if closed else CLOSED))
        constants = sizes | {name: None for name in nothing if name in kernel.arg_names}
        yield kernel, own, constants, (if_closed or num_warps) if closed else num_warps


def to_rank_items(children: int) -> Iterator[tuple[Any, ...]]:
    """The kernel that ranks the children of each row's node, of which there are so many at most."""
    sizes = items.kernel_sizes_to_rank_items(38, children)
    warps = (items.warps_to_rank_items(children, excludes) for excludes in (False, True))
    yield from along(items._rank_items_kernel, TILES | RANKED | TRIE, sizes, *warps)


def to_report(per_row: int) -> tuple[Any, ...]:
    """The kernel that writes log-probabilities."""
    types = LOGITS | WORDS | {"keys": LONGS, "normal": FLOATS, "num_tops": INT}
    return report._write_logprobs_kernel, types, {"per_row": per_row, "block": tiles.BLOCK}, report.WARPS_TO_REPORT


OF_MANY = {"chosen": LONGS, "of_rows": FLOATS, "first_child": "*i32", "ends": LONGS} | dict.fromkeys(
    ["num_chosen", "num_tiles", "num_groups", "most", "num_places", "num_ends", "most_better"], INT
)


def of_many(kernel: Any, sizes: dict[str, Any], num_warps: int) -> tuple[Any, ...]:
    """A kernel of steps of many beams."""
    return kernel, RANKED | WORDS | OF_MANY | TRIE | TILES, sizes, num_warps


PARTS = {"tile": tiles.TILE, "lanes": wide_keys.KEYS_AT_A_TIME}
OF_CHILDREN = {"slots": decide.SLOTS_AT_A_TIME, "part": decide.CHILDREN_AT_A_TIME}
MANY = [
    *(
        of_many(
            wide_keys._rank_blocks_kernel,
            wide_keys.kernel_sizes_to_rank_blocks(blocks),
            wide_keys.warps_to_rank_blocks(blocks),
        )
        for blocks in (16, step.MOST_BLOCKS)
    ),
    of_many(wide_keys._rank_tiles_kernel, PARTS | {"tiles": tiles.TILES}, wide_keys.WARPS_TO_SPLIT),
    of_many(wide_keys._rank_tokens_kernel, PARTS, wide_keys.WARPS_TO_SPLIT),
    of_many(decide._find_first_children_kernel, OF_CHILDREN, decide.NUM_WARPS),
    *along(
        *of_many(items._rank_item_tiles_kernel, items.kernel_sizes_to_rank_tiles(step.MOST_BLOCKS), items.WARPS_TO_RANK)
    ),
    *along(*of_many(items._rank_items_of_tiles_kernel, PARTS, wide_keys.WARPS_TO_SPLIT)),
]


GROWING = (
    dict.fromkeys(["about", "parents", "tokens", "rows", "ends", "counts", "totals", "tables"], "*i32")
    | dict.fromkeys(["reached", "spare"], "*i32")
    | dict.fromkeys(["masks", "slots", "keys", "stops", "order"], LONGS)
    | {"scores": FLOATS, "block_sizes": "*i32"}
    | dict.fromkeys(["vocab_size", "num_bits", "first_of_layer", "num_totals", "num_words", "num_nodes"], INT)
    | dict.fromkeys(["num_rows", "columns", "num_forests", "most_spare", "num_tables"], INT)
)


def to_draft(slots: int, per_row: int) -> tuple[Any, ...]:
    """The kernel that drafts a layer of each forest."""
    sizes = forest_growth.kernel_sizes_to_draft(slots, per_row)
    types = {name: kind for name, kind in GROWING.items() if name != "slots"}
    return forest_growth._draft_nodes_kernel, types, sizes, decide.warps_to_select(sizes["lanes"])


def to_place(lanes: int) -> tuple[Any, ...]:
    """The kernel that finds rows, masks, blocks and slots for it."""
    constants = {"lanes": lanes, "chunk": forest_growth.NODES_AT_A_TIME}
    return forest_growth._place_draft_nodes_kernel, GROWING, constants, forest_growth.warps_to_place_drafts(lanes)


def to_lay_out() -> tuple[Any, ...]:
    """The kernel that puts all layers where the target reads them."""
    types = GROWING | dict.fromkeys(["layout", "batch_tokens", "of_rows", "of_ends"], "*i32")
    types |= dict.fromkeys(["batch_positions", "batch_slots", "tokens_at", "logits_at", "places"], LONGS)
    types |= dict.fromkeys(["of_masks", "at"], LONGS) | dict.fromkeys(["num_columns", "slot_stride", "num_keys"], INT)
    return forest_layout._lay_out_forest_nodes_kernel, types, {"lanes": forest_layout.LANES}, forest_layout.NUM_WARPS


def attention(head_size: int, heads: int, *besides: str) -> dict[str, Any]:
    """What both kernels of attention are compiled with."""
    return {
        "heads": heads,
        "head_size": head_size,
        "padded_size": triton.next_power_of_2(head_size),
        "block_size": 16,
        "keys_at_a_time": triton_kernels.KEYS,
        **{f"has_{name}": name in besides for name in ("window", "soft_cap")},
    }


def to_shared(head_size: int, *others: Any) -> tuple[Any, ...]:
    """The first kernel of attention, and what else `compiled` takes."""
    constants = attention(head_size, *others) | {"tile": triton_kernels.TILE}
    stages = triton_kernels.warps_of_attention_tile(head_size), triton_kernels.NUM_STAGES
    return triton_kernels._attend_to_shared_kernel, ATTENTION, constants, *stages


def to_own(head_size: int, heads: int, *besides: str) -> tuple[Any, ...]:
    """The second one likewise."""
    has = {f"has_{name}": name in besides for name in ("trees", "sinks")}
    padded_heads = max(triton.next_power_of_2(heads), triton_kernels.LEAST_QUERIES)
    constants = attention(head_size, heads, *besides) | has | {"padded_heads": padded_heads}
    types = ATTENTION | ({"sinks": "*bf16"} if has["has_sinks"] else {})
    constants |= {} if has["has_sinks"] else {"sinks": None}
    stages = triton_kernels.NUM_WARPS, triton_kernels.NUM_STAGES
    return triton_kernels._attend_to_own_kernel, types, constants, *stages


CASES: list[tuple[Any, ...]] = [
    *(
        (
            slots._select_next_kernel,
            dict.fromkeys(["parents", "tokens", "next_parents", "next_tokens"], LONGS)
            | {"scores": FLOATS, "next_scores": FLOATS, "lives": "*i8"}
            | dict.fromkeys(["count", "width", "num_rows"], INT),
            {"slots": num_slots, "chunk": slots.kernel_candidates_at_once(num_slots)},
            slots.warps_to_select_next(num_slots),
        )
        for num_slots in (4, 64, 512, slots.MOST_SLOTS)
    ),
    (
        copies._fork_kv_kernel,
        {"rows": LONGS, "parents": LONGS, "num_rows": INT, "tokens": "*i32", "tokens_stride": INT} | TABLES | SEGMENTS,
        {"word": tl.int64, "tile_size": copies.COPY_TILE},
        4,
        1,
    ),
    (
        copies._copy_kv_blocks_kernel,
        {"chains": LONGS, "num_chains": INT} | SEGMENTS,
        {"held": kv_caches.HELD, "word": tl.int64, "tile_size": copies.COPY_TILE},
        4,
        1,
    ),
    *(
        (
            copies._hold_kv_tokens_kernel,
            {"moves": LONGS, "held": LONGS, "pointers": "*u64", "token_words": INT, "num_workers": INT}
            | dict.fromkeys(["of_block", "of_token", "words", "offsets"], LONGS),
            {"word": tl.int64, "is_read": is_read, "tile_size": copies.TOKEN_TILE},
            4,
        )
        for is_read in (True, False)
    ),
    (
        controls._take_newest_kernel,
        dict.fromkeys(["at", "logits_indices", "positions", "own_positions"], LONGS)
        | {"input_ids": "*i32", "own_input_ids": "*i32", "count": INT},
        {"tile_size": controls.TILE},
        4,
    ),
    (
        controls._reorder_counts_kernel,
        {"rows": LONGS, "parents": LONGS, "counts": "*i32"}
        | dict.fromkeys(["num_rows", "counts_stride", "vocab_size"], INT),
        {"tile_size": controls.COUNTS_TILE},
        4,
    ),
    (
        ordinary_rows._take_rows_kernel,
        dict.fromkeys(["rows", "logits", "moved", "tokens", "logits_indices", "own_logits_indices"], LONGS)
        | dict.fromkeys([f"{own}{name}" for own in ("", "own_") for name in ("positions", *MAPPINGS)], LONGS)
        | dict.fromkeys(["num_rows", "num_logits", "num_tokens"], INT)
        | dict.fromkeys([own + name for own in ("", "own_") for name in OF_BATCH], "*i32")
        | dict.fromkeys(["is_padding", "own_is_padding"], "*i8"),
        {"tile_size": ordinary_rows.TILE},
        4,
    ),
    (
        ordinary_rows._put_sampled_kernel,
        dict.fromkeys(["rows", "own_sampled", "sampled"], LONGS)
        | dict.fromkeys(["own_counts", "own_rejected", "counts", "rejected"], "*i32")
        | dict.fromkeys(["num_rows", "width", "own_stride", "sampled_stride"], INT),
        {"tile_size": ordinary_rows.TILE},
        4,
    ),
    *(
        (
            beams._take_up_beams_kernel,
            {"rows": LONGS, "groups": LONGS, "scale": INT, "num_rows": INT, "scores": FLOATS} | states,
            {"part": beams.PART} | ({} if states else {"states": None}),
            4,
        )
        for states in ({}, {"states": LONGS})
    ),
    *(
        (
            beams._put_down_beams_kernel,
            {"groups": LONGS, "width": INT, "scores": FLOATS, "tokens": LONGS, "words": "*i32", "decided": "*i32"}
            | {"count": INT}
            | states,
            {"part": beams.PART} | ({} if states else {"states": None}),
            4,
        )
        for states in ({}, {"states": LONGS})
    ),
    (tiles._tile_max_kernel, TILES, {"tiles": tiles.TILES, "tile": tiles.TILE}, tiles.WARPS_TO_READ),
    to_rank(SLOTS[0], blocks=1),
    *(to_rank(kept) for kept in sorted({*report.REPORTED, *(kept for _, kept in forest_growth.SIZES)})),
    *(to_select(slots, *along) for slots in (0, *SLOTS) for along in ((False,), (True,), (True, True))),
    *(to_select_in_groups(slots, per_row) for slots, per_row in IN_GROUPS),
    *(case for children in CHILDREN for case in to_rank_items(children)),
    *MANY,
    *(to_report(per_row) for per_row in report.REPORTED),
    *(to_draft(*sizes) for sizes in forest_growth.SIZES),
    *(to_place(lanes) for lanes in forest_growth.LANES),
    to_lay_out(),
    *(to_shared(*case) for case in SHARED),
    *(to_own(*case) for case in OWN),
]


def compiled(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    num_warps: int,
    num_stages: int = 3,
    target: GPUTarget = HOPPER,
) -> dict[str, Any]:
    """Compile a kernel as it is compiled when it is launched: for pointers and strides that are multiples of 16.

    Those are left out of which the kernel says that they need not be.

    Returns:
        Bytes of shared memory, whether there are atomics, and what is said of registers, stack and local memory.
    """
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    known = {
        (param.num,): ALIGNED
        for param in kernel.params
        if (signature[param.name].startswith("*") or signature[param.name] in (INT, LONG))
        and not (param.do_not_specialize or param.do_not_specialize_on_alignment)
    }
    options = {"num_warps": num_warps, "num_stages": num_stages}
    code = triton.compile(ASTSource(kernel, signature, values, known), target, options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "cubin"
        cubin.write_bytes(code.asm["cubin"])
        dump = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
        usage = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    has_atomics = bool(re.search(r"\b(atom|red)\.", code.asm["ptx"]))
    about = {"name": kernel.__name__, "head_size": constants.get("head_size"), "constants": repr(constants)}
    return about | {"shared": code.metadata.shared, "atomics": has_atomics, "usage": usage, "arch": target.arch}


if __name__ == "__main__":
    largest = [case for case in CASES if case[2].get("head_size") == triton_kernels.MOST_HEAD_SIZE]
    results = [compiled(*case) for case in CASES] + [compiled(*case, target=AMPERE) for case in largest]
    print(json.dumps(results))
