"""What takes part in every step of vLLM's, and is vLLM's own while an engine has no beams.

To look whether there are beams, and hand over to vLLM, costs a call for each method, and some are called for each
request. So an object that is at rest has another class, in which such methods are vLLM's own.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar


class RestsWithoutBeams:
    """A class derived from one of vLLM's, whose objects rest while there are no beams.

    Nobody may hold on to a bound method of such an object: it is that of the class which the object had.
    """

    hooks: ClassVar[tuple[str, ...]] = ()  # methods that vLLM's stand for at rest
    is_at_rest: ClassVar[bool] = False

    def rest(self) -> None:
        """There are no beams any more."""
        awake: Any = type(self)
        if not self.is_at_rest:
            self.__class__ = _class_at_rest(awake)

    def wake(self) -> None:
        """There are beams from now on, or something else that the hooks are to see."""
        if self.is_at_rest:
            self.__class__ = type(self).__bases__[0]


@cache
def _class_at_rest(cls: Any) -> Any:
    stock = next(base for base in cls.__mro__ if base.__module__.startswith("vllm."))
    methods = {hook: getattr(stock, hook) for hook in cls.hooks}
    return type(cls)(f"{cls.__name__}AtRest", (cls,), {"__module__": cls.__module__, "is_at_rest": True, **methods})
