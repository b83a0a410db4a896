# SPDX-License-Identifier: Apache-2.0
"""One driver's Ray: attach to the running cluster or start a local one, and close only what was started here."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from nemo_rl_core import guard
from nemo_rl_core.errors import ClusterError, ConfigError, StateError

__all__ = ["DRIVER_VARIABLES", "SETUP_HOOK", "RayRuntime", "passed_variables", "start_ray"]

#: Armed by Ray in each worker process of the job, tasks included.
SETUP_HOOK: Final = "nemo_rl_core.guard.hooks.ray_worker_setup"

#: The driver's variables that workers get. Tokens and keys are not among them: a job's variables can be read in
#: Ray's dashboard. Whoever needs one there passes it by name.
DRIVER_VARIABLES: Final[frozenset[str]] = frozenset(
    {
        "CUDA_DEVICE_ORDER",
        "GLOO_SOCKET_IFNAME",
        "HF_DATASETS_OFFLINE",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "LANG",
        "LC_ALL",
        "MKL_NUM_THREADS",
        "NCCL_DEBUG",
        "NCCL_IB_DISABLE",
        "NCCL_IB_HCA",
        "NCCL_NET",
        "NCCL_P2P_DISABLE",
        "NCCL_SHM_DISABLE",
        "NCCL_SOCKET_IFNAME",
        "OMP_NUM_THREADS",
        "TOKENIZERS_PARALLELISM",
        "TORCH_CUDA_ARCH_LIST",
        "TRANSFORMERS_OFFLINE",
        "TZ",
    }
)

#: Ray hands variables through command lines; very long ones keep its agent from starting.
_MAX_VARIABLE_BYTES = 8192
_CONNECT_S = 10.0


def passed_variables(environ: Mapping[str, str], extra: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables of ``environ`` that workers get: the allow-list, and ``extra`` by name.

    Args:
        environ: The driver's variables; not changed.
        extra: Names to pass besides ``DRIVER_VARIABLES``.

    Returns:
        A fresh dict.

    Raises:
        ConfigError: If a variable is too long for Ray, or a name in ``extra`` is not set.
    """
    for name in extra:
        if name not in environ:
            raise ConfigError(f"the variable {name!r} is to be passed to workers, but it is not set")
    chosen = {name: environ[name] for name in sorted({*DRIVER_VARIABLES, *extra}) if name in environ}
    for name, value in chosen.items():
        if len(value.encode()) > _MAX_VARIABLE_BYTES:
            raise ConfigError(
                f"the variable {name!r} has {len(value.encode())} bytes; Ray's agent takes at most "
                f"{_MAX_VARIABLE_BYTES}, so shorten it or put it in a file"
            )
    return chosen


class RayRuntime:
    """The driver's connection to Ray. Use it as a context manager or call ``close``."""

    def __init__(self, *, address: str, is_local: bool, owns: bool) -> None:
        """Keep what ``start_ray`` found out.

        Args:
            address: ``host:port`` of the cluster's GCS.
            is_local: Whether this process started the cluster.
            owns: Whether this handle opened the connection.
        """
        self.address = address
        self.is_local = is_local
        self._open = owns

    def close(self) -> None:
        """End what this handle began: stop the local Ray, or disconnect from a running cluster. Idempotent.

        A cluster that was attached to goes on.
        """
        if not self._open:
            return
        self._open = False
        import ray

        if ray.is_initialized():
            ray.shutdown()

    def __enter__(self) -> "RayRuntime":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def start_ray(
    *,
    num_cpus: int,
    address: str | None = None,
    task_role: str = "rollout",
    on_violation: str = "raise",
    allow: Sequence[str] = (),
    allow_importers: Sequence[str] = (),
    pass_variables: Sequence[str] = (),
    local_options: Mapping[str, Any] | None = None,
) -> RayRuntime:
    """Attach to a running cluster, or start a local Ray that is ours alone.

    Args:
        num_cpus: Worker slots of a local Ray: the number of workers and tasks at a time, which is independent of
            the machine's cores. Not used when attaching.
        address: ``host:port`` of a running cluster; None reads ``RAY_ADDRESS``, and without it a local Ray starts.
        task_role: Role of the job's plain tasks; worker groups set their own.
        on_violation: What the guard does in tasks: ``raise``, ``record`` or ``exit``.
        allow: Top-level names that the guard lets through in tasks.
        allow_importers: Modules whose own imports of forbidden names the guard lets through in tasks.
        pass_variables: Variables of the driver to pass besides ``DRIVER_VARIABLES``.
        local_options: More arguments of ``ray.init`` for a local Ray, e.g. ``num_gpus``, ``labels``,
            ``object_store_memory`` (bytes).

    Raises:
        ClusterError: If Ray does not start, or the cluster cannot be joined.
        StateError: If this process already runs a Ray that was not started here.
        ConfigError: If a variable cannot be passed, or the address is malformed.
    """
    # Before Ray is imported, hence the lazy import: under `uv run` Ray's own hook would upload the working directory
    # and build a second environment, and Ray reads this switch when it is imported.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    import ray

    constants = sys.modules.get("ray._private.ray_constants")
    if constants is not None:  # Ray was imported before us and has read the switch: correct its copy
        vars(constants)["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = False

    if ray.is_initialized():
        return _reuse(ray)
    variables = {
        **passed_variables(os.environ, pass_variables),
        **guard.environment_for(task_role, on_violation=on_violation, allow=allow, allow_importers=allow_importers),
    }
    runtime_env = {"worker_process_setup_hook": SETUP_HOOK, "env_vars": variables}
    target = address or os.environ.get("RAY_ADDRESS")
    attaching = target not in (None, "", "local")
    if target is not None and attaching:
        _check_reachable(target)
    options: dict[str, Any] = (
        {} if attaching else {"num_cpus": num_cpus, "include_dashboard": False, **(local_options or {})}
    )
    # Ray takes SIGTERM over when it starts; a driver's own way to end in order must go on to work.
    on_main_thread = threading.current_thread() is threading.main_thread()
    on_sigterm = signal.getsignal(signal.SIGTERM) if on_main_thread else None
    try:
        # "local" starts a Ray of our own even where another one runs on this machine.
        ray.init(address=target if attaching else "local", runtime_env=runtime_env, **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError) as error:
        what = f"join the Ray cluster at {target!r}" if attaching else "start a local Ray"
        hint = ""
        if attaching and "RAY_AUTH_MODE" not in os.environ:
            # Ray sends its token to an address that was given only if it is told to.
            hint = "; if the cluster uses Ray's token authentication, set RAY_AUTH_MODE=token and provide its token"
        words = " ".join(str(error).split())  # Ray tells versions that differ in a table of several lines
        raise ClusterError(f"cannot {what}: {type(error).__name__}: {words}{hint}") from error
    finally:
        if on_sigterm is not None:
            signal.signal(signal.SIGTERM, on_sigterm)
    return RayRuntime(address=ray.get_runtime_context().gcs_address, is_local=not attaching, owns=True)


def _check_reachable(address: str) -> None:
    """Refuse an address that nobody listens at; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if "://" in address or not host or not port.isdecimal():
        raise ConfigError(
            f"the address of a Ray cluster is 'host:port' of its GCS (port 6379 by default), got {address!r}; the Ray "
            "client (ray://) is not supported, run the driver on a node of the cluster"
        )
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ClusterError(f"cannot reach the Ray cluster at {address!r}: {error}; is it running there?") from error


def _reuse(ray: Any) -> RayRuntime:
    """Return a handle on a Ray that is already up in this process, if its tasks are guarded."""
    context = ray.get_runtime_context()
    if context.runtime_env.get("env_vars", {}).get("NEMO_RL_ROLE") is None:
        raise StateError(
            "this process already runs a Ray whose tasks are not guarded; call start_ray() before ray.init(), "
            f"or give ray.init a runtime_env with worker_process_setup_hook={SETUP_HOOK!r} and the variables of "
            "nemo_rl_core.guard.environment_for(role)"
        )
    return RayRuntime(address=context.gcs_address, is_local=False, owns=False)
