# SPDX-License-Identifier: Apache-2.0
"""The worker shell, without Ray: what it arms, builds and sends back."""

import os
import pickle
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from nemo_rl_core import guard
from nemo_rl_core.distributed.shell import RankSpec, WorkerShell, import_class
from nemo_rl_core.errors import GenerationError

WORKERS = "nemo_rl_core.testing.workers"
PLAIN = (str, int, float, bool, type(None))


def spec(rank: int = 0, world_size: int = 1) -> RankSpec:
    return RankSpec(
        worker=f"test-{rank}",
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        node_rank=0,
        node_id="n",
        node_ip="127.0.0.1",
    )


@pytest.fixture(autouse=True)
def own_variables(monkeypatch):
    """A shell sets variables of its process; here that is the test's."""
    before = dict(os.environ)
    monkeypatch.delenv("NEMO_RL_ROLE", raising=False)
    yield
    guard.disarm()
    os.environ.clear()
    os.environ.update(before)


def run_fresh(code: str, *args: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(is_plain(item) for item in value)
    return isinstance(value, PLAIN)


def test_the_shell_needs_the_standard_library_alone():
    heavy = ["torch", "ray", "numpy", "transformers", "pydantic", "importlib_metadata", "rich", "yaml"]
    code = (
        "import sys, nemo_rl_core.distributed.shell\n"
        f"print([name for name in {heavy} if name in sys.modules])\n"
        "print('nemo_rl_core.distributed.shell' in sys.modules)"
    )
    assert run_fresh(code).splitlines() == ["[]", "True"]


def test_a_worker_gets_its_rank_by_the_constructor_parameters_that_it_names():
    shell = WorkerShell(spec(rank=1, world_size=2))
    assert shell.build(f"{WORKERS}:EchoWorker", ("hi",), {}, None, 5.0) == {"value": None}
    assert shell.call("greet", (), {}) == {"value": "hi from 1"}
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == "1"
    assert os.environ["WORLD_SIZE"] == "2"


def test_a_given_argument_wins_over_the_rank_argument_of_that_name():
    shell = WorkerShell(spec(rank=1, world_size=2))
    shell.build(f"{WORKERS}.EchoWorker", (), {"rank": 7}, None, 5.0)
    assert shell.call("greet", (), {}) == {"value": "hello from 7"}


def test_the_tools_of_the_interpreter_come_first_on_path():
    """R19."""
    WorkerShell(spec())
    assert os.environ["PATH"].split(os.pathsep)[0] == os.path.dirname(sys.executable)  # noqa: PTH120 -- as PATH has it


@pytest.mark.parametrize(
    ("path", "phase", "kind"),
    [
        ("no_such_module:Worker", "import", "ModuleNotFoundError"),
        (f"{WORKERS}:NoSuchWorker", "import", "AttributeError"),
        (f"{WORKERS}:os", "import", "TypeError"),
        ("Worker", "import", "ValueError"),
        (f"{WORKERS}:FailingWorker", "start", "RuntimeError"),
        (f"{WORKERS}:GlooWorker", "start", "ValueError"),
    ],
)
def test_a_failure_to_build_says_in_which_phase(path, phase, kind):
    shell = WorkerShell(spec())
    kwargs = {"failing_rank": 0, "wait_s": 0} if "Failing" in path else {}
    failure = shell.build(path, (), kwargs, None, 5.0)["failure"]
    assert (failure["phase"], failure["type"], failure["rank"]) == (phase, kind, 0)
    assert is_plain(failure)
    assert shell.call("greet", (), {})["failure"]["type"] == "StateError"


def test_an_exception_leaves_as_builtins_that_an_empty_interpreter_can_read(tmp_path):
    class EngineDeadError(GenerationError):
        def __init__(self, code):
            super().__init__(f"engine ended with {code}", type_name="x.Dead")
            self.handle = socket.socket()

        def __str__(self):
            raise OSError("no text either")

    class Worker:
        def fail(self):
            raise EngineDeadError(9)

    shell = WorkerShell(spec())
    shell._worker = Worker()
    outcome = shell.call("fail", (), {})
    assert is_plain(outcome)
    assert outcome["failure"]["core_error"] == {
        "name": "GenerationError",
        "fields": {"rank": -1, "phase": "", "engine_version": "", "type_name": "x.Dead", "remote_traceback": ""},
    }
    (tmp_path / "outcome.pickle").write_bytes(pickle.dumps(outcome))
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb'))['failure']['type'])"
    command = [sys.executable, "-I", "-S", "-c", code, str(tmp_path / "outcome.pickle")]
    assert subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout == "EngineDeadError\n"


def test_the_guard_is_armed_before_the_worker_class_is_imported(only_workers_see):
    """Also the control: in role generation the same import works, so the refusal is the guard's."""
    # The role is set after the interpreter's start, so that nothing but the shell can have armed the guard.
    code = (
        "import os, sys\n"
        "os.environ['NEMO_RL_ROLE'] = sys.argv[1]\n"
        "from nemo_rl_core.distributed.shell import RankSpec, WorkerShell\n"
        "spec = RankSpec(worker='w', rank=0, world_size=1, local_rank=0, node_rank=0, node_id='', node_ip='')\n"
        "outcome = WorkerShell(spec).build('sneaky_worker:SneakyWorker', (), {}, None, 1.0)\n"
        "print(outcome.get('failure', {}).get('type'), outcome.get('failure', {}).get('phase'))"
    )
    path = str(only_workers_see)
    assert run_fresh(code, "train", PYTHONPATH=path) == "ForbiddenImportError import"
    assert run_fresh(code, "generation", PYTHONPATH=path) == "None None"


def test_a_guard_that_cannot_be_armed_is_the_first_failure(only_workers_see):
    code = (
        "import os, vllm\n"
        "os.environ['NEMO_RL_ROLE'] = 'train'\n"
        "from nemo_rl_core.distributed.shell import RankSpec, WorkerShell\n"
        "spec = RankSpec(worker='w', rank=0, world_size=1, local_rank=0, node_rank=0, node_id='', node_ip='')\n"
        "failure = WorkerShell(spec).build('no_such:Worker', (), {}, None, 1.0)['failure']\n"
        "print(failure['type'], failure['phase'])"
    )
    assert run_fresh(code, PYTHONPATH=str(only_workers_see)) == "ForbiddenImportError guard"


def test_fifty_stores_bound_at_once_all_have_their_own_port_and_keep_it():
    """R24, R25, U21: no port is probed and released, so none can be lost to another."""
    shells = [WorkerShell(spec()) for _ in range(50)]
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda shell: shell.bind_store(60.0), shells))
    ports = [int(outcome["value"].rpartition(":")[2]) for outcome in outcomes]
    assert len(set(ports)) == 50
    for port in ports:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        with socket.socket() as rival, pytest.raises(OSError, match="in use"):
            rival.bind(("127.0.0.1", port))


def test_a_store_that_cannot_be_reached_is_named_within_seconds():
    """R21: the unreachable pair is named before any process group is built."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        failure = WorkerShell(spec(rank=1, world_size=2)).build(f"{WORKERS}:EchoWorker", (), {}, address, 5.0)[
            "failure"
        ]
    assert failure["phase"] == "rendezvous"
    assert address in failure["text"]
    assert "rank 1" in failure["text"]
    assert "TCP reachable: no" in failure["text"]


def test_shutdown_calls_the_workers_own_and_twice_is_fine():
    events = []

    class Worker:
        def shutdown(self):
            events.append("shutdown")

        def save(self):
            events.append("save")

    for method in (None, "save"):
        shell = WorkerShell(spec())
        shell._worker = Worker()
        assert shell.shutdown(method) == {"value": None}
        assert shell.shutdown(method) == {"value": None}
    assert events == ["shutdown", "save"]
    shell._worker = Worker()
    assert shell.shutdown("sawe")["failure"]["type"] == "AttributeError"


def test_import_class_takes_both_spellings():
    assert import_class(f"{WORKERS}:EchoWorker") is import_class(f"{WORKERS}.EchoWorker")
