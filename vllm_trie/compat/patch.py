"""Changes vLLM from outside: whatever goes beyond its official extension points is a `VLLMPatch`."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class VLLMPatchError(RuntimeError):
    """This vLLM is not one that the plugin was written for."""


class VLLMPatch:
    """Replaces one attribute of vLLM.

    Args:
        owner: "module" or "module:Class" that holds the attribute, or the class itself.
        attribute: Its name. It must exist, and must not be patched already.
    """

    def __init__(self, owner: str | type, attribute: str) -> None:
        self.owner = owner if isinstance(owner, str) else f"{owner.__module__}:{owner.__qualname__}"
        self.attribute = attribute
        self.original: Any = None

    @property
    def is_applied(self) -> bool:
        return self.original is not None

    def apply(self, replacement: Any) -> None:
        """Replace the attribute for the rest of the process.

        Raises:
            VLLMPatchError: the attribute does not exist, or is patched already.
        """
        if self.is_applied:
            raise VLLMPatchError(f"{self.owner}.{self.attribute} is patched already")
        holder = self._holder()
        if self.attribute not in vars(holder):
            raise VLLMPatchError(f"this vLLM has no {self.owner}.{self.attribute}")
        self.original = vars(holder)[self.attribute]
        setattr(holder, self.attribute, replacement)

    def wrap(self, wrapper: Callable[..., Any]) -> None:
        """Have `wrapper(original, *args, **kwargs)` called in place of a function or method.

        Wrapping it again has no effect: vLLM loads a plugin more than once.
        """
        if self.is_applied:
            return
        stock = vars(self._holder()).get(self.attribute)
        is_bound = isinstance(stock, classmethod | staticmethod)
        original = stock.__func__ if is_bound else stock

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        self.apply(type(stock)(wrapped) if is_bound else wrapped)

    def revert(self) -> None:
        """Put the original back."""
        setattr(self._holder(), self.attribute, self.original)
        self.original = None

    @contextmanager
    def applied(self, replacement: Any) -> Iterator[None]:
        """Replace the attribute within a `with` block only."""
        self.apply(replacement)
        try:
            yield
        finally:
            self.revert()

    def _holder(self) -> Any:
        module, _, name = self.owner.partition(":")
        holder = importlib.import_module(module)
        return getattr(holder, name) if name else holder


class VLLMWrapper:
    """A function to call in place of functions of vLLM; `wraps_vllm` makes it, and `wrap_vllm` installs it.

    Args:
        function: Called as `function(original, *args, **kwargs)`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.patches = function, list[VLLMPatch]()

    @property
    def original(self) -> Any:
        """The function of vLLM that it replaces, the first if there are several."""
        return self.patches[0].original


def wraps_vllm(attribute: str, *owners: str | type) -> Callable[[Callable[..., Any] | VLLMWrapper], VLLMWrapper]:
    """Decorate a function as the wrapper of a function or method of vLLM; arguments as in `VLLMPatch`."""

    def decorate(function: Callable[..., Any] | VLLMWrapper) -> VLLMWrapper:
        wrapper = function if isinstance(function, VLLMWrapper) else VLLMWrapper(function)
        wrapper.patches += [VLLMPatch(owner, attribute) for owner in owners]
        return wrapper

    return decorate


def wrap_vllm(module: str) -> None:
    """Install all wrappers that a module of this package defines, for the rest of the process."""
    for wrapper in vars(importlib.import_module(module)).values():
        for patch in wrapper.patches if isinstance(wrapper, VLLMWrapper) else ():
            patch.wrap(wrapper.function)


def arguments_to_vllm(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of such a call by parameter name: versions of vLLM differ in their parameters."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments
