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
import bisect
import io
import re
import sys
import tokenize
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nemo_rl_contracts.found import Form, FoundImport, Phase
from nemo_rl_contracts.names import EXECUTORS, IMPORTERS, PROBES, Names
from nemo_rl_contracts.type_checking import is_usual

__all__ = ["Form", "FoundImport", "Phase", "find_imports", "may_import_dynamically"]

#: Words one of which a file has to contain so that a call in it may import.
_WORDS = (
    b"import_module",
    b"__import__",
    b"importorskip",
    b"run_module",
    b"resolve_name",
    b"lazy_loader",
    b"find_spec",
    b"resources",
    b"get_data",
    b"builtins",
)
#: The two whose names are common in other words; `model.eval()` does not count.
_EXECUTES = re.compile(rb"(?<![\w.])(?:exec|eval)(?:[\s\\)]|#[^\n]*\n)*\(")
_TYPE_ALIAS: tuple[type, ...] = (ast.TypeAlias,) if sys.version_info >= (3, 12) else ()
#: From Python 3.14 on annotations are evaluated when somebody asks for them (PEP 649).
_ANNOTATIONS_ARE_EAGER = sys.version_info < (3, 14)


def may_import_dynamically(source: bytes) -> bool:
    """Tell whether a file holds a word without which none of its calls can import; cheap, and never wrongly False."""
    source = _spelled_out(source)
    # Searching for plain words is many times faster than one expression for all of them.
    return any(word in source for word in _WORDS) or (
        (b"exec" in source or b"eval" in source) and _EXECUTES.search(source) is not None
    )


def find_imports(
    source: str | bytes, *, module: str = "", is_package: bool = False, import_functions: Iterable[str] = ()
) -> list[FoundImport]:
    """Find every import of a source file, in the order of their lines.

    Args:
        source: The file; bytes are decoded as Python does, by their mark or the coding line, else as UTF-8.
        module: Absolute name of the module, to resolve relative imports; "" leaves their dots in front.
        is_package: True for an ``__init__.py``.
        import_functions: Full names of further functions that import what their first argument names.

    Raises:
        SyntaxError: If this interpreter cannot parse the source: a syntax of a later Python (3.11 does not know PEP 810's
            ``lazy import``), bytes that are not in the encoding they claim, null bytes, or nesting that is too deep.
    """
    tree = _parse(source)
    functions = tuple(import_functions)
    package = module if is_package else module.rpartition(".")[0]
    importers = dict(IMPORTERS) | dict.fromkeys(functions, ("name", "eager"))
    text = _spelled_out(source)
    names = Names.of(tree, package=package, functions=functions, is_usual=is_usual(text))
    if module:
        names = replace(names, constants={**names.constants, "__name__": module, "__package__": package})
    walker = _Walker(
        names=names,
        module=module,
        package=package,
        annotations_run=_ANNOTATIONS_ARE_EAGER and not _has_future_annotations(tree),
        importers=importers,
        call_lines=_lines_of_calls(text, names, importers),
    )
    walker.walk(tree.body)
    return sorted(walker.found, key=lambda found: found.lineno)


def _spelled_out(source: str | bytes) -> bytes:
    """Return a source in UTF-8 with each name as Python reads it; its lines stay as they are.

    Python takes other letters for the plain ones that they stand for (NFKC), and a coding line can say UTF-7.
    """
    if isinstance(source, bytes):
        if source.isascii() and not any(b"coding" in line for line in source.split(b"\n", 2)[:2]):
            return source
        try:
            source = source.decode(tokenize.detect_encoding(io.BytesIO(source).readline)[0])
        except (SyntaxError, LookupError, ValueError):
            return source  # the parser refuses it too
    return unicodedata.normalize("NFKC", source).encode("utf-8", "surrogatepass")


def _lines_of_calls(source: bytes, names: Names, importers: Mapping[str, tuple[str, str]]) -> list[int]:
    """Return the lines on which a function that imports is written, under its own name or another that it has here.

    Statements alone are a fraction of a tree; only expressions that touch one of these lines are entered.
    """
    functions = {*importers, *PROBES, *EXECUTORS}
    words = {name.rpartition(".")[2] for name in functions}
    words |= {alias for alias, meant in names.aliases.items() if meant in functions}
    found = [word.encode() for word in words if word.encode() in source]
    if not found:
        return []
    return [number for number, line in enumerate(source.splitlines(), 1) if any(word in line for word in found)]


def _parse(source: str | bytes) -> ast.Module:
    try:
        return ast.parse(source.removeprefix("\ufeff") if isinstance(source, str) else source)
    except (RecursionError, MemoryError):
        raise SyntaxError("the source is nested too deeply for this interpreter's parser") from None
    except ValueError as error:  # null bytes, before Python 3.12
        raise SyntaxError(str(error)) from None


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where in the tree we are."""

    phase: Phase = Phase.EAGER
    guarded: bool = False
    in_function: bool = False
    in_f_string: bool = False  # where Python 3.11 gives no true line numbers

    def at(self, phase: Phase) -> "_Place":
        """Go below something of this phase: typing beats lazy beats conditional beats eager."""
        return replace(self, phase=self.phase.then(phase))

    def guard(self, guarded: bool) -> "_Place":
        return replace(self, guarded=self.guarded or guarded)

    def function(self) -> "_Place":
        """Go into the body of a function: it runs when it is called, and no `try` around its definition helps it."""
        return replace(self.at(Phase.LAZY), in_function=True, guarded=False)


def _has_future_annotations(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.ImportFrom)
        and node.module == "__future__"
        and any(alias.name == "annotations" for alias in node.names)
        for node in tree.body
    )


class _Walker:
    """Walks a tree with the place of each node, and collects imports in `found`.

    It keeps a list of what is left to visit and does not call itself: a chain of a thousand `elif` is no problem.
    """

    def __init__(
        self,
        *,
        names: Names,
        module: str,
        package: str,
        annotations_run: bool,
        importers: Mapping[str, tuple[str, str]],
        call_lines: Sequence[int],
    ) -> None:
        self.found: list[FoundImport] = []
        self._names = names
        self._module = module
        self._package = package
        self._annotations_run = annotations_run
        self._importers = importers
        self._call_lines = call_lines
        self._todo: list[tuple[ast.AST, _Place]] = []

    def walk(self, body: Iterable[ast.AST]) -> None:
        self._later(body, _Place())
        while self._todo:
            self._visit(*self._todo.pop())

    def _later(self, nodes: Iterable[ast.AST | None], place: _Place) -> None:
        self._todo.extend((node, place) for node in nodes if node is not None)

    def _expressions(self, nodes: Iterable[ast.AST | None], place: _Place) -> None:
        if self._call_lines:
            self._later((node for node in nodes if node is not None and self._may_call(node, place)), place)

    def _may_call(self, node: ast.AST, place: _Place) -> bool:
        first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
        if first is None or last is None or place.in_f_string:
            return True
        next_call = bisect.bisect_left(self._call_lines, first)
        return next_call < len(self._call_lines) and self._call_lines[next_call] <= last

    def _visit(self, node: ast.AST, place: _Place) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                self._statement(node, place)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node, place)
            case ast.ClassDef():
                self._expressions([*node.decorator_list, *node.bases, *node.keywords], place)
                self._type_parameters(node, place)
                # Of a class inside a function the annotations are evaluated, unlike those of the function's own names.
                self._later(node.body, replace(place, in_function=False))
            case ast.Lambda():
                self._expressions([*node.args.defaults, *node.args.kw_defaults], place)
                self._expressions([node.body], place.function())
            case ast.If() | ast.IfExp():
                self._branches(node, place)
            case ast.BoolOp():
                self._operands(node, place)
            case ast.Try() | ast.TryStar():
                self._try(node, place)
            case ast.With() | ast.AsyncWith():
                self._with(node, place)
            case ast.Match():
                self._expressions([node.subject], place)
                for case in node.cases:
                    self._expressions([case.guard], place.at(Phase.CONDITIONAL))
                    self._later(case.body, place.at(Phase.CONDITIONAL))
            case ast.AnnAssign():
                self._expressions([node.target, node.value], place)
                if self._annotations_run and not place.in_function:
                    self._expressions([node.annotation], place)
            case ast.Call():
                self._call(node, place)
                self._expressions(ast.iter_child_nodes(node), place)
            case ast.JoinedStr():
                self._expressions(node.values, replace(place, in_f_string=True))
            case _:
                self._other(node, place)

    def _other(self, node: ast.AST, place: _Place) -> None:
        if isinstance(node, _TYPE_ALIAS):
            self._expressions(ast.iter_child_nodes(node), place.function())
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            heads = [node.test] if isinstance(node, ast.While) else [node.iter, node.target]
            self._expressions(heads, place)
            self._later([*node.body, *node.orelse], place)
        else:
            self._expressions(ast.iter_child_nodes(node), place)

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
        self._expressions([*node.decorator_list, *arguments.defaults, *arguments.kw_defaults], place)
        if self._annotations_run:
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            self._expressions([*(argument.annotation for argument in every if argument), node.returns], place)
        self._type_parameters(node, place)
        self._later(node.body, place.function())

    def _type_parameters(self, node: ast.AST, place: _Place) -> None:
        """Visit the bounds of `def f[T: bound]`, Python 3.12: they are evaluated when somebody asks for them."""
        self._expressions(getattr(node, "type_params", ()), place.function())

    def _branches(self, node: ast.If | ast.IfExp, place: _Place) -> None:
        self._expressions([node.test], place)
        truth = self._names.runtime_truth(node.test)
        body, orelse = ([part] if isinstance(part, ast.expr) else part for part in (node.body, node.orelse))
        below = {None: Phase.CONDITIONAL, True: Phase.EAGER, False: Phase.TYPING}
        self._later(body, place.at(below[truth]))
        self._later(orelse, place.at(below[None if truth is None else not truth]))

    def _operands(self, node: ast.BoolOp, place: _Place) -> None:
        """Visit `a and b`: `b` may run, unless TYPE_CHECKING in front of it decides."""
        decisive = isinstance(node.op, ast.Or)
        for value in node.values:
            self._expressions([value], place)
            truth = self._names.runtime_truth(value)
            if truth is None:
                place = place.at(Phase.CONDITIONAL)
            elif truth is decisive:
                place = place.at(Phase.TYPING)

    def _try(self, node: ast.Try | ast.TryStar, place: _Place) -> None:
        guarded = self._names.catches_import_error(handler.type for handler in node.handlers)
        self._later(node.body, place.guard(guarded))
        for handler in node.handlers:
            self._expressions([handler.type], place.at(Phase.CONDITIONAL))
            self._later(handler.body, place.at(Phase.CONDITIONAL))
        self._later([*node.orelse, *node.finalbody], place)

    def _with(self, node: ast.With | ast.AsyncWith, place: _Place) -> None:
        self._expressions(node.items, place)
        suppressed = [
            argument
            for item in node.items
            if isinstance(item.context_expr, ast.Call)
            and self._names.dotted(item.context_expr.func) == "contextlib.suppress"
            for argument in item.context_expr.args
        ]
        self._later(node.body, place.guard(self._names.catches_import_error(suppressed)))

    def _call(self, node: ast.Call, place: _Place) -> None:
        function = self._names.dotted(node.func)
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if function in EXECUTORS:
            self._executed(node, place)
        elif function in PROBES:
            # `find_spec("a.b")` imports `a` to look for `b`.
            parent = self._named(node, keywords, "name").rpartition(".")[0]
            if parent.strip("."):
                self._add(parent, node, place)
        # A function that a configuration names may be called in the module that defines it.
        elif known := self._importers.get(function) or self._importers.get(f"{self._module}.{function}"):
            name = self._named(node, keywords, known[0])
            if function.rpartition(".")[2] == "__import__":
                self._plain_import(node, keywords, name, place)
            elif name:
                self._add(name, node, place.at(Phase(known[1])))

    def _plain_import(self, node: ast.Call, keywords: Mapping[str | None, ast.expr], name: str, place: _Place) -> None:
        """Add `__import__(name, globals, locals, fromlist, level)`, which is what a statement comes to."""
        taken = node.args[3] if len(node.args) > 3 else keywords.get("fromlist")
        level = node.args[4] if len(node.args) > 4 else keywords.get("level")
        names = [self._names.text(item) for item in taken.elts] if isinstance(taken, (ast.List, ast.Tuple)) else []
        dots = level.value if isinstance(level, ast.Constant) and isinstance(level.value, int) else 0
        if name or dots:
            self._add(_resolve("." * dots + name, self._package), node, place, tuple(text for text in names if text))

    def _named(self, node: ast.Call, keywords: Mapping[str | None, ast.expr], keyword: str) -> str:
        """Return the module that a call names by its first argument or by a keyword, "" of a computed one."""
        name = self._names.module_name(node.args[0] if node.args else keywords.get(keyword))
        name = name.partition(":")[0]  # `module:attribute`, as pkgutil.resolve_name and entry points write it
        if name.startswith("."):
            name = _resolve(name, self._anchor(node.args[1] if len(node.args) > 1 else keywords.get("package")))
        return name

    def _anchor(self, package: ast.expr | None) -> str:
        """Return the package that a relative dynamic import starts from, "" if it is not written out."""
        known = {"__name__": self._module, "__package__": self._package}
        return self._names.text(package) or known.get(self._names.dotted(package), "")

    def _executed(self, node: ast.Call, place: _Place) -> None:
        code = node.args[0] if node.args else None
        if (
            isinstance(code, ast.Call)
            and self._names.dotted(code.func) in ("compile", "builtins.compile")
            and code.args
        ):
            code = code.args[0]
        text = self._names.text(code)
        if text is None:
            return
        try:
            tree = _parse(text.lstrip(" \t"))  # `eval` passes over leading blanks; `exec` of such a text fails
        except SyntaxError:
            return  # it would not import anything at run time either
        names = self._names.extended(Names.of(tree, package=self._package, functions=self._importers))
        inner = _Walker(
            names=names,
            module=self._module,
            package=self._package,
            annotations_run=self._annotations_run,
            importers=self._importers,
            call_lines=_lines_of_calls(_spelled_out(text), names, self._importers),
        )
        inner._later(tree.body, replace(place, in_function=False))
        inner.walk([])
        self.found.extend(replace(found, lineno=node.lineno, form=Form.DYNAMIC) for found in inner.found)


def _resolve(name: str, package: str) -> str:
    """Make a relative name absolute; it keeps its dots where the package is unknown or has too few levels."""
    tail = name.lstrip(".")
    level = len(name) - len(tail)
    parts = package.split(".") if package else []
    if level == 0 or level > len(parts):
        return name
    return ".".join([*parts[: len(parts) - level + 1], *([tail] if tail else [])])
