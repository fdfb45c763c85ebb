"""`python -m benchmarks.smollm2`: fetch the model if need be, and print the folders of it and of its draft model."""

from __future__ import annotations

import sys

from benchmarks.smollm2 import get


def main() -> int | str:
    try:
        print(f"model: {get.target()}")
        print(f"draft: {get.draft()}")
    except get.UnavailableError as error:
        return str(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
