"""Objects that are vLLM's own while there are no beams."""

from __future__ import annotations

from abc import ABC, abstractmethod

from vllm_trie.compat.at_rest import RestsWithoutBeams


class Stock(ABC):
    """Stands for a class of vLLM's."""

    __module__ = "vllm.stock"

    @abstractmethod
    def name(self) -> str: ...

    def step(self) -> list[str]:
        return ["stock"]

    def end(self) -> list[str]:
        return ["stock"]


class Derived(Stock):
    __module__ = "vllm.stock"

    def name(self) -> str:
        return "derived"

    def step(self) -> list[str]:
        return ["derived", *super().step()]


class Ours(RestsWithoutBeams, Stock):
    hooks = ("step",)

    def name(self) -> str:
        return "ours"

    def step(self) -> list[str]:
        return ["ours", *super().step()]

    def end(self) -> list[str]:
        return ["ours", *super().end()]


class OursDerived(Ours, Derived):
    def step(self) -> list[str]:
        return ["ours derived", *super().step()]


def test_at_rest_the_hooks_alone_are_those_of_vllm() -> None:
    one, other = Ours(), Ours()
    assert one.step() == ["ours", "stock"]
    one.rest()
    one.rest()
    assert one.is_at_rest
    assert one.step() == ["stock"]
    assert one.end() == ["ours", "stock"]
    assert isinstance(one, Ours)
    assert other.step() == ["ours", "stock"], "another object rests"
    one.wake()
    one.wake()
    assert type(one) is Ours


def test_at_rest_they_are_those_of_the_class_of_vllm_that_is_derived_from() -> None:
    one = OursDerived()
    assert one.step() == ["ours derived", "ours", "derived", "stock"]
    one.rest()
    assert one.step() == ["derived", "stock"]
    one.wake()
    assert type(one) is OursDerived
