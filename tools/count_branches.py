"""Counts the files that branch on a feature without belonging to it, by feature.

A branch is an `if`, `elif`, `while`, `match`, `assert`, conditional expression, boolean expression or condition of a
comprehension. It belongs to a feature when its test names something of the feature; a file belongs to a feature when
its path does. `python tools/count_branches.py [DIR]` prints a table, `--list FEATURE` the branches themselves.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FEATURES = {
    "speculation": "specul|draft|forest|verif|lookahead|rejection",
    "beam sampling": "do_sample|gumbel|stochastic|sampled|beam_sampling|joint_sampling|perturb",
    "catalogs": "catalog|\\bitems?\\b|item_ids|answer_forms",
    "grammars": "grammar|structured|bitmask",
    "contrast": "contrast|amateur",
    "step search": "step_search|step_stop|step_params|unit\\b|scorer|candidates",
}
"""What names something of a feature, in identifiers, attributes and texts of a test, and in paths."""


OWN_FILES = {"speculation": "|head_model|hidden_states|tree_"}
"""Further paths that belong to a feature."""


class Branch(NamedTuple):
    path: Path
    line: int
    test: str


def tests_of(tree: ast.AST) -> Iterator[ast.expr]:
    """Yields every expression that decides which way the code goes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            yield node.test
        elif isinstance(node, ast.BoolOp):
            yield node
        elif isinstance(node, ast.Match):
            yield node.subject
            yield from (case.guard for case in node.cases if case.guard)
        elif isinstance(node, ast.comprehension):
            yield from node.ifs


def branches(root: Path, feature: str) -> Iterator[Branch]:
    """Yields the branches on a feature in files that are not its own, one for each line."""
    pattern = re.compile(FEATURES[feature], re.IGNORECASE)
    own_files = re.compile(FEATURES[feature] + OWN_FILES.get(feature, ""), re.IGNORECASE)
    for path in sorted(root.rglob("*.py")):
        if own_files.search(path.relative_to(root).as_posix()):
            continue
        tests = {test.lineno: ast.unparse(test) for test in tests_of(ast.parse(path.read_text()))}
        yield from (Branch(path, line, test) for line, test in sorted(tests.items()) if pattern.search(test))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path("vllm_trie"))
    parser.add_argument("--list", choices=FEATURES, help="show the branches on this feature")
    options = parser.parse_args()
    for feature in FEATURES:
        found = list(branches(options.root, feature))
        print(f"{feature:14} {len({branch.path for branch in found}):3} files, {len(found):3} branches")
        if feature == options.list:
            print(*(f"  {branch.path}:{branch.line}: {branch.test}" for branch in found), sep="\n")


if __name__ == "__main__":
    main()
