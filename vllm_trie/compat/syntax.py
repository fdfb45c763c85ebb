"""What `fingerprint.py` compares of a piece of source: its body, its signature and its fields."""

from __future__ import annotations

import ast
import hashlib
from typing import Any

# AST fields that do not affect what a body does.
_WORDS = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}
_ACTS = (ast.Call, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
_KINDS = ("cached_property", "classmethod", "property", "staticmethod")


def vllm_body_digest(node: ast.AST) -> str:
    """SHA-256 of a syntax tree without docstrings, comments, annotations and log calls.

    Unlike `ast.dump`, it does not depend on the version of Python.
    """
    return hashlib.sha256(repr(_vllm_body_essence(node)).encode()).hexdigest()


def _vllm_body_essence(part: Any) -> Any:
    if isinstance(part, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(part) if name not in _WORDS]
        return type(part).__name__, *(
            (name, _vllm_body_essence(value)) for name, value in fields if value not in (None, [])
        )
    if isinstance(part, list):
        return [_vllm_body_essence(statement) for statement in part if not _vllm_statement_only_logs(statement)]
    return repr(part)


def _vllm_statement_only_logs(statement: Any) -> bool:
    """Whether a statement is a docstring, or a call of the logger whose arguments have no effects."""
    if not isinstance(statement, ast.Expr):
        return False
    call = statement.value
    if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("logger."):
        return not any(isinstance(part, _ACTS) for part in ast.walk(call) if part is not call)
    return isinstance(call, ast.Constant)


def vllm_signature(node: Any) -> str:
    """How a function is called: "classmethod(cls, args, *strict=)"; * marks keyword-only, / positional-only parameters.

    For a class, its declared fields.
    """
    if isinstance(node, ast.ClassDef):
        declared = [field for field in node.body if isinstance(field, ast.AnnAssign)]
        return f"class({', '.join(ast.unparse(field.target) + '=' * (field.value is not None) for field in declared)})"
    kinds = ["async"] if isinstance(node, ast.AsyncFunctionDef) else []
    kinds += sorted(name for decorator in node.decorator_list if (name := ast.unparse(decorator)) in _KINDS)
    args, names = node.args, [f"/{p.arg}" for p in node.args.posonlyargs] + [p.arg for p in node.args.args]
    listed = [name + "=" * (at >= len(names) - len(args.defaults)) for at, name in enumerate(names)]
    listed += ["*"] * (args.vararg is not None)
    by_name = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    listed += [f"*{p.arg}" + "=" * (default is not None) for p, default in by_name]
    listed += ["**"] * (args.kwarg is not None)
    return f"{' '.join(kinds)}({', '.join(listed)})"


def vllm_signature_misfit(recorded: str, found: str) -> str:
    """Why calls that fit the recorded signature do not fit the found one; empty if they do."""
    (was_kind, was), (kind, now) = map(_vllm_signature_parameters, (recorded, found))
    if kind != was_kind:
        return f"is {kind or 'a plain function'}, no longer {was_kind or 'a plain function'}"
    for name, parameter in was.items():
        if name not in now:
            return f"has lost {name!r}"
        if now[name] not in (parameter, f"{parameter}="):
            return f"takes {name!r} differently"
    if added := [name for name in now if name not in was and not now[name].endswith(("=", "*"))]:
        return f"also requires {added[0]!r}"
    orders = [[name for name, parameter in of.items() if not parameter.startswith("*")] for of in (was, now)]
    return "" if orders[1][: len(orders[0])] == orders[0] else "takes its parameters in another order"


def _vllm_signature_parameters(text: str) -> tuple[str, dict[str, str]]:
    kind, _, listed = text.removesuffix(")").partition("(")
    return kind, {p.strip("*/=") or p: p for p in listed.split(", ") if p}


def vllm_class_fields(node: ast.ClassDef) -> set[str]:
    """The attributes that a class itself defines: fields, methods, and what its methods set on `self`."""
    stored = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    found = {n.attr for n in stored if ast.unparse(n.value) == "self"}
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(statement.name)
        else:
            found |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return found
