# SPDX-License-Identifier: Apache-2.0
"""The source files of a package on disk: which there are, which nobody can import, and their imports, read once."""

import ast
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nemo_rl_contracts import names, phases, type_checking
from nemo_rl_contracts.errors import MisconfiguredError, NotCoveredError
from nemo_rl_contracts.phases import Form, FoundImport, Phase, find_imports, may_import_dynamically
from nemo_rl_contracts.slices import imports_at, lines_of
from nemo_rl_contracts.type_checking import has_star, is_usual

__all__ = ["CACHE_FOLDER", "Marks", "Reader", "SourceFile", "Stray", "find_sources", "package_folders", "shown"]

#: Where results are kept between runs, unless somebody says otherwise; relative to the working directory.
CACHE_FOLDER = ".nemo_rl_contracts_cache"

_COMPILED_SUFFIXES = (".so", ".pyd", ".pyc")


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One module on disk.

    Attributes:
        module: Its absolute name.
        path: Its file.
        is_package: True of an ``__init__.py``.
    """

    module: str
    path: Path
    is_package: bool = False


@dataclass(frozen=True, kw_only=True)
class Stray:
    """A file below a package that is no module of it, or can't be read as one.

    Attributes:
        path: The file.
        reason: Why, as the end of a sentence.
        compiled: True of an extension module: it has no source that could be read.
        module: The name under which Python would import it all the same, "" where there is none.
    """

    path: Path
    reason: str
    compiled: bool = False
    module: str = ""


class Marks(NamedTuple):
    """What the bytes of a file show.

    Attributes:
        may_call: A call in it may import something.
        is_odd: Its statements may do something else than grimp takes them for: a star, another TYPE_CHECKING.
    """

    may_call: bool
    is_odd: bool


def package_folders(package: str) -> list[Path]:
    """Return the folders of a package, or its single file, without importing anything of it.

    Args:
        package: Its name; dotted for a part of a namespace.

    Raises:
        MisconfiguredError: If there is no such package.
    """
    top, *rest = package.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError) as error:
        raise MisconfiguredError(f"the package {top!r} can't be looked up: {error}") from error
    if spec is None:
        raise MisconfiguredError(
            f"there is no package {top!r} on the import path; install it, or run where its folder (or `src`) is"
        )
    if spec.submodule_search_locations is None:
        if rest or spec.origin is None or not Path(spec.origin).is_file():
            raise MisconfiguredError(f"{package!r} is no package with source files")
        return [Path(spec.origin)]
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    for part in rest:
        folders = [folder / part for folder in folders if (folder / part).is_dir()]
        if not folders:
            raise MisconfiguredError(f"the package {package!r} has no folder below {top!r}")
    return folders


def find_sources(package: str) -> tuple[list[SourceFile], list[Stray]]:
    """Find every file of a package, and what lies below it without being importable.

    Args:
        package: Name of a root package that can be found on the import path.

    Returns:
        The modules in the order of their names, and the strays in the order of their paths.

    Raises:
        MisconfiguredError: If there is no such package.
        NotCoveredError: If one of its folders can't be looked into.
    """
    modules: dict[str, SourceFile] = {}
    strays: list[Stray] = []
    for folder in package_folders(package):
        if folder.is_file():
            modules[package] = SourceFile(module=package, path=folder)
            continue
        for found in _walk(folder, package):
            if isinstance(found, Stray):
                strays.append(found)
            elif found.module not in modules:
                modules[found.module] = found
    for module, file in list(modules.items()):
        # `a.py` beside `a/__init__.py` is never imported. The walk sees the file of the folder above first.
        if not file.is_package and (twin := file.path.with_suffix("") / "__init__.py").is_file():
            modules[module] = SourceFile(module=module, path=twin, is_package=True)
            strays.append(Stray(path=file.path, reason="the package of the same name beside it is imported instead"))
    return sorted(modules.values(), key=lambda file: file.module), sorted(strays, key=lambda stray: stray.path)


def _walk(top: Path, package: str) -> Iterator[SourceFile | Stray]:
    """Walk one folder of a package."""
    # Below a folder that can't be imported everything is a stray, for the reason of that folder.
    unreachable: dict[str, str] = {}
    namespace = not (top / "__init__.py").is_file()
    # Links are followed as grimp and Python itself do, but not in a circle.
    for folder, below, files in os.walk(top, followlinks=True, onerror=_refuse):
        below[:] = sorted(name for name in below if name != "__pycache__" and not _leads_up(Path(folder) / name))
        relative = Path(folder).relative_to(top)
        reason = next(
            (unreachable[str(part)] for part in [relative, *relative.parents] if str(part) in unreachable), ""
        )
        if not reason and folder != str(top):
            reason = _why_unreachable(relative.name, has_init="__init__.py" in files, namespace=namespace)
            if reason:
                unreachable[str(relative)] = reason
        for name in sorted(files):
            path = Path(folder) / name
            if path.suffix in _COMPILED_SUFFIXES:
                yield Stray(path=path, reason="it is compiled: there is no source to read", compiled=True)
            elif path.suffix == ".py":
                # A name with a dash can't be written in an import statement, but import_module takes it.
                own = reason or (f"no module can have the name {path.stem!r}" if "." in path.stem else "")
                parts = [package, *relative.parts, *([] if name == "__init__.py" else [path.stem])]
                if own:
                    importable = all(part.isidentifier() for part in parts)
                    yield Stray(path=path, reason=own, module=".".join(parts) if importable else "")
                else:
                    yield SourceFile(module=".".join(parts), path=path, is_package=name == "__init__.py")


def _refuse(error: OSError) -> None:
    raise NotCoveredError(f"{error.filename} can't be looked into: {error.strerror}") from error


def _why_unreachable(name: str, *, has_init: bool, namespace: bool) -> str:
    if not name.isidentifier():
        return f"the folder {name!r} can't be written in an import"
    if not has_init and not namespace:
        return f"the folder {name!r} has no __init__.py, so import linters and wheel builders pass it by; add one"
    return ""


def _leads_up(folder: Path) -> bool:
    """Tell whether a folder is a link to one above it."""
    return folder.is_symlink() and folder.resolve() in folder.parent.resolve().joinpath("_").parents


class Reader:
    """Reads source files and their imports, each file once; results are kept on disk by content.

    Attributes:
        files: Module name to its file.
    """

    def __init__(
        self,
        files: Iterable[SourceFile],
        *,
        cache_folder: Path | None = None,
        import_functions: Iterable[str] = (),
    ) -> None:
        """Take the files.

        Args:
            files: Every module that can be asked for.
            cache_folder: Where results are kept between runs; None keeps nothing.
            import_functions: Further functions that import; see ``find_imports``.
        """
        self.files: Mapping[str, SourceFile] = {file.module: file for file in files}
        self._functions = tuple(sorted(import_functions))
        self._bytes: dict[str, bytes] = {}
        self._imports: dict[str, list[FoundImport]] = {}
        self._lines: dict[str, Sequence[bytes] | None] = {}
        self._marks: dict[str, Marks] = {}
        self._cache = _Cache(cache_folder) if cache_folder is not None else None

    def source(self, module: str) -> bytes:
        """Return the bytes of a module's file.

        Raises:
            NotCoveredError: If the file can't be read.
        """
        if module not in self._bytes:
            path = self.files[module].path
            try:
                self._bytes[module] = path.read_bytes()
            except OSError as error:
                raise NotCoveredError(f"{shown(path)} can't be read: {error.strerror or error}") from error
        return self._bytes[module]

    def imports(self, module: str) -> list[FoundImport]:
        """Return the imports of a module.

        Raises:
            NotCoveredError: If its file can't be read or parsed by this interpreter.
        """
        if module not in self._imports:
            self._imports[module] = self._read(self.files[module])
        return self._imports[module]

    def imports_at(self, module: str, lineno: int) -> list[FoundImport] | None:
        """Return what one import statement of a module imports, None where the whole file has to be parsed to tell.

        Args:
            module: The module; every TYPE_CHECKING in its file is the flag of typing.
            lineno: A line on which an import statement is known to stand.

        Raises:
            NotCoveredError: If the file can't be read.
        """
        if module not in self._lines:
            self._lines[module] = lines_of(self.source(module))
        lines = self._lines[module]
        if lines is None:
            return None
        return imports_at(lines, lineno, module=module, is_package=self.files[module].is_package)

    def marks(self, module: str) -> Marks:
        """Return what the bytes of a module's file show; cheap, and never wrongly False.

        Raises:
            NotCoveredError: If the file can't be read.
        """
        if module not in self._marks:
            source = self.source(module)
            key = f"marks {_key(source, self.files[module], self._functions)}"
            marks = self._cache.get_marks(key) if self._cache is not None else None
            if marks is None:
                called = any(name.rpartition(".")[2].encode() in source for name in self._functions)
                marks = Marks(may_import_dynamically(source) or called, has_star(source) or not is_usual(source))
                if self._cache is not None:
                    self._cache.put_marks(key, marks)
            self._marks[module] = marks
        return self._marks[module]

    def may_name(self, module: str, target: str) -> bool:
        """Tell from its bytes whether a call in a module may import a target or something below it.

        Args:
            module: The module.
            target: What may be imported: its last part, or the front of it as a text that is put together, stands in
                the file, or the file computes names from its own.

        Raises:
            NotCoveredError: If the file can't be read.
        """
        source = self.source(module)
        last = target.rpartition(".")[2].encode()
        if last in source or b"__name__" in source or b"__package__" in source or not source.isascii():
            return True
        fronts = (last[:length] for length in range(1, len(last)))
        return any(
            before + front + quote in source for front in fronts for quote in (b"'", b'"') for before in (quote, b".")
        )

    def exported(self, module: str) -> Mapping[str, bool]:
        """Return the names that ``import *`` takes from a module, as far as the statements that make ``__all__`` show them.

        Returns:
            Name to whether it is sure to be there: it stands in a list of texts, and not in something computed.

        Raises:
            NotCoveredError: As ``imports``.
        """
        source = self.source(module)
        if b"__all__" not in source:
            return {}
        self.imports(module)  # a file that can't be parsed is told of there
        found: dict[str, bool] = {}
        for statement in ast.parse(source).body:
            parts = list(ast.walk(statement))
            if any(isinstance(node, ast.Name) and node.id == "__all__" for node in parts):
                value = getattr(statement, "value", None)
                written = value.elts if isinstance(value, (ast.List, ast.Tuple)) else []
                for node in parts:
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        found[node.value] = found.get(node.value, False) or node in written
        return found

    def save(self) -> None:
        """Write what was learnt to the cache, if there is one."""
        if self._cache is not None:
            self._cache.save()

    def _read(self, file: SourceFile) -> list[FoundImport]:
        source = self.source(file.module)
        key = _key(source, file, self._functions)
        known = self._cache.get(key) if self._cache is not None else None
        if known is not None:
            return known
        try:
            found = find_imports(
                source, module=file.module, is_package=file.is_package, import_functions=self._functions
            )
        except SyntaxError as error:
            version = ".".join(map(str, sys.version_info[:2]))
            raise NotCoveredError(
                f"{shown(file.path)}:{error.lineno or 1} can't be parsed by Python {version}: {error.msg}. Nothing can be "
                f"said about its imports; repair it, or run the contracts on the Python that it is written for"
            ) from error
        if self._cache is not None:
            self._cache.put(key, found)
        return found


def shown(path: Path, base: Path | None = None) -> str:
    """Return a path as it is shown to people: relative to a folder where it lies below it.

    Args:
        path: The path.
        base: The folder; None means the working directory.
    """
    try:
        return path.resolve().relative_to((base or Path.cwd()).resolve()).as_posix()
    except ValueError:
        return path.as_posix()


def _key(source: bytes, file: SourceFile, functions: tuple[str, ...]) -> str:
    digest = hashlib.blake2b(source, digest_size=16)
    digest.update(repr((file.module, file.is_package, functions)).encode())
    return digest.hexdigest()


def _reading_rules() -> str:
    """Return a digest of the code that reads files: what another release found is of no use to this one."""
    digest = hashlib.blake2b(digest_size=8)
    for module in (names, phases, type_checking):
        digest.update(Path(module.__file__ or "").read_bytes())
    return digest.hexdigest()


class _Cache:
    """Imports by content, in one JSON file for each version of Python. Losing it costs time and nothing else."""

    def __init__(self, folder: Path) -> None:
        self._kind = f"py{sys.version_info[0]}{sys.version_info[1]}"
        self._path = folder / f"imports-{self._kind}-{_reading_rules()}.json"
        self._rows: dict[str, list] = {}
        self._used: set[str] = set()
        self._changed = False
        try:
            rows = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return  # absent, unreadable or half written: it is filled again
        if isinstance(rows, dict):
            self._rows = rows

    def get(self, key: str) -> list[FoundImport] | None:
        try:
            found = [
                FoundImport(
                    module=str(module),
                    names=tuple(map(str, names)),
                    lineno=int(lineno),
                    phase=Phase(phase),
                    form=Form(form),
                    guarded=bool(guarded),
                )
                for module, names, lineno, phase, form, guarded in self._rows[key]
            ]
        except (KeyError, TypeError, ValueError):
            return None
        self._used.add(key)
        return found

    def get_marks(self, key: str) -> Marks | None:
        row = self._rows.get(key)
        if not isinstance(row, list) or len(row) != 2 or not all(isinstance(mark, bool) for mark in row):
            return None
        self._used.add(key)
        return Marks(*row)

    def put_marks(self, key: str, marks: Marks) -> None:
        self._rows[key] = list(marks)
        self._used.add(key)
        self._changed = True

    def put(self, key: str, found: list[FoundImport]) -> None:
        self._rows[key] = [
            [one.module, list(one.names), one.lineno, one.phase.value, one.form.value, one.guarded] for one in found
        ]
        self._used.add(key)
        self._changed = True

    def save(self) -> None:
        """Write the rows of this run; those that a run no longer asks for go when they outnumber the others."""
        if not self._changed:
            return
        if len(self._rows) > 2 * len(self._used) + 1000:
            self._rows = {key: row for key, row in self._rows.items() if key in self._used}
        import tempfile  # lazily: most runs have nothing to save

        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            (self._path.parent / ".gitignore").write_text("*\n", encoding="utf-8")
            # Written aside and renamed: a run beside this one reads the old file or the new one, never half of it.
            with tempfile.TemporaryDirectory(dir=self._path.parent, ignore_cleanup_errors=True) as folder:
                aside = Path(folder) / self._path.name
                aside.write_text(json.dumps(self._rows), encoding="utf-8")
                aside.replace(self._path)
            for other in self._path.parent.glob(f"imports-{self._kind}-*.json"):
                if other != self._path:
                    other.unlink(missing_ok=True)
        except OSError:
            return  # a read-only checkout is no reason to fail a check
        self._changed = False
