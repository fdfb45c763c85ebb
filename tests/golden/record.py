"""Record what searches decide and answer, or do them again: `python -m tests.golden.record --help`.

torch and MKL compute by code that every x86 processor has, so the bits of scores are the same on all of them. They
read `ENVIRONMENT` when they are imported: the command starts itself anew where it is not set.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

DATA = Path(__file__).parent / "data"
ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser("python -m tests.golden.record", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of the batches, by default all")
    parser.add_argument("--folder", type=Path, default=DATA, help="to write to, by default that of the record")
    parser.add_argument("--again", action="store_true", help="do not look for what disturbed logits change")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        command = [sys.executable, "-m", "tests.golden.record", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | ENVIRONMENT)

    from tests.golden.batches import BATCHES
    from tests.golden.run import run

    options.folder.mkdir(exist_ok=True)
    for name in options.names or BATCHES:
        with TemporaryDirectory() as models:
            record = run(BATCHES[name], Path(models), looks_for_firm=not options.again)
        record.save(options.folder / f"{name}.npz")
        counts = f"{len(record.answers)} requests, {len(record.steps)} searches, {len(record.firm)} firm"
        print(f"{name}: {counts}, {record.num_steps} steps")


if __name__ == "__main__":
    main()
