# SPDX-License-Identifier: Apache-2.0
"""A real local Ray: the job's hook arms plain tasks and actors, which no worker shell of ours starts."""

from nemo_rl_core import guard
from nemo_rl_core.guard.hooks import RAY_HOOK
from tests.core.guard.conftest import Sandbox


def test_plain_tasks_and_actors_are_armed_by_the_jobs_hook(sandbox: Sandbox) -> None:
    """F57: as a string, set for the job; what a task or an actor imports is refused, and the driver is told in full."""
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

def look():
    import pickle
    from nemo_rl_core import guard
    swallowed = 0
    for load in (lambda: __import__("vllm.config"), lambda: pickle.loads(b"cvllm\\nLLM\\n.")):
        try:
            load()
        except ImportError:
            swallowed += 1
    ledger = guard.ledger()
    return guard.is_armed(), guard.current_policy().role, swallowed, len(ledger.violations) > 0, "vllm" in sys.modules

@ray.remote
def peek():
    return look()

@ray.remote
def careless():
    import vllm

@ray.remote
class Actor:
    def peek(self):
        return look()

    def careless(self):
        import vllm

@ray.remote
class Stillborn:
    def __init__(self):
        import vllm

    def method(self):
        return 1

def failure(reference):
    try:
        return ray.get(reference, timeout=60)
    except Exception as error:
        return [isinstance(error, guard.ForbiddenImportError), "a train process must not import 'vllm'" in str(error)]

actor, stillborn = Actor.remote(), Stillborn.options(num_cpus=0).remote()
found = [ray.get(actor.peek.remote(), timeout=60), failure(actor.careless.remote()), failure(stillborn.method.remote())]
ray.kill(actor)
found += [ray.get(peek.remote(), timeout=60), failure(careless.remote())]
ray.shutdown()
answer(found)
"""
    env = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    seen, refused, told = [True, "train", 2, True, False], [True, True], [False, True]
    assert sandbox.run(code, env=env).answer == [seen, refused, told, seen, refused]


def test_the_allow_list_of_importers_reaches_tasks_and_workers(sandbox: Sandbox) -> None:
    """From the driver's settings to the variables of a plain task and to those of a worker group."""
    code = """
from nemo_rl_core.distributed.ray_runtime import start_ray
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
NAME = "NEMO_RL_FIREWALL_ALLOW_IMPORTERS"
options = {"object_store_memory": 80_000_000, "log_to_driver": False}
with start_ray(num_cpus=2, local_options=options, allow_importers=["mylib.bridge"]):
    import ray
    told = [ray.get(ray.remote(lambda: os.environ.get("NEMO_RL_FIREWALL_ALLOW_IMPORTERS")).remote(), timeout=60)]
    cluster = RayVirtualCluster([1], use_gpus=False, name="test", timeout_s=60)
    builder = RayWorkerBuilder("nemo_rl_core.testing.workers:EchoWorker")
    settings = {"name_prefix": "echo", "role": "train", "environment": "base"}
    # Another list than the job's, which the worker's process would have otherwise.
    group = RayWorkerGroup(cluster, builder, allow_importers=["mylib.other", "mylib.third"], **settings)
    told += [values[NAME] for values in group.run_all_workers_single_data("variables", names=[NAME]).get_results()]
    group.shutdown()
answer(told)
"""
    env = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    assert sandbox.run(code, env=env).answer == ["mylib.bridge", "mylib.other,mylib.third"]
