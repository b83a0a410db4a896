# SPDX-License-Identifier: Apache-2.0
"""A real local Ray: the job-level hook arms the workers of plain tasks, which no worker shell of ours starts."""

from nemo_rl_core import guard
from nemo_rl_core.guard.hooks import RAY_HOOK
from tests.core.guard.conftest import Sandbox


def test_a_plain_task_is_armed_by_the_jobs_hook(sandbox: Sandbox) -> None:
    """F57: as a string, set for the job; the task's own import is refused, and the error reaches the driver whole."""
    code = f"""
import ray
from nemo_rl_core import guard
ray.init(
    num_cpus=1,
    include_dashboard=False,
    log_to_driver=False,
    runtime_env={{
        "worker_process_setup_hook": {RAY_HOOK!r},
        "env_vars": {{**{guard.environment_for("train")!r}, "PYTHONPATH": os.environ["PYTHONPATH"]}},
    }},
)

@ray.remote
def peek():
    from nemo_rl_core import guard
    swallowed = False
    try:
        import vllm
    except ImportError:
        swallowed = True
    return guard.is_armed(), guard.current_policy().role, swallowed, guard.ledger().as_dicts()

@ray.remote
def careless():
    import vllm

armed, role, swallowed, entries = ray.get(peek.remote(), timeout=60)
try:
    ray.get(careless.remote(), timeout=60)
    error = None
except guard.ForbiddenImportError as caught:
    error = caught
ray.shutdown()
answer([armed, role, swallowed, [entry["role"] for entry in entries["violations"]], "must not import" in str(error)])
"""
    env = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    assert sandbox.run(code, env=env).answer == [True, "train", True, ["train"], True]
