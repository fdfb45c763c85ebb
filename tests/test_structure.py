"""Features stay where they belong, and signatures and classes fit in the head."""

from __future__ import annotations

import pytest

from tests.support.engine import ROOT
from tools.count_branches import FEATURES, branches, widths

PACKAGE = ROOT / "vllm_trie"
MOST_FILES, MOST_PARAMETERS, MOST_FIELDS = 6, 6, 15


@pytest.mark.parametrize("feature", FEATURES)
def test_few_files_branch_on_a_feature_that_is_not_theirs(feature: str) -> None:
    files = {branch.path for branch in branches(PACKAGE, feature)}
    assert 0 < len(files) <= MOST_FILES, sorted(files)


def test_signatures_and_classes_are_narrow() -> None:
    signatures, classes = widths(PACKAGE)
    assert 0 < signatures[0].count <= MOST_PARAMETERS, signatures[0]
    assert 0 < classes[0].count <= MOST_FIELDS, classes[0]
