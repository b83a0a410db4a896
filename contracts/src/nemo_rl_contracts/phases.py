# SPDX-License-Identifier: Apache-2.0
"""Find the imports of a source file and say when each one runs.

The answer comes from the statement's position in the syntax tree alone; nothing is imported or executed.

Phases, of the module whose source is read:

- ``eager``: runs when the module is imported: module level, class body, ``try`` body, ``else`` and ``finally``,
  ``with``, loops; also decorators, default arguments and base classes.
- ``conditional``: may run then: ``if``, ``elif``, ``else``, ``match``, an ``except`` handler, a short-circuited operand.
- ``lazy``: runs when a function, a lambda or the module's ``__getattr__`` is called.
- ``typing``: never runs: under ``TYPE_CHECKING``.

``TYPE_CHECKING`` counts where it is the one of ``typing`` (or ``typing_extensions``), under any name it was imported as;
an attribute of that name on any other object is an ordinary condition.
"""

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

__all__ = ["Form", "FoundImport", "Phase", "find_imports"]

#: Function that imports, to (keyword that carries the name, phase of the import relative to the call).
_IMPORTERS = MappingProxyType(
    {
        "__import__": ("name", "eager"),
        "builtins.__import__": ("name", "eager"),
        "importlib.__import__": ("name", "eager"),
        "importlib.import_module": ("name", "eager"),
        "lazy_loader.load": ("fullname", "lazy"),
        "pkgutil.resolve_name": ("name", "eager"),
        "pytest.importorskip": ("modname", "eager"),
        "runpy.run_module": ("mod_name", "eager"),
    }
)
_EXECUTORS = frozenset({"exec", "eval", "builtins.exec", "builtins.eval"})
_TYPE_CHECKING = frozenset({"typing.TYPE_CHECKING", "typing_extensions.TYPE_CHECKING"})
_CATCHES_IMPORT_ERROR = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


class Phase(StrEnum):
    """When an import runs."""

    EAGER = "eager"
    CONDITIONAL = "conditional"
    LAZY = "lazy"
    TYPING = "typing"


class Form(StrEnum):
    """How an import is written: a statement, or a literal given to a function that imports."""

    STATEMENT = "statement"
    DYNAMIC = "dynamic"


@dataclass(frozen=True, kw_only=True)
class FoundImport:
    """One import.

    Attributes:
        module: Absolute name of the module; of ``from a import b`` it is ``a``, since only the file system can tell
            whether ``a.b`` is a module.
        names: What a ``from`` statement takes out of it, ``("*",)`` for a star; empty for other forms.
        lineno: Line of the statement or call, counted from 1.
        phase: When it runs.
        form: How it is written.
        guarded: True inside a ``try`` that handles ImportError, or under ``contextlib.suppress`` of it: the import may
            fail, but it runs.
    """

    module: str
    names: tuple[str, ...] = ()
    lineno: int
    phase: Phase
    form: Form
    guarded: bool = False


def find_imports(source: str, *, module: str = "", is_package: bool = False) -> list[FoundImport]:
    """Find every import of a source file, in the order of their lines.

    Args:
        source: The text of the file.
        module: Absolute name of the module, to resolve relative imports; "" leaves their dots in front.
        is_package: True for an ``__init__.py``.

    Raises:
        SyntaxError: If this interpreter cannot parse the source (3.11 does not know PEP 810's ``lazy import``).
    """
    tree = ast.parse(source)
    walker = _Walker(
        names=_Names(_aliases(tree)),
        module=module,
        package=module if is_package else module.rpartition(".")[0],
        annotations_run=not _has_future_annotations(tree),
    )
    walker.visit_all(tree.body, _Place())
    return sorted(walker.found, key=lambda found: found.lineno)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where in the tree we are."""

    phase: Phase = Phase.EAGER
    guarded: bool = False

    def at(self, phase: Phase) -> "_Place":
        """Go below something of this phase: typing beats lazy beats conditional beats eager."""
        order = list(Phase)
        return _Place(phase=max(self.phase, phase, key=order.index), guarded=self.guarded)

    def guard(self, guarded: bool) -> "_Place":
        return _Place(phase=self.phase, guarded=self.guarded or guarded)


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Map each name that an import binds anywhere in the file to what it stands for."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                aliases[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                bound = [name.rpartition(".")[2] for name in _TYPE_CHECKING] if alias.name == "*" else [alias.name]
                for name in bound:
                    aliases[alias.asname or name] = f"{node.module}.{name}"
    for node in tree.body:
        # `TYPE_CHECKING = False` without importing typing: type checkers know the idiom.
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is False:
            is_idiom = [getattr(target, "id", "") for target in node.targets] == ["TYPE_CHECKING"]
            aliases |= {"TYPE_CHECKING": "typing.TYPE_CHECKING"} if is_idiom else {}
    return aliases


def _has_future_annotations(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.ImportFrom)
        and node.module == "__future__"
        and any(alias.name == "annotations" for alias in node.names)
        for node in tree.body
    )


@dataclass(frozen=True)
class _Names:
    """What the names of one file stand for."""

    aliases: Mapping[str, str]

    def dotted(self, node: ast.AST | None) -> str:
        """Return the full name of a name or an attribute chain, "" of anything else."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def runtime_truth(self, test: ast.expr) -> bool | None:
        """Return what a condition is at run time as far as TYPE_CHECKING alone decides it; None if it does not."""
        if self.dotted(test) in _TYPE_CHECKING:
            return False
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            truth = self.runtime_truth(test.operand)
            return None if truth is None else not truth
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


class _Walker:
    """Walks a tree with the place of each node, and collects imports in `found`."""

    def __init__(self, *, names: _Names, module: str, package: str, annotations_run: bool) -> None:
        self.found: list[FoundImport] = []
        self._names = names
        self._module = module
        self._package = package
        self._annotations_run = annotations_run

    def visit_all(self, nodes: Iterable[ast.AST | None], place: _Place) -> None:
        for node in nodes:
            if node is not None:
                self._visit(node, place)

    def _visit(self, node: ast.AST, place: _Place) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                self._statement(node, place)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node, place)
            case ast.Lambda():
                self.visit_all([*node.args.defaults, *node.args.kw_defaults], place)
                self._visit(node.body, place.at(Phase.LAZY))
            case ast.If() | ast.IfExp():
                self._branches(node, place)
            case ast.BoolOp():
                self._operands(node, place)
            case ast.Try() | ast.TryStar():
                self._try(node, place)
            case ast.With() | ast.AsyncWith():
                self._with(node, place)
            case ast.Match():
                self._visit(node.subject, place)
                self.visit_all(node.cases, place.at(Phase.CONDITIONAL))
            case ast.Call():
                self._call(node, place)
                self.visit_all(ast.iter_child_nodes(node), place)
            case _:
                self.visit_all(ast.iter_child_nodes(node), place)

    def _add(self, module: str, node: ast.stmt | ast.expr, place: _Place, names: tuple[str, ...] = ()) -> None:
        form = Form.STATEMENT if isinstance(node, ast.stmt) else Form.DYNAMIC
        self.found.append(
            FoundImport(
                module=module,
                names=names,
                lineno=node.lineno,
                phase=place.phase,
                form=form,
                guarded=place.guarded,
            )
        )

    def _statement(self, node: ast.Import | ast.ImportFrom, place: _Place) -> None:
        if getattr(node, "is_lazy", False):  # PEP 810, Python 3.15
            place = place.at(Phase.LAZY)
        if isinstance(node, ast.Import):
            for alias in node.names:
                self._add(alias.name, node, place)
            return
        module = _resolve("." * node.level + (node.module or ""), self._package)
        self._add(module, node, place, tuple(alias.name for alias in node.names))

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, place: _Place) -> None:
        arguments = node.args
        self.visit_all([*node.decorator_list, *arguments.defaults, *arguments.kw_defaults], place)
        if self._annotations_run:
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            self.visit_all([*(argument.annotation for argument in every if argument), node.returns], place)
        self.visit_all(node.body, place.at(Phase.LAZY))

    def _branches(self, node: ast.If | ast.IfExp, place: _Place) -> None:
        self._visit(node.test, place)
        truth = self._names.runtime_truth(node.test)
        body, orelse = ([part] if isinstance(part, ast.expr) else part for part in (node.body, node.orelse))
        below = {None: Phase.CONDITIONAL, True: Phase.EAGER, False: Phase.TYPING}
        self.visit_all(body, place.at(below[truth]))
        self.visit_all(orelse, place.at(below[None if truth is None else not truth]))

    def _operands(self, node: ast.BoolOp, place: _Place) -> None:
        """Visit `a and b`: `b` may run, unless TYPE_CHECKING in front of it decides."""
        decisive = isinstance(node.op, ast.Or)
        for value in node.values:
            self._visit(value, place)
            truth = self._names.runtime_truth(value)
            if truth is None:
                place = place.at(Phase.CONDITIONAL)
            elif truth is decisive:
                place = place.at(Phase.TYPING)

    def _try(self, node: ast.Try | ast.TryStar, place: _Place) -> None:
        guarded = self._names.catches_import_error(handler.type for handler in node.handlers)
        self.visit_all(node.body, place.guard(guarded))
        self.visit_all(node.handlers, place.at(Phase.CONDITIONAL))
        self.visit_all([*node.orelse, *node.finalbody], place)

    def _with(self, node: ast.With | ast.AsyncWith, place: _Place) -> None:
        self.visit_all(node.items, place)
        suppressed = [
            argument
            for item in node.items
            if isinstance(item.context_expr, ast.Call)
            and self._names.dotted(item.context_expr.func) == "contextlib.suppress"
            for argument in item.context_expr.args
        ]
        self.visit_all(node.body, place.guard(self._names.catches_import_error(suppressed)))

    def _call(self, node: ast.Call, place: _Place) -> None:
        function = self._names.dotted(node.func)
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if function in _EXECUTORS:
            self._executed(node, place)
        if function not in _IMPORTERS:
            return
        keyword, phase = _IMPORTERS[function]
        name = _literal(node.args[0] if node.args else keywords.get(keyword))
        if not name:
            return
        name = name.partition(":")[0]  # pkgutil's `module:attribute`
        if name.startswith("."):
            name = _resolve(name, self._anchor(node.args[1] if len(node.args) > 1 else keywords.get("package")))
        self._add(name, node, place.at(Phase(phase)))

    def _anchor(self, package: ast.expr | None) -> str:
        """Return the package that a relative dynamic import starts from, "" if it is not written out."""
        known = {"__name__": self._module, "__package__": self._package}
        return _literal(package) or known.get(self._names.dotted(package), "")

    def _executed(self, node: ast.Call, place: _Place) -> None:
        text = _literal(node.args[0]) if node.args else None
        if text is None:
            return
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return  # it would not import anything at run time either
        inner = _Walker(
            names=self._names, module=self._module, package=self._package, annotations_run=self._annotations_run
        )
        inner.visit_all(tree.body, place)
        self.found.extend(replace(found, lineno=node.lineno, form=Form.DYNAMIC) for found in inner.found)


def _literal(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _resolve(name: str, package: str) -> str:
    """Make a relative name absolute; it keeps its dots where the package is unknown or has too few levels."""
    tail = name.lstrip(".")
    level = len(name) - len(tail)
    parts = package.split(".") if package else []
    if level == 0 or level > len(parts):
        return name
    return ".".join([*parts[: len(parts) - level + 1], *([tail] if tail else [])])
