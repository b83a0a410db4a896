# SPDX-License-Identifier: Apache-2.0
"""What the names of one source file stand for: aliases of imports, text constants, functions that import."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from nemo_rl_contracts.type_checking import FLAGS, rebound

__all__ = ["EXECUTORS", "IMPORTERS", "PROBES", "Names", "statements"]

#: Function that imports, to (keyword that carries the name, phase of the import relative to the call).
IMPORTERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "__import__": ("name", "eager"),
        "builtins.__import__": ("name", "eager"),
        "importlib.__import__": ("name", "eager"),
        "importlib.import_module": ("name", "eager"),
        # A package that is named as the anchor of a resource is imported to find its folder.
        "importlib.resources.files": ("anchor", "eager"),
        "importlib_resources.files": ("anchor", "eager"),
        **{
            f"importlib.resources.{name}": ("package", "eager")
            for name in ("contents", "is_resource", "open_binary", "open_text", "path", "read_binary", "read_text")
        },
        "lazy_loader.load": ("fullname", "lazy"),
        "pkgutil.get_data": ("package", "eager"),
        "pkgutil.resolve_name": ("name", "eager"),
        "pytest.importorskip": ("modname", "eager"),
        "runpy.run_module": ("mod_name", "eager"),
    }
)
#: Probes: of `a.b.c` they import `a.b` to look inside it, of `a` nothing.
PROBES = frozenset({"importlib.util.find_spec"})
EXECUTORS = frozenset({"exec", "eval", "builtins.exec", "builtins.eval"})

_TYPING = frozenset({"typing", "typing_extensions"})
_CATCHES_IMPORT_ERROR = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


def statements(nodes: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield every statement below these, at any depth and in no particular order; expressions are not entered."""
    todo: list[ast.AST] = list(nodes)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.stmt):
            yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            part = getattr(node, name, None)
            if isinstance(part, list):
                todo.extend(part)


@dataclass(frozen=True, kw_only=True)
class Names:
    """What the names of one file stand for.

    Attributes:
        aliases: Each name that an import binds anywhere in the file, or that is set to a function which imports, to what
            it stands for. Where it may stand for several things, the one from which more follows.
        constants: Each name that the module sets once, to a text that is written out.
    """

    aliases: Mapping[str, str]
    constants: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tree: ast.Module, *, package: str = "", functions: Iterable[str] = (), is_usual: bool = False
    ) -> "Names":
        """Collect them from a whole file.

        Args:
            tree: The file.
            package: The package that relative imports start from, "" if it is not known.
            functions: Full names of further functions that import.
            is_usual: Whether its bytes show already that TYPE_CHECKING is the flag of typing everywhere.
        """
        special = frozenset({*IMPORTERS, *EXECUTORS, *PROBES, *functions})
        holders = {function.rpartition(".")[0] for function in special} - {""}
        nodes = list(statements(tree.body))
        aliases: dict[str, str] = {}
        for name, target in _imported_names(nodes, package, special):
            known = aliases.get(name)
            # Typing's flag takes code away and an import function adds some, so the other meaning is the careful one.
            if known is None or known in _TYPING | FLAGS or target in special:
                aliases[name] = target
        names = cls(aliases=aliases)
        for name, value in _assigned_names(nodes):
            full = names.dotted(value)
            is_false = isinstance(value, ast.Constant) and value.value is False
            if full in special | holders | FLAGS:
                aliases.setdefault(name, full)
            elif aliases.get(name) in FLAGS and not is_false:
                aliases[name] = name
            elif name == "TYPE_CHECKING" and is_false:
                # `TYPE_CHECKING = False` without importing typing: type checkers know the idiom.
                aliases.setdefault(name, "typing.TYPE_CHECKING")
        for name in frozenset() if is_usual else rebound(tree, aliases):
            aliases[name] = f"?{name}"  # it stands for something else too, and then a block under it may run
        return cls(aliases=aliases, constants=_constants(tree))

    def extended(self, inner: "Names") -> "Names":
        """Return these names with those of a text that is executed among them."""
        return Names(aliases={**self.aliases, **inner.aliases}, constants={**self.constants, **inner.constants})

    def dotted(self, node: ast.AST | None) -> str:
        """Return the full name of a name or an attribute chain, "" of anything else."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.aliases.get(node.id, node.id), *reversed(attributes)])

    def runtime_truth(self, test: ast.expr) -> bool | None:
        """Return what a condition is at run time as far as TYPE_CHECKING alone decides it; None if it does not."""
        negated = False
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            negated = not negated
            test = test.operand
        truth = self._plain_truth(test)
        return None if truth is None else truth is not negated

    def _plain_truth(self, test: ast.expr) -> bool | None:
        if isinstance(test, (ast.Name, ast.Attribute)):
            return False if self.dotted(test) in FLAGS else None
        if isinstance(test, ast.BoolOp):
            decisive = isinstance(test.op, ast.Or)
            truths = [self.runtime_truth(value) for value in test.values]
            if decisive in truths:
                return decisive
            return None if None in truths else not decisive
        return None

    def catches_import_error(self, types: Iterable[ast.expr | None]) -> bool:
        """Tell whether one of these exception types (None: a bare except) covers ImportError."""
        flat = [part for node in types for part in (node.elts if isinstance(node, ast.Tuple) else [node])]
        return any(part is None or self.dotted(part).rpartition(".")[2] in _CATCHES_IMPORT_ERROR for part in flat)

    def text(self, node: ast.expr | None) -> str | None:
        """Return the text that an expression is, as far as it is written out; None of a computed one."""
        front, is_all = self._front(node)
        return front if is_all else None

    def module_name(self, node: ast.expr | None) -> str:
        """Return the module that an expression names, "" of a computed one.

        Where only the front is written out (``f"vllm.{name}"``, ``"vllm." + name``), the whole parts of the front count:
        they are imported on the way.
        """
        front, is_all = self._front(node)
        return front if is_all else front.rpartition(".")[0].rstrip(".")

    def _front(self, node: ast.expr | None) -> tuple[str, bool]:
        """Return the text with which an expression is sure to begin, and whether that is all of it."""
        parts: list[str] = []
        todo: list[ast.expr | None] = [node]
        while todo:
            match todo.pop():
                case ast.Constant(value=str(part)):
                    parts.append(part)
                case ast.Name(id=name) if name in self.constants:
                    parts.append(self.constants[name])
                case ast.BinOp(op=ast.Add(), left=left, right=right):
                    todo += [right, left]
                case ast.JoinedStr(values=values):
                    todo += reversed(values)
                case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                    todo.append(value)
                case ast.BinOp(op=ast.Mod(), left=ast.Constant(value=str(part))):
                    return "".join([*parts, part.partition("%")[0]]), False
                case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(part)), attr="format")):
                    return "".join([*parts, part.partition("{")[0]]), False
                case _:
                    return "".join(parts), False
        return "".join(parts), True


def _imported_names(nodes: Iterable[ast.stmt], package: str, special: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield what imports bind: a name, and what it stands for."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield alias.asname or top, alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = [f"{module}.{alias.name}"]
                if alias.name == "*":  # of all that it may bind, the names that matter here
                    full = [name for name in (*special, *FLAGS) if name.rpartition(".")[0] == module]
                for name in full:
                    yield alias.asname or name.rpartition(".")[2], name


def _assigned_names(nodes: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Yield what assignments bind to a single value."""
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node.value


def _constants(tree: ast.Module) -> dict[str, str]:
    """Return the names that the module itself sets once, to a text."""
    found: dict[str, str] = {}
    set_again: set[str] = set()
    for name, value in _assigned_names(tree.body):
        text = Names(aliases={}, constants=found).text(value)
        if name in found:
            set_again.add(name)
        if text is not None:
            found[name] = text
    return {name: text for name, text in found.items() if name not in set_again}
