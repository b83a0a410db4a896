# SPDX-License-Identifier: Apache-2.0
"""Promise 4 (data): what crosses from a worker can be unpickled where no engine is.

What `nemo_rl_core.testing.wire` finds is tested in `test_wire_reader.py`; here it looks at what really crosses.
"""

import inspect
import json
import os
import subprocess
import sys

import pytest

from nemo_rl_core.distributed.shell import RankSpec, WorkerShell
from nemo_rl_core.errors import GenerationError
from nemo_rl_core.guard.records import Attempt, Ledger, Violation
from nemo_rl_core.protocols.generation import Completion, GenerationRequest, GenerationWorker, SamplingParams
from nemo_rl_core.protocols.settings import GenerationSettings
from nemo_rl_core.testing.generation import ScriptedGenerator
from nemo_rl_core.testing.wire import WireError, check_crossing, check_stream, table_of
from nemo_rl_core.workers.torch_generation import TorchGenerationWorker
from tests.core.workers.test_torch_generation import make_worker, model, refit_from, worker  # noqa: F401 - fixtures

REQUEST = GenerationRequest(prompt_ids=(3, 4), sampling=SamplingParams(max_new_tokens=3, seed=1))

#: How each public method is called; a new method without an entry fails the test below.
CALLS = {
    "generate": lambda w: w.generate([REQUEST]),
    "num_receiving_ranks": lambda w: w.num_receiving_ranks(),
    "receive_weights": None,  # its report is what `refit_from` of the fixture returned; see below
    "weights_digest": lambda w: w.weights_digest(),
    "describe": lambda w: w.describe(),
    "shutdown": lambda w: w.shutdown(),
}

SHELL_CALLS = {
    "identity": lambda s: s.identity(),
    "bind_store": lambda s: s.bind_store(5.0),
    "load_torch": lambda s: s.load_torch(),
    "build": lambda s: s.build("nemo_rl_core.testing.workers:EchoWorker", ("hi",), {}, None, 5.0),
    "call": lambda s: s.call("greet", (), {}),
    "firewall_report": lambda s: s.firewall_report(),
    "shutdown": lambda s: s.shutdown(),
}

#: A `vllm` of a few lines, and a worker that keeps its objects to itself or lets one slip.
ENGINE = {
    "vllm/__init__.py": (
        "class RequestOutput:\n"
        "    def __init__(self, ids):\n"
        "        self.ids = ids\n"
        "class EngineDeadError(RuntimeError):\n"
        "    def __init__(self, output):\n"
        "        super().__init__('engine core died', output)\n"
    ),
    "engine_worker.py": (
        "import vllm\n"
        "from nemo_rl_core.protocols.generation import Completion\n"
        "class EngineWorker:\n"
        "    def generate(self, requests):\n"
        "        out = vllm.RequestOutput((5, 6))\n"
        "        return [Completion(token_ids=out.ids, logprobs=(-0.5, -0.1), finish_reason='stop', weight_version=2)]\n"
        "    def fail(self):\n"
        "        raise vllm.EngineDeadError(vllm.RequestOutput(()))\n"
        "    def slip(self):\n"
        "        return {'outputs': [1, vllm.RequestOutput(())]}\n"
        "    def slip_an_error(self):\n"
        "        return [vllm.EngineDeadError('x')]\n"
    ),
}


@pytest.fixture
def shell(monkeypatch):
    """A worker's shell in this process; it sets variables, which are put back."""
    before = dict(os.environ)
    monkeypatch.delenv("NEMO_RL_ROLE", raising=False)
    spec = {"worker": "w-0", "rank": 0, "world_size": 1, "local_rank": 0, "node_rank": 0, "node_id": "n"}
    yield WorkerShell(RankSpec(**spec, node_ip="127.0.0.1"))
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """The folder of the small engine, importable in this process."""
    for name, text in ENGINE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("vllm", "engine_worker"):
        sys.modules.pop(name, None)


def public_methods(kind):
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def test_every_public_method_of_the_protocol_the_worker_and_the_shell_is_covered():
    assert public_methods(GenerationWorker) == set(CALLS)
    assert public_methods(TorchGenerationWorker) == set(CALLS)
    assert public_methods(WorkerShell) == set(SHELL_CALLS)


def test_the_result_of_each_method_needs_core_at_most(make_worker, model):  # noqa: F811 - the fixtures
    """U8: also the report of a refit. Printed as a table of fields; not even torch is needed to read one."""
    worker = make_worker()  # noqa: F811
    results = {"receive_weights": refit_from(model, worker, version=7)}
    results |= {method: call(worker) for method, call in CALLS.items() if call}
    rows = [row for method, result in results.items() for row in check_crossing(result, f"{method}()")]
    print(table_of(rows))
    assert {row.path.partition("()")[0] for row in rows} == set(CALLS)
    assert "generate()[0].logprobs" in {row.path for row in rows}
    assert {row.path: row.roots for row in rows if row.roots} == {"generate()[0]": {"nemo_rl_core"}}


@pytest.mark.usefixtures("engine")
def test_what_ray_writes_is_held_to_the_same_rule(make_worker, shell):  # noqa: F811 - the fixtures
    """U8: it pickles by its own cloudpickle, with protocol 5, and sends by value what lives in no module."""
    ray_pickle = pytest.importorskip("ray.cloudpickle")
    worker = make_worker()  # noqa: F811
    for method in ("num_receiving_ranks", "describe"):
        check_stream(ray_pickle.dumps(CALLS[method](worker)), f"{method}()")
    shell.build("engine_worker:EngineWorker", (), {}, None, 5.0)
    outcome = shell.call("generate", ([REQUEST],), {})
    assert {each.root for each in check_stream(ray_pickle.dumps(outcome), "generate()")} == {"nemo_rl_core"}
    with pytest.raises(WireError, match=r"slip\(\) needs 'vllm'"):
        check_stream(ray_pickle.dumps(shell.call("slip", (), {})), "slip()")

    class OfNoModule:
        pass

    with pytest.raises(WireError, match=r"local needs 'ray' \(ray\.cloudpickle"):
        check_stream(ray_pickle.dumps(OfNoModule()), "local")


@pytest.mark.parametrize("method", SHELL_CALLS)
def test_what_the_shell_adds_is_builtins_alone(shell, method):
    """U8: who it is, a store's address, the guard's report; and a failure, since nothing was built here."""
    rows = check_crossing(SHELL_CALLS[method](shell), f"{method}()", allowed=())
    assert {root for row in rows for root in row.roots} == set()
    if method == "call":
        assert "failure" in SHELL_CALLS[method](shell)


def test_a_guards_report_with_entries_is_builtins_alone():
    violation = Violation(
        kind="import", role="train", module="vllm", importer="m", file="m.py", line=3, chain=("m", "vllm")
    )
    attempt = Attempt(package="p", module="vllm", importer="p.q", file="q.py", line=4)
    report = Ledger(role="train", violations=(violation,), attempts={"p": attempt}).as_dicts()
    assert report["violations"]
    assert report["attempts"]
    assert [row for row in check_crossing(report, "firewall_report()", allowed=()) if row.globals] == []


@pytest.mark.usefixtures("engine")
def test_an_engines_exception_leaves_the_shell_as_text(shell):
    """F50: its class, and an engine's object among its arguments, stay behind; type and text cross."""
    assert shell.build("engine_worker:EngineWorker", (), {}, None, 5.0) == {"value": None}
    outcome = shell.call("fail", (), {})
    assert [row for row in check_crossing(outcome, "fail()", allowed=()) if row.globals] == []
    assert outcome["failure"]["type"] == "EngineDeadError"
    assert "engine core died" in outcome["failure"]["text"]
    assert "engine_worker.py" in outcome["failure"]["traceback"]


@pytest.mark.usefixtures("engine")
def test_an_object_of_the_engine_that_slips_through_is_named_by_its_field(shell):
    """F51, U8: the control; the message says what to do instead."""
    shell.build("engine_worker:EngineWorker", (), {}, None, 5.0)
    with pytest.raises(
        WireError, match=r"slip\(\)\['outputs'\]\[1\] needs 'vllm' \(vllm\.RequestOutput\); turn it into"
    ):
        check_crossing(shell.call("slip", (), {})["value"], "slip()")
    with pytest.raises(WireError, match=r"slip_an_error\(\)\[0\] needs 'vllm' \(vllm\.EngineDeadError\)"):
        check_crossing(shell.call("slip_an_error", (), {})["value"], "slip_an_error()")


def test_cores_own_error_for_an_engine_needs_core_alone():
    """F50: for adapters that raise it themselves, or hand one over as a value."""
    error = GenerationError("engine core died", type_name="vllm.EngineDeadError", remote_traceback="...")
    rows = check_crossing(error, "error")
    assert frozenset().union(*(row.roots for row in rows)) == {"nemo_rl_core"}
    assert {row.path for row in rows} >= {"error.args[0]", "error.type_name", "error.remote_traceback"}


def test_one_item_and_one_failure_are_read_where_the_engine_cannot_be_imported(engine, tmp_path):
    """F51, U8: a replay buffer in core's environment gets both from a worker that has an engine."""
    write = (
        "import pickle, sys\n"
        "from nemo_rl_core.distributed.shell import RankSpec, WorkerShell\n"
        "spec = RankSpec(worker='w', rank=0, world_size=1, local_rank=0, node_rank=0, node_id='', node_ip='')\n"
        "shell = WorkerShell(spec)\n"
        "shell.build('engine_worker:EngineWorker', (), {}, None, 1.0)\n"
        "outcomes = [shell.call('generate', ([],), {}), shell.call('fail', (), {})]\n"
        "assert 'vllm' in sys.modules\n"
        "pickle.dump(outcomes, open(sys.argv[1], 'wb'))\n"
    )
    read = (
        "import json, pickle, sys\n"
        "sys.modules['vllm'] = None\n"
        "item, failure = pickle.load(open(sys.argv[1], 'rb'))\n"
        "heavy = sorted({'torch', 'ray', 'transformers', 'engine_worker'} & set(sys.modules))\n"
        "print(json.dumps([item['value'][0].token_ids, failure['failure']['type'], heavy]))\n"
    )
    path = str(tmp_path / "outcomes.pickle")
    env = {name: value for name, value in os.environ.items() if name not in ("NEMO_RL_ROLE", "PYTHONPATH")}
    options = {"capture_output": True, "text": True, "timeout": 60}
    command = [sys.executable, "-c", write, path]
    wrote = subprocess.run(command, env=env | {"PYTHONPATH": str(engine)}, check=False, **options)
    assert wrote.returncode == 0, wrote.stderr
    done = subprocess.run([sys.executable, "-c", read, path], env=env, check=False, **options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[5, 6], "EngineDeadError", []]


def test_what_goes_to_a_worker_needs_core_alone(model_settings, tokenizer_settings):
    """U8: the other direction; requests and the settings that build it."""
    settings = GenerationSettings(model=model_settings, tokenizer=tokenizer_settings, options={"max_batch_size": 4})
    rows = check_crossing([REQUEST, settings], "to a worker")
    print(table_of(rows))
    assert frozenset().union(*(row.roots for row in rows)) == {"nemo_rl_core"}


def test_an_adapters_author_can_check_a_fake_in_the_same_way():
    result = ScriptedGenerator([(1, 2)]).generate([REQUEST])
    assert {row.kind for row in check_crossing(result, "generate()")} >= {Completion.__name__}
