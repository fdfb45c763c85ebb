"""The command `python -m vllm_trie.catalog`: builds, inspects and checks catalogs."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from vllm_trie.catalog.arrays import catalog_level_starts
from vllm_trie.catalog.catalog import Catalog
from vllm_trie.catalog.lines import read_catalog_items
from vllm_trie.catalog.structure import check_structure
from vllm_trie.catalog.tokenizer import load_catalog_tokenizer, tokenizer_digest

PROGRAM = "python -m vllm_trie.catalog"
INTERRUPTED = 130


class _CatalogParser(argparse.ArgumentParser):
    """Reports a mistake in one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def catalog_parser() -> argparse.ArgumentParser:
    """The parser of the three commands."""
    commands = _CatalogParser(prog=PROGRAM, description="Catalogs: files of items that beams must follow.")
    add = commands.add_subparsers(dest="command", required=True, metavar="COMMAND").add_parser
    build = add("build", help="Build a catalog.")
    build.add_argument("input", type=Path, metavar="INPUT", help="An item per line: .jsonl or .json, or else text.")
    build.add_argument("output", type=Path, metavar="OUTPUT", help="The catalog; an existing file is replaced.")
    inspect = add("inspect", help="Show the contents of a catalog.")
    inspect.add_argument(
        "--items", type=_positive_catalog_number, default=0, metavar="N", help="Show the first N items instead."
    )
    check = add("check", help="Verify a catalog; status 1 if it is not valid.")
    for command in (inspect, check):
        command.add_argument("catalog", type=Path, metavar="FILE")
    for command in (build, check):
        command.add_argument("--tokenizer", metavar="MODEL", help="Folder or name of the model that will search.")
        command.add_argument(
            "--vocab-size", type=_positive_catalog_number, metavar="N", help="Vocabulary size, else the tokenizer's."
        )
    return commands


def main() -> None:
    """Run one command. If it fails, exits with status 1 and one sentence."""
    args = catalog_parser().parse_args()
    try:
        {"build": _build_catalog, "inspect": _inspect_catalog, "check": _check_catalog}[args.command](args)
    except (ValueError, OSError) as error:
        sys.exit(f"{PROGRAM}: {error}")
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted; no file is half written", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _build_catalog(args: argparse.Namespace) -> None:
    if not args.output.absolute().parent.is_dir():
        raise ValueError(f"{args.output} cannot be written: there is no folder {args.output.parent}")
    tokenizer, digest, vocab_size = _catalog_vocabulary(args)
    with tqdm(desc="Reading items", total=args.input.stat().st_size, unit="B", unit_scale=True) as bar:
        warn = partial(bar.write, file=sys.stderr)
        items = read_catalog_items(args.input, tokenizer, vocab_size, bar.update, warn)
    catalog = Catalog.from_items(items, vocab_size, digest, lambda depths: tqdm(depths, "Sorting", unit=" levels"))
    catalog.save(args.output)
    num_duplicates = len(items.ids) - catalog.num_items
    lengths = f"of {catalog.shortest} to {catalog.longest} tokens"
    print(f"{args.output}: {catalog.num_items:,} items {lengths}, {num_duplicates:,} duplicates left out")


def _inspect_catalog(args: argparse.Namespace) -> None:
    catalog = Catalog.open(args.catalog)
    if args.items:
        for index, own_id in enumerate(catalog.item_ids[: args.items].tolist()):
            print(json.dumps({"tokens": catalog.sequence(index), "id": own_id}))
        return
    vocabulary = f"of {catalog.vocab_size:,} tokens, " if catalog.vocab_size else ""
    on_device = catalog.num_bytes_on_device
    for name, value in (
        ("items", f"{catalog.num_items:,}, of {catalog.shortest} to {catalog.longest} tokens"),
        ("prefixes", "none is a prefix of another" if catalog.is_prefix_free else "some are prefixes of others"),
        ("on a device", f"{on_device:,} bytes, {on_device / catalog.num_items:.1f} per item"),
        ("vocabulary", f"{vocabulary}highest token {catalog.max_token:,}"),
        ("tokenizer", catalog.tokenizer or "unknown"),
        ("digest", catalog.digest),
    ):
        print(f"{name:12} {value}")
    print(f"\n{'depth':>5} {'nodes':>12} {'items':>12} {'most children':>14}")
    levels = zip(pairwise(catalog_level_starts(catalog.first_child)), [*catalog.most_children, 0], strict=True)
    for depth, ((start, end), most) in enumerate(levels):
        print(f"{depth:5} {end - start:12,} {catalog.is_item[start:end].sum():12,} {most:14,}")


def _check_catalog(args: argparse.Namespace) -> None:
    catalog = Catalog.open(args.catalog)
    check_structure(catalog)
    _, digest, vocab_size = _catalog_vocabulary(args)
    if vocab_size is not None:
        catalog.check_fits(vocab_size, digest)
    print(f"{args.catalog} is valid: {catalog.num_items:,} items")


def _catalog_vocabulary(args: argparse.Namespace) -> tuple[Any, str | None, int | None]:
    """The tokenizer, its digest and the vocabulary size, each None if not given."""
    if args.tokenizer is None:
        return None, None, args.vocab_size
    tokenizer = load_catalog_tokenizer(args.tokenizer)
    return tokenizer, tokenizer_digest(tokenizer), args.vocab_size or len(tokenizer)


def _positive_catalog_number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when piped into head
    main()
