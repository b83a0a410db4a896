# SPDX-License-Identifier: Apache-2.0
"""Starting, attaching and closing, with real Rays."""

import os
import socket
import subprocess
import sys

import pytest
import ray

from nemo_rl_core.distributed.ray_runtime import DRIVER_VARIABLES, passed_variables, start_ray
from nemo_rl_core.errors import ConfigError

HEAD = """
import os, sys
import ray  # before us, as a user's script may do: Ray reads its switch now
from nemo_rl_core.distributed.ray_runtime import start_ray
"""

ATTACH = (
    HEAD
    + """
runtime = start_ray(num_cpus=1)
assert not runtime.is_local
import ray._private.ray_constants as constants
assert constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV is False
names = sys.argv[1:]
look = ray.remote(num_cpus=0)(lambda: {name: os.environ.get(name) for name in names})
seen = ray.get(look.remote(), timeout=60)
runtime.close()
runtime.close()
print(runtime.address, *(f"{name}={value}" for name, value in seen.items()))
"""
)

SECOND = (
    HEAD
    + """
with start_ray(num_cpus=2, local_options={"object_store_memory": 80_000_000, "log_to_driver": False}) as runtime:
    assert runtime.is_local
    print(runtime.address, ray.cluster_resources()["CPU"])
assert not ray.is_initialized()
"""
)


def run_driver(code: str, *args: str, **env: str) -> list[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1].split()


def own_cpus() -> float:
    return ray.get(ray.remote(num_cpus=0)(lambda: ray.cluster_resources()["CPU"]).remote(), timeout=60)


def test_attaching_passes_the_allow_list_and_closing_leaves_the_cluster_running(local_ray):
    """U20: no other variable of the driver travels."""
    address, *seen = run_driver(
        ATTACH,
        "HF_HOME",
        "MY_TOKEN",
        "NEMO_RL_ROLE",
        RAY_ADDRESS=local_ray.address,
        # Ray's own rule: a token goes to an address that was given only if the driver says so.
        RAY_AUTH_MODE=os.environ.get("RAY_AUTH_MODE", "disabled"),
        HF_HOME="/somewhere",
        MY_TOKEN="secret",
    )
    assert address == local_ray.address
    assert seen == ["HF_HOME=/somewhere", "MY_TOKEN=None", "NEMO_RL_ROLE=rollout"]
    assert own_cpus() == 12


def test_a_second_local_ray_is_its_own_and_its_end_does_not_touch_ours(local_ray):
    address, cpus = run_driver(SECOND)
    assert address != local_ray.address
    assert float(cpus) == 2
    assert own_cpus() == 12


def test_a_ray_that_is_up_already_is_used_again_and_not_closed_by_the_second_handle(local_ray):
    again = start_ray(num_cpus=1)
    assert again.address == local_ray.address
    again.close()
    assert own_cpus() == 12


def test_an_unguarded_ray_is_not_taken_over():
    code = (
        "import ray\n"
        "from nemo_rl_core.distributed.ray_runtime import start_ray\n"
        "from nemo_rl_core.errors import StateError\n"
        "ray.init(address='local', num_cpus=1, include_dashboard=False, object_store_memory=80_000_000)\n"
        "try:\n    start_ray(num_cpus=1)\nexcept StateError as error:\n    print('refused', 'start_ray' in str(error))\n"
    )
    assert run_driver(code) == ["refused", "True"]


def test_an_address_at_which_nobody_listens_is_refused_at_once():
    """R17: no retry loop of minutes."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code = (
            "from nemo_rl_core.distributed.ray_runtime import start_ray\n"
            "from nemo_rl_core.errors import ClusterError, ConfigError\n"
            f"try:\n    start_ray(num_cpus=1, address={address!r})\n"
            f"except ClusterError as error:\n    print({address!r} in str(error), end=' ')\n"
            "try:\n    start_ray(num_cpus=1, address='ray://somewhere:10001')\n"
            "except ConfigError as error:\n    print('not supported' in str(error))\n"
        )
        assert run_driver(code) == ["True", "True"]


def test_a_plain_task_is_guarded_by_the_jobs_hook(local_ray, only_workers_see):
    """The control: a task of role generation imports the same module."""

    def try_import():
        try:
            import vllm
        except ImportError as error:
            return type(error).__name__
        return vllm.__version__

    def run_as(variables: dict[str, str]) -> str:
        runtime_env = {"env_vars": {"PYTHONPATH": str(only_workers_see), **variables}}
        return ray.get(ray.remote(num_cpus=0, runtime_env=runtime_env)(try_import).remote(), timeout=60)

    assert run_as({}) == "ForbiddenImportError"
    assert run_as({"NEMO_RL_ROLE": "generation"}) == "0.0.fake"


def test_only_listed_and_named_variables_pass_and_the_source_is_left_alone():
    """U20."""
    environ = {"HF_HOME": "/h", "HF_TOKEN": "secret", "PATH": "/bin", "NEMO_RL_ROLE": "driver"}
    before = dict(environ)
    assert passed_variables(environ) == {"HF_HOME": "/h"}
    assert passed_variables(environ, ["HF_TOKEN"]) == {"HF_HOME": "/h", "HF_TOKEN": "secret"}
    passed_variables(environ)["X"] = "y"
    assert environ == before
    assert passed_variables(environ) == {"HF_HOME": "/h"}
    assert not [name for name in DRIVER_VARIABLES if "TOKEN" in name and name != "TOKENIZERS_PARALLELISM"]


def test_a_variable_that_is_too_long_or_not_set_is_named():
    """R16."""
    with pytest.raises(ConfigError, match="'HF_HOME' has 9000 bytes"):
        passed_variables({"HF_HOME": "x" * 9000})
    with pytest.raises(ConfigError, match="'MY_KEY'"):
        passed_variables({}, ["MY_KEY"])
