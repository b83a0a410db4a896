# SPDX-License-Identifier: Apache-2.0
"""Whether ``TYPE_CHECKING`` in a file is the flag of typing, which is False whenever the file runs.

A block under the flag never runs, so a name that only looks like it must not pass for it: ``from config import
TYPE_CHECKING``, a second assignment, a loop variable, a parameter of that name.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping

__all__ = ["FLAGS", "has_star", "is_usual", "rebound"]

#: Full names of the flag.
FLAGS = frozenset({"typing.TYPE_CHECKING", "typing_extensions.TYPE_CHECKING"})
_MODULES = frozenset({"typing", "typing_extensions"})
_NAME = "TYPE_CHECKING"

# The usual ways to write it; whatever else stands in a file, the syntax tree is asked.
_FROM_TYPING = re.compile(rb"^from typing(?:_extensions)? import [^\n(;]*?\bTYPE_CHECKING\b(?! as)", re.MULTILINE)
_ATTRIBUTE = re.compile(rb"^[ \t]*(?:el)?if (?:not )?typing(?:_extensions)?\.TYPE_CHECKING:", re.MULTILINE)
_CONDITION = re.compile(rb"^[ \t]*if (?:not )?TYPE_CHECKING:", re.MULTILINE)
_MODULE_WORD = re.compile(rb"(?<![\w.])typing(?:_extensions)?\b(?!\.)")
_MODULE_IMPORT = re.compile(
    rb"^(?:import typing(?:_extensions)?[ \t]*(?:#[^\n]*)?$|from typing(?:_extensions)? import)", re.MULTILINE
)
_STAR = re.compile(rb"\bimport[\s\\]*\*")
#: Plain words are searched many times faster; a star has one of these before it.
_BEFORE_A_STAR = (b"import *", b"import*", b"import  ", b"import\t", b"import\\")


def has_star(source: bytes) -> bool:
    """Tell whether a file may hold ``import *``; cheap, and never wrongly False.

    Args:
        source: The file.
    """
    return any(word in source for word in _BEFORE_A_STAR) and _STAR.search(source) is not None


def is_usual(source: bytes) -> bool:
    """Tell from its bytes that every ``TYPE_CHECKING`` of a file is the flag of typing; wrongly False costs a parse.

    Args:
        source: The file.
    """
    count = source.count(b"TYPE_CHECKING")
    if count == 0:
        return True
    imported, conditions = len(_FROM_TYPING.findall(source)), len(_CONDITION.findall(source))
    attributes = len(_ATTRIBUTE.findall(source))
    if imported + conditions + attributes != count or (conditions and not imported):
        return False
    if conditions and has_star(source):
        return False
    return not attributes or len(_MODULE_WORD.findall(source)) == len(_MODULE_IMPORT.findall(source))


def rebound(tree: ast.Module, aliases: Mapping[str, str]) -> frozenset[str]:
    """Return the names of a file that stand for the flag, or for typing, and for something else besides.

    Args:
        tree: The file.
        aliases: What its imports bind: a name to what it stands for.
    """
    flags = {name for name, target in aliases.items() if target in FLAGS}
    modules = {name for name, target in aliases.items() if target in _MODULES}
    if not flags | modules:
        return frozenset()
    bindings: Counter[str] = Counter()
    harmless: Counter[str] = Counter()
    last_import: dict[str, int] = {}
    last_star = 0
    for node in ast.walk(tree):
        bindings.update(_bound_by(node))
        if isinstance(node, ast.Attribute) and node.attr == _NAME and not isinstance(node.ctx, ast.Load):
            return frozenset(flags | modules)  # `typing.TYPE_CHECKING = True`
        if isinstance(node, ast.Constant) and node.value == _NAME:
            return frozenset(flags | modules)  # `setattr`, `globals()[...]`: whatever is done with its name
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            if node.module not in _MODULES or node.level:
                last_star = max(last_star, node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                if f"{node.module}.{alias.name}" in FLAGS:
                    harmless[alias.asname or alias.name] += 1
                    last_import[alias.asname or alias.name] = node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in _MODULES or (alias.asname is None and alias.name.partition(".")[0] in _MODULES):
                    harmless[alias.asname or alias.name.partition(".")[0]] += 1
    for node in tree.body:
        # `TYPE_CHECKING = False` without importing typing: type checkers know the idiom.
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is False:
            harmless.update(target.id for target in node.targets if isinstance(target, ast.Name) and target.id in flags)
    twice = {name for name in flags | modules if bindings[name] > harmless[name]}
    # A star may bind any name; what is imported by name after it is bound anew.
    hidden = {name for name in flags if last_star > last_import.get(name, 0)}
    return frozenset(twice | hidden)


def _bound_by(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node binds."""
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            yield name
        case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
        case ast.MatchMapping(rest=str(name)):
            yield name
        case ast.Import() | ast.ImportFrom():
            for alias in node.names:
                top = alias.name.partition(".")[0] if isinstance(node, ast.Import) else alias.name
                yield alias.asname or top
        case _:
            # Parameters of types, Python 3.12: they have a name and no context.
            if type(node).__name__ in ("TypeVar", "ParamSpec", "TypeVarTuple"):
                yield node.name  # type: ignore[attr-defined]
