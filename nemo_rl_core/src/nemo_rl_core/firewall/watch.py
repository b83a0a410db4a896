# SPDX-License-Identifier: Apache-2.0
"""Follow the observer with deadlines, and read what it has written down."""

import ast
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.firewall import observer
from nemo_rl_core.firewall.observer import BEFORE, EVENTS, OUTPUT_BYTES, output_of, preload_of, result_of
from nemo_rl_core.firewall.places import asks_from, split_dump, traceback_lines
from nemo_rl_core.firewall.processes import Workplace, end_group
from nemo_rl_core.firewall.report import Failure, ModuleResult, ModuleState

__all__ = ["Course", "Watch"]

#: Seconds for an interpreter to start.
_START_S = 60.0
#: Seconds beyond a deadline after which the observer itself is held to hang.
_GRACE_S = 10.0
_POLL_S = 0.02
_OUTPUT_TAIL = 2000


@dataclass(frozen=True, kw_only=True)
class Course:
    """What is watched.

    Attributes:
        package: Name of the package.
        preload: Names of what is imported before it, in their order.
        total: Number of modules, the package among them.
        timeout_s: Deadline of each import in seconds.
        progress: Called with the number of modules done and of all of them.
    """

    package: str
    preload: tuple[str, ...]
    total: int
    timeout_s: float
    progress: Callable[[int, int], None] | None


class Watch:
    """Follows the observer and keeps what it has said."""

    def __init__(self, course: Course, place: Workplace, stdlib: str) -> None:
        """Prepare; nothing is started.

        Args:
            course: What is watched.
            place: Where the observer works.
            stdlib: Folder of the audited interpreter's standard library.
        """
        self._course = course
        self._place = place
        self._stdlib = stdlib
        self._read = 0
        self._step = ""
        self._pids: dict[int, int] = {}
        self._ends: dict[int, tuple[bool, str]] = {}
        self._answers: dict[int, dict[str, Any] | None] = {}
        self._what_happened = ""

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Follow the observer to its end, or end it when it hangs; nothing that it started is left behind."""
        try:
            self._wait(process)
        finally:
            self._clean_up(process)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            has_ended = process.poll() is not None  # before reading: the last events are there then
            if self._read_events():
                # What is imported in the observer has nobody else to end it; the forks are the observer's to end.
                grace = _GRACE_S if self._step == "imported" else 0.0
                deadline = time.monotonic() + self._course.timeout_s + grace
            if has_ended:
                self._what_happened = f"the interpreter {_how_it_ended(str(process.returncode))}"
                return
            if time.monotonic() > deadline:
                process.send_signal(signal.SIGUSR1)  # it writes down where it is
                time.sleep(0.3)
                self._what_happened = f"the interpreter did not get on within {self._course.timeout_s:g} s"
                return
            self._shorten()
            time.sleep(_POLL_S)

    def _shorten(self) -> None:
        """Keep what the package prints from filling the disk while the observer, which is busy with it, can't."""
        path = self._place.folder / output_of(0)
        if path.exists() and path.stat().st_size > OUTPUT_BYTES:
            os.truncate(path, 0)

    def _read_events(self) -> bool:
        """Take in what is new; True if there was something."""
        try:
            text = (self._place.folder / EVENTS).read_bytes()
        except FileNotFoundError:
            return False
        new = text[self._read : text.rfind(b"\n") + 1]
        self._read += len(new)
        for line in new.decode("ascii").splitlines():
            kind, *values = line.split()
            if kind == "started":
                self._pids[int(values[0])] = int(values[1])
            elif kind == "ended":
                self._ends[int(values[0])] = (values[1] == "late", values[2])
                self._answers[int(values[0])] = self._literal(result_of(int(values[0])))
            else:
                self._step = kind
        if new and self._course.progress is not None:
            self._course.progress(len(self._ends), self._course.total)
        return bool(new)

    def _clean_up(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()  # it ends its forks
        try:
            process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            process.kill()  # the package has its own mind about the signal
        end_group(process.pid)
        process.wait()
        self._read_events()
        for index, pid in self._pids.items():
            if index not in self._ends:
                end_group(pid)

    def preloaded(self) -> dict[str, int]:
        """Return the forbidden modules that were there before the first import."""
        return self._literal(BEFORE) or {}

    def preloads(self) -> tuple[ModuleResult, ...]:
        """Return what became of each preload, in their order; where one has failed it is the last."""
        results = []
        for number, name in enumerate(self._course.preload):
            answer = self._literal(preload_of(number))
            if answer is not None:
                results.append(self._told(name, answer, 0))
            elif self._step == preload_of(number):
                text = f"{self._what_happened} while it preloaded {name}"
                results.append(self._untold(name, self._state_of_end(), text, 0))
        return tuple(results)

    def result(self, index: int, name: str) -> ModuleResult:
        """Return what became of a module.

        Args:
            index: Its place in the plan; 0 is the package itself.
            name: Its name.
        """
        answer = self._answer(index)
        is_late = self._ends.get(index, (False, ""))[0]
        if answer is None or is_late:
            return self._untold(name, *self._without_answer(index, is_late), index)
        return self._told(name, answer, index)

    def _told(self, name: str, answer: dict[str, Any], index: int) -> ModuleResult:
        failure = None
        if answer["error"] is not None:
            error = answer["error"]
            failure = Failure(
                type=error["type"],
                text=error["text"],
                traceback=traceback_lines(error["traceback"]),
                output=self._output(index)[-_OUTPUT_TAIL:].strip(),
            )
        return ModuleResult(
            name=name,
            state=ModuleState.IMPORTED if failure is None else ModuleState.FAILED,
            seconds=answer["seconds"],
            num_modules=answer["num_modules"],
            loaded=answer["loaded"],
            asks=asks_from(answer["asks"], answer["loaded"], self._stdlib),
            failure=failure,
        )

    def _untold(self, name: str, state: ModuleState, text: str, index: int) -> ModuleResult:
        output, calls = split_dump(self._output(index), own_file=observer.__file__)
        failure = Failure(type="", text=text, traceback=calls, output=output[-_OUTPUT_TAIL:])
        return ModuleResult(name=name, state=state, failure=failure)

    def _state_of_end(self) -> ModuleState:
        return ModuleState.TIMED_OUT if "did not get on" in self._what_happened else ModuleState.FAILED

    def _without_answer(self, index: int, is_late: bool) -> tuple[ModuleState, str]:
        limit = f"{self._course.timeout_s:g} s"
        is_imported = self._step == "imported"
        if is_late:
            return ModuleState.TIMED_OUT, f"the import did not end within {limit} and was ended"
        if index in self._ends:
            return ModuleState.FAILED, f"its process {_how_it_ended(self._ends[index][1])} before the import was done"
        if not is_imported and index == 0:
            return self._state_of_end(), f"{self._what_happened} while it imported the package"
        package = self._answer(0)
        if not is_imported or (package is not None and package["error"] is not None):
            return ModuleState.NOT_TRIED, f"{self._course.package} itself cannot be imported"
        return ModuleState.NOT_TRIED, f"{self._what_happened} before its turn"

    def _answer(self, index: int) -> dict[str, Any] | None:
        """Return what a process has written: read when it ended, since a later module may remove it."""
        return self._answers[index] if index in self._ends else self._literal(result_of(index))

    def _literal(self, name: str) -> dict[str, Any] | None:
        path = self._place.folder / name
        if not path.exists():
            return None
        try:
            return ast.literal_eval(path.read_text(encoding="ascii"))
        except (SyntaxError, ValueError):
            return None  # its process was killed while it wrote

    def _output(self, index: int) -> str:
        return self._place.output(output_of(index))


def _how_it_ended(code: str) -> str:
    """Put an exit code as ``observer`` gives it into words."""
    if not code.lstrip("-").isdigit():
        return "ended"
    number = int(code)
    if number >= 0:
        return f"ended with exit code {number}"
    try:
        return f"was ended by {signal.Signals(-number).name}"
    except ValueError:
        return f"was ended by signal {-number}"
