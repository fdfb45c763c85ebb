"""Makes a file of items with semantic ids, such as a recommender is trained to generate, out of synthetic embeddings.

An item's tokens are the codes of its embedding and of what each code leaves over, level by level (residual
quantization); the last token numbers the items that have all other codes in common, as in TIGER (Rajput et al. 2023).
Put your own embeddings in the place of `embeddings`.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

DIMENSIONS, CLUSTERS, SPREAD = 16, 1000, 1.0
ROWS_AT_A_TIME = 16_384
SAMPLE, ROUNDS = 128, 5  # vectors for each centre, and rounds of k-means, that centres are found by


def embeddings(num_items: int, random: np.random.Generator) -> np.ndarray:
    """[items, dimensions] float32: clusters of items that are alike."""
    centres = random.standard_normal((CLUSTERS, DIMENSIONS), np.float32)
    return centres[random.integers(0, CLUSTERS, num_items)] + SPREAD * random.standard_normal(
        (num_items, DIMENSIONS), np.float32
    )


def nearest(vectors: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """[vectors] int64: the index of the centre that is nearest to each."""
    squares = (centres**2).sum(1)
    parts = (vectors[start : start + ROWS_AT_A_TIME] for start in range(0, len(vectors), ROWS_AT_A_TIME))
    return np.concatenate([(squares - 2 * part @ centres.T).argmin(1) for part in parts])


def centres_of(vectors: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """[count, dimensions] float32, or fewer if there are fewer vectors: of k-means on a sample of them."""
    sample = random.permutation(vectors)[: count * SAMPLE]
    centres = sample[:count].copy()
    for _ in range(ROUNDS):
        codes = nearest(sample, centres)
        order, sizes = codes.argsort(), np.bincount(codes, minlength=len(centres))
        held = sizes > 0
        starts = (sizes.cumsum() - sizes)[held]
        centres[held] = np.add.reduceat(sample[order], starts) / sizes[held, None]
    return centres


def semantic_ids(vectors: np.ndarray, num_levels: int, num_codes: int, random: np.random.Generator) -> np.ndarray:
    """[items, levels] int64, all different.

    Args:
        vectors: [items, dimensions]; what quantization leaves over takes their place.
        num_levels: Tokens of an item.
        num_codes: Codes of each level.

    Raises:
        ValueError: more items than a level has codes have all but their last code in common.
    """
    codes = []
    for _ in range(num_levels - 1):
        centres = centres_of(vectors, num_codes, random)
        codes.append(nearest(vectors, centres))
        vectors -= centres[codes[-1]]
    cells = sum((code * num_codes**level for level, code in enumerate(codes)), np.zeros(len(vectors), np.int64))
    order = cells.argsort(kind="stable")
    sizes = np.unique(cells, return_counts=True)[1]
    if sizes.max() > num_codes:
        raise ValueError(f"{sizes.max():,} items have all codes but the last in common; raise --levels or --codes")
    numbers = np.empty(len(vectors), np.int64)
    numbers[order] = np.arange(len(vectors)) - np.repeat(sizes.cumsum() - sizes, sizes)
    return np.stack([*codes, numbers], axis=1)


def main(arguments: argparse.Namespace) -> None:
    random = np.random.default_rng(arguments.seed)
    vectors = embeddings(arguments.items, random)
    codes = semantic_ids(vectors, arguments.levels, arguments.codes, random)
    tokens = codes + arguments.first_token + arguments.codes * np.arange(arguments.levels)  # each level has its own
    with arguments.output.open("w") as lines:
        lines.writelines(f'{{"tokens": {row}, "id": {number}}}\n' for number, row in enumerate(tokens.tolist()))
    last = arguments.first_token + arguments.codes * arguments.levels - 1
    print(f"  {arguments.items:,} items of {arguments.levels} tokens, {arguments.first_token} to {last}")


def positive(text: str) -> int:
    """A whole number >= 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="JSON lines for `python -m vllm_trie.catalog build`")
    parser.add_argument("--items", type=positive, default=1_000_000)
    parser.add_argument("--levels", type=positive, default=4, help="tokens of an item")
    parser.add_argument("--codes", type=positive, default=256, help="of each level")
    parser.add_argument("--first-token", type=positive, default=1000, help="the token of the first level's first code")
    parser.add_argument("--seed", type=int, default=0)
    try:
        main(parser.parse_args())
    except (ValueError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
