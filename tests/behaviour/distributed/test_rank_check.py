"""A rank that goes astray ends the engine, loudly and at once."""

from __future__ import annotations

import pytest

from tests.support import forks
from tests.support.engine import TRAINED_TARGET

pytestmark = pytest.mark.slow

SECONDS = 800


def test_a_rank_that_goes_astray_ends_the_engine_and_the_log_says_why() -> None:
    result = forks.run(["-m", "tests.support.astray", str(TRAINED_TARGET)], SECONDS)
    assert result.returncode == 0, result.stderr[-3000:]
    said = [line for line in result.stdout.splitlines() if line.startswith(("agreed", "ended"))]  # among log lines
    assert said[:1] == ["agreed"], "ranks that agree are left alone"
    assert said[1].startswith("ended: EngineCore encountered an issue")
    log = result.stdout + result.stderr
    assert "trie_beam.debug_rank_check: tensor parallel ranks disagree about the beams of beam group " in log
    assert "(rank 0 against rank 1)" in log
