# SPDX-License-Identifier: Apache-2.0
"""Entry points of the guard for interpreters that others start; standard library only.

Ray takes ``nemo_rl_core.guard.hooks.ray_worker_setup`` as a string in the job's runtime environment
(``worker_process_setup_hook``), and core's wheel carries a ``.pth`` line that calls ``at_interpreter_start``.
"""

from nemo_rl_core.guard.records import ForbiddenImportError
from nemo_rl_core.guard.runtime import arm_from_environment

__all__ = ["RAY_HOOK", "at_interpreter_start", "ray_worker_setup"]

#: The string for ``ray.init(runtime_env={"worker_process_setup_hook": ...})``. Give it per job: per actor, Ray
#: accepts it and never runs it.
RAY_HOOK = "nemo_rl_core.guard.hooks.ray_worker_setup"


def ray_worker_setup() -> None:
    """Arm a Ray worker from its environment; a worker without a role is left alone.

    Raises:
        ForbiddenImportError: If a forbidden module is loaded already; Ray then ends the worker with the message.
        ValueError: If a variable holds a value that the table does not know.
    """
    arm_from_environment()


def at_interpreter_start() -> None:
    """Arm while ``site`` runs; the ``.pth`` line calls it where ``NEMO_RL_ROLE`` is set.

    An exception would only be printed by ``site``, and the process would go on unguarded, so this ends it. A core that
    is half removed never gets here: ``site`` prints the ImportError and the interpreter starts.

    Raises:
        SystemExit: If a forbidden module is loaded already, or a variable holds a value that the table does not know.
    """
    try:
        arm_from_environment()
    except (ForbiddenImportError, ValueError) as error:
        raise SystemExit(f"nemo-rl guard: {error}") from error
