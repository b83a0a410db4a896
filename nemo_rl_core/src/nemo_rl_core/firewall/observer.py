# SPDX-License-Identifier: Apache-2.0
"""The half of the audit that imports, a script for the audited interpreter: ``python -I observer.py FOLDER``.

That may be any CPython from 3.9 on, and nemo-rl-core need not be installed there. So this file is the standard library
only, and it loads nothing beyond what an interpreter has loaded when it starts: each module loaded here would be
missing in the counts. That is why it speaks by files of literals and lines of text, and why signals are numbers.

It imports the preloads and the package, then forks one process for each of the package's modules. A fork shares the cost
of these imports and nothing else, so no module's result depends on another's. Results go into files of their own in FOLDER: a
module may print, close every descriptor or end its process, and the report is whole.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False  # importing `typing` for it would count
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

__all__ = ["BEFORE", "EVENTS", "OUTPUT_BYTES", "PLAN", "main", "output_of", "preload_of", "result_of"]

#: Files in FOLDER: what to import, what has happened so far, one event a line, and what the interpreter's start loaded.
PLAN, EVENTS, BEFORE = "plan", "events", "before"
#: A module that prints without end fills no disk: beyond this size its output begins anew.
OUTPUT_BYTES = 1_000_000

_KILL, _TERMINATE, _DUMP = 9, 15, 10  # SIGKILL, SIGTERM and SIGUSR1 on Linux
_POLL_S = 0.002
#: Seconds between asking a process for its stack and ending it.
_DUMP_S = 0.3
#: Seconds for a thread that an import has started to import something itself.
_THREADS_S = 0.5
_STACK_LIMIT = 60
_TRACEBACK_LIMIT = 15
_IMPORTLIB = ("importlib", "_frozen_importlib", "_frozen_importlib_external")


def output_of(index: int) -> str:
    """Return the name of the file with what a module printed; 0 is the package itself."""
    return f"output-{index}"


def result_of(index: int) -> str:
    """Return the name of the file with a module's result; 0 is the package itself."""
    return f"result-{index}"


def preload_of(number: int) -> str:
    """Return the name of the file with what a preload did, counted from 0, and of the event that says it begins."""
    return f"preload-{number}"


def _name_of(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    return name if isinstance(name, str) else "?"


def _is_importlib(frame: FrameType) -> bool:
    name = _name_of(frame)
    return name.startswith("importlib.") or name in _IMPORTLIB


def _is_probe(frame: FrameType | None) -> bool:
    """Tell whether the import system is only asked if a module exists.

    The same rule as ``nemo_rl_core.guard.frames.is_probe``, which can't be imported here; a test compares the two.
    """
    if frame is None or _name_of(frame) not in ("importlib._bootstrap", "_frozen_importlib"):
        return True
    return _is_part_of_a_probe(frame)


def _is_part_of_a_probe(frame: FrameType | None) -> bool:
    while frame is not None and _is_importlib(frame):
        is_find = frame.f_code.co_name in ("find_spec", "_find_spec_from_path", "find_loader")
        if is_find and _name_of(frame) in ("importlib", "importlib.util"):
            return frame.f_back is None or _name_of(frame.f_back) != "runpy"
        frame = frame.f_back
    return False


def _place(frame: FrameType, line: int) -> tuple[str, str, str, int]:
    """Describe a frame: module, function, file, line."""
    return (_name_of(frame), frame.f_code.co_name, frame.f_code.co_filename, line)


class _Kept:
    """What a module of the standard library held at the start; a package may replace it (gevent does)."""

    def __init__(self, module: Any) -> None:
        self.__dict__.update(vars(module))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return what the module had by this name."""


class _Observer:
    """A finder that finds nothing and remembers who asked for a forbidden name."""

    def __init__(self, forbidden: list[str]) -> None:
        self._forbidden = forbidden
        self._parents = {name[:i] for name in forbidden for i, letter in enumerate(name) if letter == "."}
        self._asked: list[dict[str, Any]] = []
        self._heard: list[dict[str, Any]] = []

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Remember the question; the other finders answer it."""
        del path, target
        if fullname in self._parents or self.rule_for(fullname):
            self._remember(fullname, sys._getframe(1))

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Remember an import statement that the interpreter reports (an audit hook, which nobody can take away).

        It hears what no finder is asked: with ``None`` for the name in ``sys.modules``, or without any finders.
        """
        if event == "import" and isinstance(arguments[0], str) and self.rule_for(arguments[0]):
            frame = sys._getframe(1)
            self._add(self._heard, arguments[0], is_probe=_is_part_of_a_probe(frame), frame=frame)

    def begin(self) -> None:
        """Forget all questions, and stand before all other finders: one that answers first would leave no question."""
        self._asked, self._heard = [], []
        sys.meta_path[:] = [self, *(finder for finder in sys.meta_path if finder is not self)]

    def asks(self) -> list[dict[str, Any]]:
        """Return the first import and the first probe of each name; what was only heard comes where no finder was asked."""
        known = {ask["rule"] for ask in self._asked if not ask["is_probe"]}
        return self._asked + [ask for ask in self._heard if ask["rule"] not in known]

    def rule_for(self, name: str) -> str:
        """Return the forbidden name that covers a module; "" where none does."""
        for forbidden in self._forbidden:
            if name == forbidden or name.startswith(forbidden + "."):
                return forbidden
        return ""

    def loaded(self) -> dict[str, int]:
        """Return the number of loaded modules under each forbidden name; those without any are left out."""
        numbers: dict[str, int] = {}
        for name, module in list(sys.modules.items()):
            if module is not None and isinstance(name, str) and (rule := self.rule_for(name)):
                numbers[rule] = numbers.get(rule, 0) + 1
        return numbers

    def _remember(self, fullname: str, frame: FrameType) -> None:
        is_probe = _is_probe(frame)
        wanted, step = [fullname], frame
        while step is not None and _is_importlib(step):
            # `import a.b` asks for `a` first: where that is not installed nobody ever asks for `a.b` itself.
            if step.f_code.co_name == "_find_and_load":
                wanted.append(str(step.f_locals.get("name", "")))
            step = step.f_back
        for name in wanted:
            self._add(self._asked, name, is_probe=is_probe, frame=frame)

    def _add(self, asks: list[dict[str, Any]], name: str, *, is_probe: bool, frame: FrameType) -> None:
        rule = self.rule_for(name)
        if rule and not any(ask["rule"] == rule and ask["is_probe"] == is_probe for ask in asks):
            asks.append({"rule": rule, "module": name, "is_probe": is_probe, "stack": _stack(frame)})


def _stack(frame: FrameType | None) -> list[tuple[str, str, str, int]]:
    """Return the places on the stack, outermost first, without the import system and without this script."""
    places = []
    while frame is not None and len(places) < _STACK_LIMIT:
        if not _is_importlib(frame) and frame.f_code.co_filename != __file__:
            places.append(_place(frame, frame.f_lineno))
        frame = frame.f_back
    return places[::-1]


def _failure(error: BaseException) -> dict[str, Any]:
    """Describe an exception as plain data, whatever its class does when it is asked."""
    places, step = [], error.__traceback__
    while step is not None:
        if not _is_importlib(step.tb_frame) and step.tb_frame.f_code.co_filename != __file__:
            places.append(_place(step.tb_frame, step.tb_lineno))
        step = step.tb_next
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 - a foreign class may raise anything; the first error is the one to tell
        text = f"<its text cannot be made: {type(broken).__name__}>"
    return {"type": type(error).__name__, "text": text[:2000], "traceback": places[-_TRACEBACK_LIMIT:]}


class _Run:
    """Imports the package in this process, then each module in a fork of it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        values: dict[str, list[str]] = {}
        with open(os.path.join(folder, PLAN), encoding="utf-8") as plan:  # noqa: PTH118, PTH123 - pathlib would count
            for line in plan:
                key, _, value = line.rstrip("\n").partition(" ")
                values.setdefault(key, []).append(value)
        self._timeout_s, self._jobs = float(values["timeout_s"][0]), int(values["jobs"][0])
        self._package, self._modules = values["package"][0], values.get("module", [])
        self._preload = values.get("preload", [])
        self._observer = _Observer(values["forbid"])
        self._stopped = False
        self._os, self._time = _Kept(os), _Kept(time)
        self._here = os.getcwd()  # noqa: PTH109 - pathlib would count

    def __call__(self) -> None:
        """Import everything, or what is possible before somebody stops this process."""
        import _signal  # pyrefly: ignore[missing-import]  # `signal` would load `enum`, `functools`, `collections` and more

        self._redirect(0)
        self._event("begun")
        self._write_file(BEFORE, ascii(self._observer.loaded()), self._os.O_CREAT | self._os.O_WRONLY)
        sys.addaudithook(self._observer.hear)
        for number, name in enumerate(self._preload):
            self._event(preload_of(number))
            preload = self._import(name)
            self._write_file(preload_of(number), ascii(preload), self._os.O_CREAT | self._os.O_WRONLY)
            if preload["error"] is not None:
                return
        self._event("package")
        result = self._import(self._package)
        # Without this process its forks would be left behind; whoever started it asks it to end.
        default = _signal.signal(_TERMINATE, self._stop)

        def fresh_start() -> None:
            _signal.signal(_TERMINATE, default)

        self._event("imported")
        jobs = [(0, lambda: result)]
        if result["error"] is None:
            jobs += [(index, self._job(name)) for index, name in enumerate(self._modules, 1)]
        self._serve(jobs, fresh_start)

    def _job(self, name: str) -> Any:
        return lambda: self._import(name)

    def _import(self, name: str) -> dict[str, Any]:
        """Import a module and say what that did."""
        observer = self._observer
        before = set(sys.modules)
        forbidden_before = observer.loaded()
        observer.begin()
        error = None
        me = self._os.getpid()
        started = self._time.perf_counter()
        try:
            __import__(name)
        except BaseException as failed:  # noqa: BLE001 - the boundary: SystemExit and the rest are results too
            error = failed
        seconds = self._time.perf_counter() - started
        if self._os.getpid() != me:
            self._os._exit(0)  # a module that forks comes back twice
        self._wait_for_threads()
        loaded = observer.loaded()
        return {
            "seconds": seconds,
            "num_modules": len(set(sys.modules) - before),
            "loaded": {
                rule: number - forbidden_before.get(rule, 0)
                for rule, number in loaded.items()
                if number > forbidden_before.get(rule, 0)
            },
            "asks": observer.asks(),
            "error": None if error is None else _failure(error),
        }

    def _wait_for_threads(self) -> None:
        """Let threads that an import has started go on for a moment: what they import is that import's doing."""
        deadline = self._time.monotonic() + _THREADS_S
        while len(sys._current_frames()) > 1 and self._time.monotonic() < deadline:
            self._time.sleep(_POLL_S)

    def _serve(self, jobs: list[Any], fresh_start: Any) -> None:
        """Run each job in a fork of its own, each with a deadline."""
        waiting, running = jobs[::-1], {}
        while (waiting or running) and not self._stopped:
            while waiting and len(running) < self._jobs:
                index, job = waiting.pop()
                pid = self._os.fork()
                if pid == 0:
                    self._in_fork(index, job, fresh_start)
                running[pid] = (index, self._time.monotonic() + self._timeout_s, False)
            for pid, (index, deadline, is_late) in list(running.items()):
                code = self._ended(pid)
                if code is not None:
                    del running[pid]
                    self._event(f"ended {index} {'late' if is_late else 'done'} {code}")
                elif self._time.monotonic() > deadline:
                    self._signal(pid, _KILL if is_late else _DUMP)
                    running[pid] = (index, self._time.monotonic() + _DUMP_S, True)
                self._shorten(index)
            self._time.sleep(_POLL_S)
        for pid in running:
            self._signal(pid, _KILL)

    def _in_fork(self, index: int, job: Any, fresh_start: Any) -> None:
        """Do one job and end the process, whatever the job does."""
        try:
            # Noted before it leaves the observer's group, so that at no moment nobody knows of it.
            self._event(f"started {index} {self._os.getpid()}")
            self._os.setsid()  # with what it starts it is a group, which is ended as one
            fresh_start()
            if index:
                self._redirect(index)
                self._move(index)
            text = ascii(job())
            self._write_file(result_of(index), text, self._os.O_CREAT | self._os.O_WRONLY | self._os.O_TRUNC)
        finally:
            self._os._exit(0)

    def _ended(self, pid: int) -> int | str | None:
        """Return the exit code (negative: the signal) of a fork; None while it runs, ``?`` where it can't be known."""
        try:
            # Not collected yet: as long as it is there, its number is nobody else's.
            if self._os.waitid(self._os.P_PID, pid, self._os.WEXITED | self._os.WNOHANG | self._os.WNOWAIT) is None:
                return None
            self._signal(pid, _KILL)  # what it left behind
            return self._os.waitstatus_to_exitcode(self._os.waitpid(pid, 0)[1])
        except ChildProcessError:
            return "?"  # the package handles SIGCHLD and was quicker

    def _signal(self, pid: int, number: int) -> None:
        """Signal a fork; a kill ends the whole group, which is not there yet when the fork has just begun."""
        for send in (self._os.killpg, self._os.kill) if number == _KILL else (self._os.kill,):
            try:
                send(pid, number)
            except (ProcessLookupError, PermissionError):
                continue  # no such group, or all of it has ended

    def _stop(self, _number: int, _frame: object) -> None:
        self._stopped = True

    def _event(self, text: str) -> None:
        self._write_file(EVENTS, text + "\n", self._os.O_CREAT | self._os.O_WRONLY | self._os.O_APPEND)

    def _write_file(self, name: str, text: str, flags: int) -> None:
        """Write by a descriptor of the moment: one that is kept might be closed or redirected by a module."""
        descriptor = self._os.open(f"{self._folder}/{name}", flags, 0o600)
        data = text.encode("ascii", "backslashreplace")
        while data:
            data = data[self._os.write(descriptor, data) :]
        self._os.close(descriptor)

    def _redirect(self, index: int) -> None:
        """Let this process read nothing, print into its own file, and say where it is when it is asked or crashes."""
        import faulthandler  # built in, and loaded before anything is counted

        nowhere = self._os.open(self._os.devnull, self._os.O_RDONLY)
        output = self._os.open(
            f"{self._folder}/{output_of(index)}", self._os.O_CREAT | self._os.O_WRONLY | self._os.O_APPEND, 0o600
        )
        self._os.dup2(nowhere, 0)
        for standard in (1, 2):
            self._os.dup2(output, standard)
        for descriptor in (nowhere, output):
            if descriptor > 2:  # the package may have closed the standard ones, whose numbers are then given anew
                self._os.close(descriptor)
        faulthandler.enable(2)
        faulthandler.register(_DUMP, 2, all_threads=False)

    def _move(self, index: int) -> None:
        """Give a fork a current folder of its own, which it may fill or remove, unless the package has chosen one."""
        try:
            if self._os.getcwd() != self._here:
                return
        except FileNotFoundError:
            pass  # the package has removed it
        folder = f"{self._folder}/cwd-{index}"
        self._os.mkdir(folder)
        self._os.chdir(folder)

    def _shorten(self, index: int) -> None:
        path = f"{self._folder}/{output_of(index)}"
        try:
            if self._os.stat(path).st_size > OUTPUT_BYTES:
                self._os.truncate(path, 0)
        except FileNotFoundError:
            return  # it has not begun to run


def main(arguments: list[str]) -> None:
    """Run as a script.

    Args:
        arguments: The folder.
    """
    sys.argv[1:] = []  # some modules read it when they are imported
    _Run(arguments[0])()
    os._exit(0)  # not by the usual way out: threads and exit handlers of the package might not end


if __name__ == "__main__":
    main(sys.argv[1:])
