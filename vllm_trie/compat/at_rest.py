"""Lets subclasses of vLLM's scheduler, KV cache manager, runner and attention metadata builders cost nothing at rest.

They rest while an engine has no beams, attention metadata builders while no rows share blocks.

An override that only checks for beams and calls vLLM's method costs a call, for some methods per request. So while
there are no beams, an object has a different class, in which these methods are vLLM's.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar


class RestsWithoutBeams:
    """Base of classes derived from vLLM's whose objects rest while there are no beams.

    Do not keep a bound method of such an object: it belongs to the class that the object had at the time.
    """

    hooks: ClassVar[tuple[str, ...]] = ()  # methods that are vLLM's while at rest
    is_at_rest: ClassVar[bool] = False

    def rest(self) -> None:
        """Use vLLM's methods: there are no more beams."""
        awake: Any = type(self)
        if not self.is_at_rest:
            self.__class__ = _class_at_rest(awake)

    def wake(self) -> None:
        """Use the overridden methods: there are beams, or something else that they must see."""
        if self.is_at_rest:
            self.__class__ = type(self).__bases__[0]


@cache
def _class_at_rest(cls: Any) -> Any:
    stock = next(base for base in cls.__mro__ if base.__module__.startswith("vllm."))
    methods = {hook: getattr(stock, hook) for hook in cls.hooks}
    return type(cls)(f"{cls.__name__}AtRest", (cls,), {"__module__": cls.__module__, "is_at_rest": True, **methods})
