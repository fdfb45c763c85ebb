r"""The format of a catalog, in a file and between processes; all numbers are little-endian.

| bytes | content |
|---|---|
| 0 to 7 | `b"TRIECAT\n"` |
| 8 to 11 | version of the format |
| 12 to 15 | h, the length of the header in bytes |
| 16 to 23 | length of all in bytes |
| 24 to 55 | SHA-256 of bytes 8 to 23 and of all from byte 56 on |
| 56 to 55 + h | `CatalogHeader` in JSON, padded with spaces |
| from a multiple of 64 on | `CatalogArrays`, one after the other |
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import msgspec
import numpy as np

from vllm_trie.catalog.arrays import CatalogArrays, catalog_level_starts

MAGIC, VERSION = b"TRIECAT\n", 1
PREAMBLE, ALIGNMENT = struct.Struct("<8sIIQ"), 64
START = PREAMBLE.size + hashlib.sha256().digest_size  # of the header
AGAIN = "build it again with python -m vllm_trie.catalog build"


@dataclass(frozen=True, kw_only=True, eq=False)
class CatalogHeader:
    """The metadata of a catalog."""

    num_items: int
    num_nodes: int
    vocab_size: int | None  # token ids are below this; None if unknown when it was built
    tokenizer: str | None  # `tokenizer_digest` of the tokenizer that it was built with
    shortest: int  # item, in tokens
    longest: int
    most_children: list[int]  # by depth, from the root's 0 to longest - 1
    is_prefix_free: bool  # no item is a prefix of another
    max_token: int

    @classmethod
    def of(cls, arrays: CatalogArrays, vocab_size: int | None, tokenizer: str | None) -> CatalogHeader:
        starts = catalog_level_starts(arrays.first_child)
        num_children = np.diff(arrays.first_child)
        return cls(
            num_items=len(arrays.item_ids),
            num_nodes=len(arrays.tokens),
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            shortest=int(np.searchsorted(starts, arrays.is_item.argmax(), side="right")) - 1,
            longest=len(starts) - 2,
            most_children=[int(num_children[level].max()) for level in map(slice, starts[:-2], starts[1:-1])],
            is_prefix_free=not num_children[arrays.is_item].any(),
            max_token=int(arrays.tokens.max()),
        )


def pack_catalog(header: CatalogHeader, arrays: CatalogArrays) -> bytes:
    """A catalog in this format."""
    text = msgspec.json.encode(header)
    text += b" " * (-(START + len(text)) % ALIGNMENT)
    body = [memoryview(text), *(array.data for array in arrays)]
    preamble = PREAMBLE.pack(MAGIC, VERSION, len(text), START + sum(part.nbytes for part in body))
    return b"".join([preamble, _catalog_digest(preamble, *body), *body])


def unpack_catalog(data: memoryview, name: str, checks: bool) -> tuple[str, CatalogHeader, CatalogArrays]:
    """The parts of a catalog in this format.

    Args:
        name: Its name in errors.
        checks: Whether to verify its checksum, which reads all of it.

    Returns:
        Its digest in hex, its header, and views of its arrays.

    Raises:
        ValueError: it is not a catalog, has another version, or is damaged.
    """
    if len(data) < START or data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"{name} is not a catalog; build one with python -m vllm_trie.catalog build")
    _, version, length, size = PREAMBLE.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"{name} is a catalog of format {version}, and this vllm_trie reads {VERSION}; {AGAIN}")
    if size != len(data):
        raise ValueError(f"{name} is cut short or damaged: {len(data)} bytes of {size}; copy it again, or {AGAIN}")
    digest = data[PREAMBLE.size : START]
    if checks and _catalog_digest(data[: PREAMBLE.size], data[START:]) != digest:
        raise ValueError(f"{name} is damaged: its checksum is wrong; copy it again, or {AGAIN}")
    start = START + length
    try:
        header = msgspec.json.decode(data[START:start], type=CatalogHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ValueError(f"{name} is not a catalog: its header cannot be read; {AGAIN}") from None
    num_items, num_nodes = header.num_items, header.num_nodes
    counts = [(np.int64, num_items), (np.int32, num_nodes + 1), (np.int32, num_nodes), (np.bool_, num_nodes)]
    num_bytes = sum(np.dtype(dtype).itemsize * count for dtype, count in counts)
    if num_items < 1 or num_nodes < 1 or start + num_bytes != len(data):
        raise ValueError(f"{name} is not a catalog: its header does not fit its {len(data)} bytes; {AGAIN}")
    views: list[np.ndarray] = []
    for dtype, count in counts:
        views.append(np.frombuffer(data, dtype, count, start))
        start += views[-1].nbytes
    return digest.hex(), header, CatalogArrays(*views)


def _catalog_digest(preamble: bytes | memoryview, *body: memoryview) -> bytes:
    hashed = hashlib.sha256(preamble[len(MAGIC) :])
    for part in body:
        hashed.update(part)
    return hashed.digest()
