"""How an option is written down, and how its value is checked."""

from __future__ import annotations

import inspect
import re
import reprlib
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from vllm_trie.options.other_names import did_you_mean, meant_by

Number = int | float


def option(default: Any, wrong: str = "", **bounds: Any) -> Any:
    """A row of the table; its meaning stands in the docstring of its class.

    Args:
        wrong: What is said of a value out of range, after the option and the value; where there are few values, this
            is derived.
    """
    return Field(default, json_schema_extra={"wrong": wrong}, **bounds)


class Options(BaseModel):
    """Options that are checked one by one, and then together.

    Raises:
        ValueError: naming the option, its value and what would work.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    prefix: ClassVar[str] = ""  # of the names in a refusal

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            field = type(self).model_fields.get(name)
            if field is None:
                raise ValueError(f"unknown option {self.prefix}{name}; {self.cure(name)}") from None
            value = options.get(name)
            shown = reprlib.repr(value) if isinstance(value, list) else repr(value)
            raise ValueError(f"{self.prefix}{name}={shown} {what_is_wrong(field)}") from None
        self.check()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for name, meaning in re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", inspect.cleandoc(cls.__doc__ or ""), re.M):
            cls.model_fields[name].description = " ".join(meaning.split())

    def check(self) -> None:
        """Refuse what does not go together."""

    def params(self) -> dict[str, Any]:
        """What is said, and is not what holds in any case."""
        fields = type(self).model_fields
        return {name: value for name, value in vars(self).items() if value not in (None, fields[name].default)}

    @classmethod
    def cure(cls, name: str) -> str:
        """What to do about an option that there is not."""
        return cure(name, cls.model_fields)


def cure(name: str, known: Iterable[str]) -> str:
    """What to do about an option that is none of those that are known."""
    meant = meant_by(name, known, cutoff=0.6)
    return did_you_mean(meant) if meant is not None else f"known: {', '.join(known)}"


def what_is_wrong(field: FieldInfo) -> str:
    """What is said of a wrong value of an option."""
    extra, known = field.json_schema_extra, choices(field)
    assert isinstance(extra, dict)
    derived = "is neither true nor false" if True in known else f"is unknown; known: {', '.join(map(repr, known))}"
    return str(extra["wrong"]) or derived


def choices(field: FieldInfo) -> list[Any]:
    """The values of an option that has few of them, None left out; of others none."""
    kind: Any = field.annotation
    of_parts = [part for part in get_args(kind | None) if part is bool or get_origin(part) is Literal]
    return [value for part in of_parts for value in ((True, False) if part is bool else get_args(part))]
