# SPDX-License-Identifier: Apache-2.0
"""Small worker classes that do one thing each, for tests of worker groups; plain classes, as real workers are."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["EchoWorker", "FailingWorker", "GlooWorker", "HangingWorker", "RendezvousWorker"]


class EchoWorker:
    """Answers with what it was given, and records what it was asked."""

    def __init__(self, greeting: str = "hello", *, rank: int = -1, world_size: int = 0, local_rank: int = -1) -> None:
        """Keep the arguments; the rank arguments are filled in by the shell."""
        self.greeting = greeting
        self.rank = rank
        self.facts = {"rank": rank, "world_size": world_size, "local_rank": local_rank}
        self.calls = 0

    def greet(self) -> str:
        """Return greeting and rank."""
        return f"{self.greeting} from {self.rank}"

    def echo(self, **kwargs: Any) -> tuple[int, dict[str, Any]]:
        """Return the rank and the arguments."""
        self.calls += 1
        return self.rank, kwargs

    def count(self) -> int:
        """Return how often ``echo`` was called."""
        return self.calls

    def variables(self, names: list[str]) -> dict[str, str | None]:
        """Return variables of this process; None where one is not set."""
        return {name: os.environ.get(name) for name in names}

    def process(self) -> dict[str, Any]:
        """Return facts of this process: pid, interpreter, import path."""
        return {"pid": os.getpid(), "interpreter": sys.executable, "path": list(sys.path)}

    def loaded(self, names: list[str]) -> list[str]:
        """Return which of these modules are loaded in this process."""
        return [name for name in names if name in sys.modules]

    def sleep(self, seconds: float, ranks: list[int] | None = None) -> int:
        """Sleep on the given ranks (None: on all) and return the rank."""
        if ranks is None or self.rank in ranks:
            time.sleep(seconds)
        return self.rank

    def fail_on(self, ranks: list[int], then_sleep_s: float = 0.0) -> int:
        """Raise a ValueError on the given ranks; on the others sleep and return the rank."""
        if self.rank in ranks:
            raise ValueError(f"asked to fail on rank {self.rank}")
        time.sleep(then_sleep_s)
        return self.rank

    def raise_core_error(self) -> None:
        """Raise one of core's own errors, with its fields."""
        from nemo_rl_core.errors import RefitTimeoutError

        raise RefitTimeoutError("nobody came", cause="rank 3 missing", phase="handshake", culprit="generation rank 3")

    def die(self, ranks: list[int], then_sleep_s: float = 0.0) -> int:
        """End the process by SIGKILL on the given ranks; on the others sleep and return the rank."""
        if self.rank in ranks:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(then_sleep_s)
        return self.rank

    def unpicklable(self) -> Any:
        """Return something that cannot leave the process."""
        return (number for number in range(3))


class FailingWorker:
    """Its constructor raises on one rank and waits on the others, as a collective would."""

    def __init__(self, failing_rank: int, wait_s: float, *, rank: int, pid_folder: str | None = None) -> None:
        """Leave the process id in a file named by the rank, then raise or wait.

        Raises:
            RuntimeError: On the failing rank.
        """
        if pid_folder is not None:
            (Path(pid_folder) / str(rank)).write_text(str(os.getpid()))
        if rank == failing_rank:
            raise RuntimeError(f"no device for rank {rank}")
        time.sleep(wait_s)


class HangingWorker:
    """Its constructor does not return in time on one rank."""

    def __init__(self, hanging_rank: int, wait_s: float, *, rank: int) -> None:
        """Wait on that rank."""
        if rank == hanging_rank:
            time.sleep(wait_s)


class GlooWorker:
    """Builds a process group on the store that the shell keeps."""

    def __init__(self, *, rank: int, world_size: int, store: Any) -> None:
        """Join the group."""
        import torch.distributed as dist

        self.rank = rank
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)

    def total(self) -> int:
        """Return the sum over ranks of rank + 1."""
        import torch
        import torch.distributed as dist

        value = torch.tensor([self.rank + 1])
        dist.all_reduce(value)
        return int(value.item())

    def total_unless_killed(self, victim: int) -> int:
        """End the victim's process; the others wait for it in a collective."""
        if self.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.total()


class RendezvousWorker(GlooWorker):
    """Builds a process group from the environment variables alone, as existing training code does."""

    def __init__(self, *, rank: int) -> None:
        """Join the group by torch's default ``env://``."""
        import torch.distributed as dist

        self.rank = rank
        dist.init_process_group("gloo")
