"""Patches apply once, and come off again."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_trie.compat.patch import VLLMPatch, VLLMPatchError, wrap_vllm, wraps_vllm


@pytest.fixture
def victim() -> Iterator[types.ModuleType]:
    module = types.ModuleType("patch_victim")
    module.answer = lambda: 1
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_patch_replaces_and_reverts(victim: types.ModuleType) -> None:
    patch = VLLMPatch("patch_victim", "answer")
    patch.apply(lambda: 2)
    assert victim.answer() == 2
    patch.revert()
    assert victim.answer() == 1
    assert not patch.is_applied


def test_patching_twice_raises(victim: types.ModuleType) -> None:
    patch = VLLMPatch("patch_victim", "answer")
    patch.apply(lambda: 2)
    with pytest.raises(VLLMPatchError, match="patched already"):
        patch.apply(lambda: 3)
    assert victim.answer() == 2


def test_patching_what_does_not_exist_raises(victim: types.ModuleType) -> None:
    with pytest.raises(VLLMPatchError, match=r"no patch_victim\.question"):
        VLLMPatch("patch_victim", "question").apply(None)


def test_a_wrapper_gets_the_original_once_whatever_kind_it_is(victim: types.ModuleType) -> None:
    class Holder:
        def method(self, number: int) -> int:
            return number

        @classmethod
        def of_class(cls, number: int) -> tuple[type, int]:
            return cls, number

        @staticmethod
        def alone(number: int) -> int:
            return number

    victim.Holder = Holder

    def doubling(original: Callable[..., Any], *given: Any) -> Any:
        return original(*given[:-1], 2 * given[-1])

    for name in ("method", "of_class", "alone"):
        patch = VLLMPatch("patch_victim:Holder", name)
        patch.wrap(doubling)
        patch.wrap(doubling)
    assert (Holder().method(1), Holder.of_class(1), Holder.alone(1)) == (2, (Holder, 2), 2)
    with pytest.raises(VLLMPatchError, match=r"no patch_victim:Holder\.gone"):
        VLLMPatch("patch_victim:Holder", "gone").wrap(doubling)


def test_a_modules_wrappers_wrap_all_that_they_name_once(victim: types.ModuleType) -> None:
    victim.question = lambda: 5

    @wraps_vllm("answer", "patch_victim")
    @wraps_vllm("question", "patch_victim")
    def doubling(original: Callable[[], int]) -> int:
        return 2 * original()

    victim.doubling = doubling
    assert (victim.answer(), victim.question()) == (1, 5)
    for _ in range(2):
        wrap_vllm("patch_victim")
    assert (victim.answer(), victim.question()) == (2, 10)
    assert doubling.original() == 5


def test_scoped_patch_comes_off_after_an_error(victim: types.ModuleType) -> None:
    def fail() -> None:
        with VLLMPatch("patch_victim", "answer").applied(lambda: 2):
            raise KeyError(victim.answer())

    with pytest.raises(KeyError, match="2"):
        fail()
    assert victim.answer() == 1
