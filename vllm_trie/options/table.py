"""How an option is written down, and how its value is checked."""

from __future__ import annotations

import inspect
import re
import reprlib
from typing import Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from vllm_trie.options.other_names import did_you_mean, meant_by

Number = int | float

# What is said of a value out of range, after the option and the value; here what several options say.
NO_BEAMS = "is not a number of beams; pass an integer >= 1"

# What an option goes with.
HF = '`semantics="hf"`'
BEST_OF_HF = '`semantics="hf"`, neither `do_sample` nor `sample_first`'
PLAIN = 'neither `do_sample` nor `semantics="vllm"`'
DRAWN = "`do_sample`"
DRAFTS = "`speculation`"
DRAWN_DRAFTS = '`speculation="sample"`'
CATALOG = "`catalog` or `allowed_sequences`"
STEPS = '`unit="step"`'


def option(default: Any, wrong: str = "", goes_with: str = "", **bounds: Any) -> Any:
    """A row of the table; its meaning stands in the docstring of its class."""
    return Field(default, json_schema_extra={"wrong": wrong, "goes_with": goes_with}, **bounds)


class Options(BaseModel):
    """Options that are checked one by one, and then together.

    Raises:
        ValueError: naming the option, its value and what would work.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    prefix: ClassVar[str] = ""  # of the names in a refusal

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            field = type(self).model_fields.get(name)
            if field is None:
                raise ValueError(f"unknown option {self.prefix}{name}; {self.cure(name)}") from None
            value = given.get(name)
            shown = reprlib.repr(value) if isinstance(value, list) else repr(value)
            raise ValueError(f"{self.prefix}{name}={shown} {_wrong(field)}") from None
        self.check_together()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for name, meaning in re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", inspect.cleandoc(cls.__doc__ or ""), re.M):
            cls.model_fields[name].description = " ".join(meaning.split())

    def check_together(self) -> None:
        """Refuse options that exclude each other."""

    @classmethod
    def cure(cls, name: str) -> str:
        """What to do about an option that there is not."""
        meant = meant_by(name, cls.model_fields, cutoff=0.6)
        return did_you_mean(meant) if meant is not None else f"known: {', '.join(cls.model_fields)}"


def about(field: FieldInfo, key: Literal["wrong", "goes_with"]) -> str:
    """What is said of a wrong value of an option, or what the option goes with; "" if nothing."""
    said = field.json_schema_extra
    assert isinstance(said, dict)
    return str(said[key])


def choices(field: FieldInfo) -> list[Any]:
    """The values of an option that has few of them, None left out; of others none."""
    kind: Any = field.annotation
    of_parts = [part for part in get_args(kind | None) if part is bool or get_origin(part) is Literal]
    return [value for part in of_parts for value in ((True, False) if part is bool else get_args(part))]


def _wrong(field: FieldInfo) -> str:
    known = choices(field)
    derived = "is neither true nor false" if True in known else f"is unknown; known: {', '.join(map(repr, known))}"
    return about(field, "wrong") or derived
