# SPDX-License-Identifier: Apache-2.0
"""Compare what nemo-rl-contracts says of a package with what a clean interpreter does.

    uv run python benchmarks/agreement.py                      # ours and eleven public packages, some minutes
    uv run python benchmarks/agreement.py rich nemo_rl_core    # some of them
    uv run python benchmarks/agreement.py --markdown           # the tables of docs/firewall-agreement.md

For each package a fresh interpreter imports every module and notes each first-party import as it runs: who asks, for
what, on which line, and whether the asking code is a module's or class's body (eager by definition) or a function's.

- recall: of the edges that ran in a body, the share that is eager or conditional by the static answer. Statements count,
  and calls with a literal; a call with a computed name, or by compiled code in the name of its caller, is listed by
  itself, and `recall_with_calls` counts it as missed;
- recall by eager alone: conditional ones left out, so that "perhaps" is no answer to everything;
- precision: of the edges that are eager by the static answer, in modules that could be imported, the share that ran.

The package itself is imported first, and the modules that are loaded then are compared with the static closures from it.
Each difference is listed with its cause.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_contracts.chains import ImportMap, ancestors
from nemo_rl_contracts.phases import Phase
from nemo_rl_contracts.running import build_graph
from nemo_rl_contracts.sources import Reader, find_sources

OURS = ("nemo_rl_core", "nemo_rl_vllm", "nemo_rl_contracts")
#: Written by others; the last four are heavy.
PUBLIC = (
    "click",
    "hypothesis",
    "huggingface_hub",
    "jinja2",
    "packaging",
    "pydantic",
    "rich",
    "numpy",
    "ray",
    "torch",
    "transformers",
)
#: What a module does to the process that imports it may be anything, so each package gets a process and a deadline.
DEADLINE_S = 1500.0

#: Kinds of calls in a body that no import statement shows.
_CALLS = {
    "import_module in body": "import_module with a computed name",
    "call in body": "compiled code, or __import__ with a computed name",
}

#: Runs in the clean interpreter; standard library only. Its last line of output is the answer.
WATCHER = r"""
import builtins, importlib, json, opcode, os, sys
modules, first, known = json.loads(sys.stdin.read())
known = frozenset(known)
seen, outside, loaded = {}, {}, None
plain_import, plain_import_module = builtins.__import__, importlib.import_module

def asker(frame):
    while frame.f_code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"):
        frame = frame.f_back
    return frame

def note(frame, names, statement):
    frame = asker(frame)
    importer = frame.f_globals.get("__name__", "")
    if importer not in known:
        if loaded is None and not importer.startswith("importlib"):
            for name in names:
                outside.setdefault(name, importer)
        return
    code = frame.f_code
    in_body = not code.co_flags & 1 and "<locals>" not in code.co_qualname
    where = "body" if in_body else code.co_qualname
    if not statement:
        where = f"import_module in {where}"
    elif code.co_code[frame.f_lasti] != opcode.opmap["IMPORT_NAME"]:
        where = f"call in {where}"  # `__import__` called, or compiled code that asks in the name of its caller
    source = frame.f_globals.get("__file__") or ""
    if code.co_filename != source and not source.endswith(".pyc"):
        where = "exec"
    for name in names:
        if name in known and name != importer:
            seen.setdefault((importer, name), {}).setdefault(where, frame.f_lineno)

def resolved(name, package, level):
    if level:
        parts = package.split(".")
        base = ".".join(parts[: len(parts) - level + 1])
        return f"{base}.{name}" if name else base
    return name

def known_part(name):
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name

def watching(name, globals=None, locals=None, fromlist=(), level=0):
    try:
        package = (globals or {}).get("__package__") or ""
        if not package and globals and level:
            package = globals["__name__"] if "__path__" in globals else globals["__name__"].rpartition(".")[0]
        base = resolved(name, package, level)
        names = [known_part(f"{base}.{part}") for part in fromlist or ()] or [known_part(base)]
        note(sys._getframe(1), names, True)
    except Exception as error:
        print("watcher:", type(error).__name__, error, file=sys.stderr)
    module = plain_import(name, globals, locals, fromlist, level)
    if fromlist and "*" in fromlist:
        # `import *` imports the modules that `__all__` names, without asking builtins for each.
        listed = getattr(module, "__all__", ())
        note(sys._getframe(1), [f"{base}.{part}" for part in listed if isinstance(part, str)], True)
    return module

def watching_module(name, package=None):
    if isinstance(name, str):
        level = len(name) - len(name.lstrip("."))
        note(sys._getframe(1), [known_part(resolved(name.lstrip("."), package or "", level))], False)
    return plain_import_module(name, package)

builtins.__import__, importlib.import_module = watching, watching_module
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.stdin.close()
failed = {}
for name in [first, *modules]:
    try:
        plain_import(name)
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if loaded is None:
        loaded = sorted(known & {key for key, value in list(sys.modules.items()) if value is not None})
edges = [[*edge, places] for edge, places in sorted(seen.items())]
answer.write(json.dumps({"edges": edges, "failed": failed, "loaded": loaded, "outside": outside}))
answer.close()
os._exit(0)
"""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a clean interpreter did.

    Attributes:
        edges: (importer, imported) to (kind of place, line): ``body``, ``exec``, or a function's name.
        failed: Module that could not be imported, to why.
        loaded: First-party modules that are there after the package alone was imported.
        outside: First-party module to a module of another package that imported it meanwhile.
    """

    edges: Mapping[tuple[str, str], Mapping[str, int]]
    failed: Mapping[str, str]
    loaded: frozenset[str]
    outside: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How the two answers compare for one package; each difference is (what, cause)."""

    package: str
    modules: int
    failed: Mapping[str, str]
    edges_seen: int
    edges_eager: int
    edges_conditional: int
    to_uncovered: int
    missed: list[tuple[str, str]]
    idle: list[tuple[str, str]]
    by_functions: int
    calls: list[tuple[str, str]]
    loaded: int
    closure_missed: list[tuple[str, str]]
    closure_idle: list[tuple[str, str]]

    @property
    def recall(self) -> float | None:
        """Share of the edges that ran in a body which are eager or conditional by the static answer, on that line."""
        return _share(self.edges_seen - len(self.missed), self.edges_seen)

    @property
    def recall_eager(self) -> float | None:
        """The same without conditional ones: an answer of "perhaps" to everything would get nothing here."""
        return _share(self.edges_seen - len(self.missed) - self.edges_conditional, self.edges_seen)

    @property
    def recall_with_calls(self) -> float | None:
        """The recall with calls that no literal names counted as missed."""
        total = self.edges_seen + len(self.calls)
        return _share(self.edges_seen - len(self.missed), total)

    @property
    def precision(self) -> float | None:
        """Share of the statically eager edges that ran."""
        return _share(self.edges_eager - len(self.idle), self.edges_eager)


def _share(part: int, whole: int) -> float | None:
    """Return a share, None of nothing: where nothing ran nothing is shown."""
    return round(part / whole, 4) if whole else None


def watch(package: str, modules: Sequence[str], *, known: Sequence[str]) -> Seen:
    """Import every module in a clean interpreter and return what ran between the known ones."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "NEMO_RL_"))}
    # Libraries that would ask the network, or draw in a window, do neither.
    environment |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    names = [name for name in modules if not name.endswith("__main__")]
    done = subprocess.run(
        [sys.executable, "-c", WATCHER],
        input=json.dumps([names, package, list(known)]),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment,
        cwd="/",
        check=False,
    )
    if done.returncode != 0 or not done.stdout:
        raise RuntimeError(f"the watcher of {package} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout)
    return Seen(
        edges={(importer, imported): places for importer, imported, places in answer["edges"]},
        failed=answer["failed"],
        loaded=frozenset(answer["loaded"]),
        outside=answer["outside"],
    )


def read(package: str) -> ImportMap:
    """Return the static answer."""
    graph = build_graph([package], cache_dir=None)
    return ImportMap(graph, Reader(find_sources(package)[0]), unread=[])


def compare(package: str) -> Agreement:
    """Compare the two answers for one package."""
    imports = read(package)
    # Files that the graph does not have are watched too. `coverage` tells of each; an import of one is no edge of the
    # graph, and is counted by itself.
    hidden = {stray.module for stray in find_sources(package)[1] if stray.module}
    seen, to_uncovered = _settle_hidden(
        watch(package, sorted(imports.modules), known=sorted(imports.modules | hidden)), hidden, imports.modules
    )
    static: dict[tuple[str, str], Phase] = {}
    lines: dict[tuple[str, str], set[int]] = {}
    guarded: set[tuple[str, str]] = set()
    for module in imports.modules:
        for edge in imports.edges(module):
            if edge.imported in imports.modules and not edge.initialiser:
                key = (module, edge.imported)
                before = static.get(key, Phase.TYPING)
                static[key] = edge.phase if edge.phase.rank <= before.rank else before
                lines.setdefault(key, set()).add(edge.lineno)
                if edge.guarded:
                    guarded.add(key)
    # A call counts where the static answer has it: its name is a literal then. Others have a computed name, or come from
    # compiled code; they are listed by themselves.
    ran = {
        edge
        for edge, places in seen.edges.items()
        if places.keys() & {"body", "exec"} or (edge in static and places.keys() & _CALLS.keys())
    }
    calls = {edge: how for edge in seen.edges.keys() - ran for how in seen.edges[edge].keys() & _CALLS.keys()}
    importable = imports.modules - seen.failed.keys()
    eager = {edge for edge, phase in static.items() if phase is Phase.EAGER and edge[0] in importable}
    eager = {edge for edge in eager if not edge[0].endswith("__main__")}
    at_import = {edge for edge, phase in static.items() if phase in (Phase.EAGER, Phase.CONDITIONAL)}
    # The right edge on the wrong line would be luck.
    misplaced = {edge for edge in ran & at_import if seen.edges[edge].get("body") not in {None, *lines[edge]}}
    return Agreement(
        package=package,
        modules=len(imports.modules),
        failed=seen.failed,
        edges_seen=len(ran),
        edges_eager=len(eager),
        to_uncovered=to_uncovered,
        edges_conditional=len([edge for edge in ran if static.get(edge) is Phase.CONDITIONAL]),
        missed=sorted((_words(edge), _why_missed(edge, seen, static)) for edge in (ran - at_import) | misplaced),
        idle=sorted((_words(edge), _why_idle(edge, seen, guarded)) for edge in eager - ran),
        by_functions=len(seen.edges.keys() - ran - calls.keys()),
        calls=sorted((_words(edge), f"line {seen.edges[edge][how]}: {_CALLS[how]}") for edge, how in calls.items()),
        loaded=len(seen.loaded),
        **_compare_closures(package, imports, seen),
    )


def _settle_hidden(seen: Seen, hidden: set[str], modules: Set[str]) -> tuple[Seen, int]:
    """Return what was seen between files of the graph, and the number of edges from there to files that it lacks."""
    edges = {}
    count = 0
    for (importer, imported), places in seen.edges.items():
        if importer in hidden:
            continue
        if imported in hidden:
            count += 1
            # The package above runs on the way, which is what the static answer says of such an import.
            imported = next((name for name in reversed(ancestors(imported)) if name in modules), "")
        if imported and imported != importer:
            edges[importer, imported] = {**places, **edges.get((importer, imported), {})}
    return Seen(edges=edges, failed=seen.failed, loaded=seen.loaded - hidden, outside=seen.outside), count


def _compare_closures(package: str, imports: ImportMap, seen: Seen) -> dict:
    """Compare what is loaded after the package alone was imported with the closures over eager and conditional edges."""
    surely = _closure(package, imports, (Phase.EAGER,))
    perhaps = _closure(package, imports, (Phase.EAGER, Phase.CONDITIONAL))
    missed = []
    unpredicted = seen.loaded - perhaps
    for module in sorted(unpredicted):
        importers = {importer: places for (importer, name), places in seen.edges.items() if name == module}
        # What such a module loads in its turn follows from it; only where it begins is a difference.
        if any(importer in unpredicted for importer in importers) and not set(importers) & perhaps:
            continue
        called = [
            f"the function {place} of {importer}"
            for importer, places in importers.items()
            for place in places
            if importer in perhaps and place not in ("body", "exec")
        ]
        if called:
            missed.append((module, f"called during the import: {called[0]}"))
        elif module in seen.outside:
            missed.append((module, f"imported by {seen.outside[module]}, of another package"))
        elif not any(name.startswith(module + ".") for name in unpredicted):
            missed.append((module, "asked for by compiled code: no Python frame did"))
    idle = [(module, "guarded, or a part of a module that failed") for module in sorted(surely - seen.loaded)]
    return {"closure_missed": missed, "closure_idle": idle}


def _closure(package: str, imports: ImportMap, phases: Sequence[Phase]) -> set[str]:
    """Return what importing a package loads by the engine's own edges, those to parent packages among them."""
    found: set[str] = set()
    todo = [package]
    while todo:
        module = todo.pop()
        if module not in found:
            found.add(module)
            edges = [edge for edge in imports.edges(module) if edge.phase in phases]
            todo += [edge.imported for edge in edges if edge.imported in imports.modules]
    return found


def _words(edge: tuple[str, str]) -> str:
    return f"{edge[0]} -> {edge[1]}"


def _why_missed(edge: tuple[str, str], seen: Seen, static: Mapping[tuple[str, str], Phase]) -> str:
    places = seen.edges[edge]
    if "exec" in places and "body" not in places:
        return "in code that the module makes and executes"
    return f"line {places.get('body', 0)}; static: {static.get(edge, 'not found')}"


def _why_idle(edge: tuple[str, str], seen: Seen, guarded: set[tuple[str, str]]) -> str:
    if edge in guarded:
        return "guarded: an import before it in the same try failed"
    others = seen.edges.get(edge)
    return f"ran only in {', '.join(others)}" if others else "its statement was not reached"


def rows(packages: Sequence[str]) -> Iterator[Agreement]:
    for package in packages:
        yield compare(package)


def as_row(found: Agreement) -> dict:
    """Return one JSON line."""
    return {
        "figure": "agreement",
        "package": found.package,
        "modules": found.modules,
        "not_importable": len(found.failed),
        "edges_seen": found.edges_seen,
        "edges_eager": found.edges_eager,
        "edges_conditional": found.edges_conditional,
        "edges_to_uncovered_files": found.to_uncovered,
        "recall": found.recall,
        "recall_eager": found.recall_eager,
        "precision": found.precision,
        "edges_of_functions_called_meanwhile": found.by_functions,
        "recall_with_calls": found.recall_with_calls,
        "calls": found.calls,
        "loaded_by_the_package_alone": found.loaded,
        "not_importable_because": Counter(why.partition(":")[0] for why in found.failed.values()),
        "missed": found.missed,
        "idle": found.idle,
        "closure_missed": found.closure_missed,
        "closure_idle": found.closure_idle,
    }


def as_markdown(all_found: Sequence[Agreement]) -> str:
    """Return the tables of docs/firewall-agreement.md."""
    lines = [
        "| package | modules | not importable here | edges that ran | to uncovered files | recall | by eager alone | with computed calls | precision |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {found.package} {_version(found.package)} | {found.modules} | {len(found.failed)} | {found.edges_seen} | {found.to_uncovered} | "
        + " | ".join(
            "-" if share is None else f"{share:.4f}"
            for share in (found.recall, found.recall_eager, found.recall_with_calls, found.precision)
        )
        + " |"
        for found in all_found
    ]
    lines += ["", "| package | difference | cause |", "|---|---|---|"]
    for found in all_found:
        for what, differences in (
            ("ran, and is not eager", found.missed),
            ("ran by a call", found.calls),
            ("is eager, and did not run", found.idle),
            ("loaded by the package alone, and not predicted", found.closure_missed),
            ("predicted, and not loaded by the package alone", found.closure_idle),
        ):
            lines += [f"| {found.package} | {what}: `{edge}` | {cause} |" for edge, cause in differences]
    return "\n".join(lines)


def _version(package: str) -> str:
    owners = importlib.metadata.packages_distributions().get(package, [package])  # editable ones are not listed there
    return importlib.metadata.version(owners[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", help="default: ours, and the public ones")
    parser.add_argument("--markdown", action="store_true", help="print tables instead of JSON lines")
    options = parser.parse_args()
    found = rows(options.packages or [*OURS, *PUBLIC])
    if options.markdown:
        print(as_markdown(list(found)))
    else:
        for one in found:
            print(json.dumps(as_row(one)), flush=True)


if __name__ == "__main__":
    sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent.resolve()]
    main()
