"""Features stay where they belong."""

from __future__ import annotations

import pytest

from tests.support.engine import ROOT
from tools.count_branches import FEATURES, branches

PACKAGE = ROOT / "vllm_trie"
MOST_FILES = 6


@pytest.mark.parametrize("feature", FEATURES)
def test_few_files_branch_on_a_feature_that_is_not_theirs(feature: str) -> None:
    files = {branch.path for branch in branches(PACKAGE, feature)}
    assert 0 < len(files) <= MOST_FILES, sorted(files)
