"""Reads the input of a catalog: a file with an item per line, as JSON or text. Blank lines are counted but skipped."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vllm_trie.catalog.items import CatalogItems

CHUNK_BYTES = 1 << 20
_TOKENS_IN_TEXT = re.compile(r"\[\s*\d+(\s*,\s*\d+)*\s*\]")
JSON_SUFFIXES = (".json", ".jsonl")
FORMS = '[1, 2], "text", {"tokens": [1, 2]} or {"text": "text"}, the last two optionally with an integer "id"'


class CatalogLine(msgspec.Struct):
    """A line that is a JSON object; other keys are ignored."""

    tokens: list[int] | None = None
    text: str | None = None
    id: int | None = None


Row = list[int] | str | CatalogLine


def read_catalog_items(
    path: Path,
    tokenizer: Any,
    vocab_size: int | None,
    progress: Callable[[int], object],
    warn: Callable[[str], object],
) -> CatalogItems:
    """Read all items of a file, and tokenize texts; an item's id is its "id", or else the index of its line.

    Args:
        path: JSON if its suffix is .json or .jsonl, or else text.
        tokenizer: Of transformers; None if there are no texts.
        vocab_size: Token ids must be below this.
        progress: Called with the number of bytes of each part that was read.
        warn: Called with one sentence if some items have an "id" and others have none.

    Raises:
        ValueError: names the line and the fault.
        OSError: the file cannot be read.
    """
    decode = msgspec.json.Decoder(Row).decode if path.suffix.lower() in JSON_SUFFIXES else _catalog_line_text
    parts, num_lines, without_id = list[CatalogItems](), 0, _LinesWithoutId()
    with path.open("rb") as file:
        while lines := file.readlines(CHUNK_BYTES):
            num_bytes = sum(map(len, lines))
            if num_lines == 0:
                lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
            numbers, rows = _decode_catalog_lines(lines, num_lines, decode, path)
            parts.append(_catalog_line_items(rows, numbers, path, tokenizer, vocab_size))
            without_id = without_id.and_of(rows, numbers)
            num_lines += len(lines)
            progress(num_bytes)
    if not (num_items := sum(len(part.ids) for part in parts)):
        raise ValueError(f"{path} has no items; write one per line: {FORMS}")
    if 0 < without_id.num_lines < num_items:
        warn(
            f'{without_id.num_lines:,} of {num_items:,} items in {path} have no "id" and get the indices of their '
            f"lines, from {without_id.first:,} to {without_id.last:,}; give all items an id, or none"
        )
    return CatalogItems.joined(parts)


class _LinesWithoutId(NamedTuple):
    num_lines: int = 0
    first: int = 0  # index of a line
    last: int = 0

    def and_of(self, rows: list[Row], numbers: Sequence[int]) -> _LinesWithoutId:
        """With those of more lines, which have these indices."""
        more = numbers
        if any(isinstance(row, CatalogLine) for row in rows):
            more = [
                n for n, row in zip(numbers, rows, strict=True) if not isinstance(row, CatalogLine) or row.id is None
            ]
        if not more:
            return self
        return _LinesWithoutId(self.num_lines + len(more), self.first if self.num_lines else more[0], more[-1])


def _catalog_line_text(line: bytes) -> str:
    if not line.strip():
        raise ValueError("it is blank")
    text = line.decode().rstrip("\r\n")
    if _TOKENS_IN_TEXT.fullmatch(text.strip()):
        raise ValueError(
            "a list of token ids in a file of texts; name the file .jsonl, where texts have quotation marks"
        )
    return text


def _decode_catalog_lines(
    lines: Sequence[bytes], start: int, decode: Callable[[bytes], Row], path: Path
) -> tuple[Sequence[int], list[Row]]:
    """The indices and contents of lines that are not blank."""
    try:
        return range(start, start + len(lines)), list(map(decode, lines))
    except ValueError:
        numbers, rows = [], []
    for number, line in enumerate(lines, start):
        if line.strip():
            try:
                rows.append(decode(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number + 1}: {error}; write {FORMS}") from None
            numbers.append(number)
    return numbers, rows


def _catalog_line_items(
    rows: list[Row], numbers: Sequence[int], path: Path, tokenizer: Any, vocab_size: int | None
) -> CatalogItems:
    def name(index: int) -> str:
        return f"{path}, line {numbers[index] + 1}"

    if set(map(type, rows)) == {list}:
        return CatalogItems.of(rows, numbers, vocab_size, name)  # type: ignore[arg-type]
    ids, sequences = list(numbers), list[Any]()
    for index, row in enumerate(rows):
        if isinstance(row, CatalogLine):
            if (row.tokens is None) == (row.text is None):
                raise ValueError(f'{name(index)} needs either "tokens" or "text"')
            ids[index] = ids[index] if row.id is None else row.id
            sequences.append(row.text if row.tokens is None else row.tokens)
        else:
            sequences.append(row)
    texts = [index for index, sequence in enumerate(sequences) if isinstance(sequence, str)]
    if texts and tokenizer is None:
        raise ValueError(f"{name(texts[0])} is a text; pass --tokenizer to tokenize it")
    if texts:
        found = tokenizer([sequences[index] for index in texts], add_special_tokens=False, verbose=False)["input_ids"]
        unknown = None if tokenizer.unk_token_id == tokenizer.eos_token_id else tokenizer.unk_token_id
        for index, tokens in zip(texts, found, strict=True):
            if unknown is not None and unknown in tokens:
                raise ValueError(
                    f"{name(index)} has a text that the tokenizer has no tokens for: {sequences[index][:60]!r} becomes "
                    f"{tokenizer.convert_ids_to_tokens(tokens)[:8]}; change the text, or write token ids"
                )
            sequences[index] = tokens
    return CatalogItems.of(sequences, ids, vocab_size, name)
