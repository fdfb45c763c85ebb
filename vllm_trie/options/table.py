"""Base class of all options: how an option is declared, and how its value is checked."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from vllm_trie.options.shown import listed_option_names, shown_option, shown_option_name

Number = int | float


# Other systems' names for options.
OTHER_NAMES: dict[str, str] = tomllib.loads(Path(__file__).with_name("other_names.toml").read_text())  # option -> names
_MEANT = {name: meant for meant, names in OTHER_NAMES.items() for name in names.split()}
MOST_LIKE = 64  # characters of a name that is compared with options: twice as many as any has

MOST_TEXT = 256  # characters of a text, usually a name; options that bring data have other limits
MOST_ENTRIES = 256  # of a list, unless the option has another limit


def option(
    default: Any, wrong: str = "", most_text: int = MOST_TEXT, most_entries: int = MOST_ENTRIES, **bounds: Any
) -> Any:
    """Declare an option; its meaning is its entry under "Args" in the docstring of its class.

    Args:
        wrong: Ends the refusal of a value, after the option and the value; derived for options with few values.
        most_text: The most characters of a value that is a text.
        most_entries: The most entries of a list without a `max_length`.
    """
    most = {"most_text": most_text, "most_entries": bounds.get("max_length", most_entries)}
    return Field(default, json_schema_extra={"wrong": wrong, **most}, **bounds)


class Options(BaseModel):
    """Options that are checked one by one, and then together.

    Raises:
        ValueError: names the option, its value and what would work.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    prefix: ClassVar[str] = ""  # of the names in a refusal

    def __init__(self, **options: Any) -> None:
        self.check_sizes(options)
        try:
            super().__init__(**options)
        except ValidationError as error:
            name = str(error.errors(include_url=False, include_context=False, include_input=False)[0]["loc"][0])
            field = type(self).model_fields.get(name)
            if field is None:
                raise ValueError(f"unknown option {self.prefix}{shown_option_name(name)}; {self.cure(name)}") from None
            raise ValueError(
                f"{self.prefix}{name}={shown_option(options.get(name))} {self.fault(name, options)}"
            ) from None
        self.check()

    @classmethod
    def check_sizes(cls, options: Mapping[str, Any]) -> None:
        """Refuse texts and lists that are too long, and integers above 64 bits, before anything parses them.

        Raises:
            ValueError: names the option, its size and what would work.
        """
        known = [(name, value, cls.model_fields[name]) for name, value in options.items() if name in cls.model_fields]
        for name, value, field in known:
            if isinstance(value, int) and value.bit_length() > 63:
                raise ValueError(f"{cls.prefix}{name}={shown_option(value)} {cls.fault(name, options)}")
            if isinstance(value, str | list | dict):
                size, most, unit = len(value), *most_of_option(field, type(value))
                if size > most:
                    raise ValueError(
                        f"{cls.prefix}{name}={shown_option(value)} has {size:,} {unit}, and may have {most:,}; "
                        "shorten it"
                    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for name, meaning in re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", inspect.cleandoc(cls.__doc__ or ""), re.M):
            cls.model_fields[name].description = " ".join(meaning.split())

    def check(self) -> None:
        """Refuse options that cannot be combined."""

    def params(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        fields = type(self).model_fields
        return {name: value for name, value in vars(self).items() if value not in (None, fields[name].default)}

    @classmethod
    def fault(cls, name: str, options: Mapping[str, Any]) -> str:
        """How the refusal of a wrong value goes on, given all options."""
        return option_fault(cls.model_fields[name])

    @classmethod
    def cure(cls, name: str) -> str:
        """What to use instead of an unknown option, to end its refusal."""
        return cure_for_option(name, cls.model_fields)


def cure_for_option(name: str, known: Iterable[str]) -> str:
    """What to use instead of an option that is not among `known`: the one that was probably meant, or all."""
    meant = option_meant_by(name, known, cutoff=0.6)
    return did_you_mean_option(meant) if meant is not None else f"known: {listed_option_names(known)}"


def option_fault(field: FieldInfo) -> str:
    """How the refusal of a wrong value goes on after the option and the value."""
    extra, known = field.json_schema_extra, option_choices(field)
    assert isinstance(extra, dict)
    derived = "is neither true nor false" if True in known else f"is unknown; known: {', '.join(map(repr, known))}"
    return str(extra["wrong"]) or derived


def most_of_option(field: FieldInfo, kind: type) -> tuple[int, str]:
    """The most characters of a text or entries of a list that an option takes, and the name of this unit."""
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    of_kind, unit = ("most_text", "characters") if issubclass(kind, str) else ("most_entries", "entries")
    return int(str(extra[of_kind])), unit


def option_choices(field: FieldInfo) -> list[Any]:
    """The values of an option that lists them, without None; empty for other options."""
    kind: Any = field.annotation
    of_parts = [part for part in get_args(kind | None) if part is bool or get_origin(part) is Literal]
    return [value for part in of_parts for value in ((True, False) if part is bool else get_args(part))]


def option_meant_by(name: str, known: Iterable[str], cutoff: float = 0.85) -> str | None:
    """The option that someone means by `name`, or a sentence on why there is none; None if unknown."""
    return _find_option_meant(name, tuple(known), cutoff) if len(name) <= MOST_LIKE else None


@lru_cache(maxsize=1024)  # requests have the same keys again and again, and comparing one takes 0.1 ms
def _find_option_meant(name: str, known: tuple[str, ...], cutoff: float) -> str | None:
    word = re.sub(r"(?<=[a-z])(?=[A-Z])|-", "_", name).lower()
    return word if word in known else _MEANT.get(word) or next(iter(get_close_matches(word, known, 1, cutoff)), None)


def did_you_mean_option(meant: str) -> str:
    return meant if " " in meant else f"did you mean {meant}?"
