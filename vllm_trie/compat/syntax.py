"""What counts of a piece of source: what it does, what it takes, and which fields it has."""

from __future__ import annotations

import ast
import hashlib
from typing import Any

_WORDS = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}  # no part of what a body does
_ACTS = (ast.Call, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
_KINDS = ("cached_property", "classmethod", "property", "staticmethod")


def body_digest(node: ast.AST) -> str:
    """SHA-256 of a syntax tree without docstrings, comments, annotations, and what it writes to the log.

    It is the same for every version of Python, which `ast.dump` is not.
    """
    return hashlib.sha256(repr(_essence(node)).encode()).hexdigest()


def _essence(part: Any) -> Any:
    if isinstance(part, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(part) if name not in _WORDS]
        return type(part).__name__, *((name, _essence(value)) for name, value in fields if value not in (None, []))
    if isinstance(part, list):
        return [_essence(one) for one in part if not _only_tells(one)]
    return repr(part)


def _only_tells(statement: Any) -> bool:
    """Whether it is a docstring, or a call of the logger whose arguments do nothing."""
    if not isinstance(statement, ast.Expr):
        return False
    call = statement.value
    if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("logger."):
        return not any(isinstance(part, _ACTS) for part in ast.walk(call) if part is not call)
    return isinstance(call, ast.Constant)


def signature(node: Any) -> str:
    """How a function is called: "classmethod (cls, args, *, strict=...)". Of a class, the fields it is made with."""
    if isinstance(node, ast.ClassDef):
        declared = [one for one in node.body if isinstance(one, ast.AnnAssign)]
        names, defaults = [ast.arg(ast.unparse(one.target)) for one in declared], [one.value for one in declared]
        return f"class ({ast.unparse(ast.arguments([], [], None, names, list(map(_default, defaults)), None, []))})"
    kinds = ["async"] if isinstance(node, ast.AsyncFunctionDef) else []
    kinds += sorted(name for decorator in node.decorator_list if (name := ast.unparse(decorator)) in _KINDS)
    given = node.args
    bare = ast.arguments(
        posonlyargs=list(map(_bare, given.posonlyargs)),
        args=list(map(_bare, given.args)),
        vararg=given.vararg and _bare(given.vararg),
        kwonlyargs=list(map(_bare, given.kwonlyargs)),
        kw_defaults=list(map(_default, given.kw_defaults)),
        kwarg=given.kwarg and _bare(given.kwarg),
        defaults=list(map(_default, given.defaults)),
    )
    return " ".join([*kinds, f"({ast.unparse(bare)})"])


def _bare(parameter: ast.arg) -> ast.arg:
    return ast.arg(parameter.arg)


def _default(value: ast.expr | None) -> Any:
    return value and ast.Constant(...)


def misfit(recorded: str, found: str) -> str:
    """Why what fits one signature does not fit another; empty if it does."""
    (was_kind, was), (kind, now) = _parameters(recorded), _parameters(found)
    if kind != was_kind:
        return f"is {kind or 'a plain function'}, no longer {was_kind or 'a plain function'}"
    for name, (how, required) in was.items():
        if name not in now:
            return f"has lost {name!r}"
        if now[name][0] != how or now[name][1] > required:
            return f"takes {name!r} differently"
    if added := [name for name, (_, required) in now.items() if required and name not in was]:
        return f"wants {added[0]!r}, too"
    orders = [[n for n, (how, _) in one.items() if kind == "class" or "positional" in how] for one in (was, now)]
    return "" if orders[1][: len(orders[0])] == orders[0] else "takes its parameters in another order"


def _parameters(text: str) -> tuple[str, dict[str, tuple[str, bool]]]:
    """The kind of function; by name how a parameter is passed, and whether it has to be."""
    kind, _, listed = text.partition("(")
    given = ast.parse(f"def f({listed}: 0").body[0].args  # type: ignore[attr-defined]
    in_order = [*given.posonlyargs, *given.args]
    num_required, by_name = len(in_order) - len(given.defaults), zip(given.kwonlyargs, given.kw_defaults, strict=True)
    found = {one.arg: ("positional", at < num_required) for at, one in enumerate(in_order)}
    found |= {one.arg: ("positional only", found[one.arg][1]) for one in given.posonlyargs}
    found |= {one.arg: ("by name", default is None) for one, default in by_name}
    found |= {stars: ("all others", False) for stars, one in (("*", given.vararg), ("**", given.kwarg)) if one}
    return kind.strip(), found


def fields(node: ast.ClassDef) -> set[str]:
    """What a class and its objects have, its own: fields, methods, and what methods set."""
    stored = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    found = {n.attr for n in stored if ast.unparse(n.value) == "self"}
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(statement.name)
        else:
            found |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return found
