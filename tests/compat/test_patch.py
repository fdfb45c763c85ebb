"""Patches apply once, and come off again."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest

from vllm_trie.compat.patch import Patch, PatchError


@pytest.fixture
def victim() -> Iterator[types.ModuleType]:
    module = types.ModuleType("patch_victim")
    module.answer = lambda: 1
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_patch_replaces_and_reverts(victim: types.ModuleType) -> None:
    patch = Patch("patch_victim", "answer")
    patch.apply(lambda: 2)
    assert victim.answer() == 2
    patch.revert()
    assert victim.answer() == 1
    assert not patch.is_applied


def test_patching_twice_raises(victim: types.ModuleType) -> None:
    patch = Patch("patch_victim", "answer")
    patch.apply(lambda: 2)
    with pytest.raises(PatchError, match="patched already"):
        patch.apply(lambda: 3)
    assert victim.answer() == 2


def test_patching_what_does_not_exist_raises(victim: types.ModuleType) -> None:
    with pytest.raises(PatchError, match=r"no patch_victim\.question"):
        Patch("patch_victim", "question").apply(None)


def test_scoped_patch_comes_off_after_an_error(victim: types.ModuleType) -> None:
    def fail() -> None:
        with Patch("patch_victim", "answer").applied(lambda: 2):
            raise KeyError(victim.answer())

    with pytest.raises(KeyError, match="2"):
        fail()
    assert victim.answer() == 1
