# SPDX-License-Identifier: Apache-2.0
"""Every way to import is refused, and every refusal says who asked."""

import pytest

from tests.core.guard.conftest import Sandbox

WAYS = {
    "statement": "import vllm",
    "from": "from vllm import LLM",
    "star": "import starred",
    "submodule": "import vllm.config",
    "from submodule": "from vllm.config import VALUE",
    "what only the engine brings": "import flashinfer",
    "import_module": "import importlib; importlib.import_module('vllm.config')",
    "dunder": "__import__('vllm')",
    "resolve_name": "import pkgutil; pkgutil.resolve_name('vllm:LLM')",
    "entry point of the standard library": (
        "from importlib.metadata import EntryPoint; EntryPoint('x', 'vllm:LLM', 'g').load()"
    ),
    "entry point of the backport": (
        "from importlib_metadata import EntryPoint; EntryPoint(name='x', value='vllm:LLM', group='g').load()"
    ),
    "unpickling in C": "import pickle; pickle.loads(b'cvllm\\nLLM\\n.')",
    "unpickling in Python": "import io, pickle; pickle._Unpickler(io.BytesIO(b'cvllm\\nLLM\\n.')).load()",
    "run_module": "import runpy; runpy.run_module('vllm')",
    "run_module of a submodule": "import runpy; runpy.run_module('vllm.config')",
    "run_path": "import runpy; runpy.run_path(os.path.join('user', 'helper.py'))",
    "through a user's module": "import helper",
    "reload of a user's module": "import importlib, later; os.environ['LATER'] = '1'; importlib.reload(later)",
    "attribute of a lazy module": "import facade; facade.LLM",
    "a class that came by cloudpickle": "from ray import cloudpickle; cloudpickle.loads(b'cvllm\\nLLM\\n.')",
    "a function that came by cloudpickle": (
        "from ray import cloudpickle; cloudpickle.loads(cloudpickle.dumps(lambda: __import__('vllm')))()"
    ),
    "thread": (
        "import threading\n"
        "    caught = []\n"
        "    def work():\n"
        "        try: import vllm\n"
        "        except ImportError as error: caught.append(error)\n"
        "    thread = threading.Thread(target=work); thread.start(); thread.join(30)\n"
        "    raise caught[0]"
    ),
    "thread pool": (
        "import concurrent.futures\n"
        "    def work():\n"
        "        import vllm\n"
        "    with concurrent.futures.ThreadPoolExecutor(1) as pool: pool.submit(work).result(30)"
    ),
    "coroutine": "import asyncio\n    async def work():\n        import vllm\n    asyncio.run(work())",
}

HELPERS = {
    "helper.py": "import vllm\n",
    "starred.py": "from vllm import *\n",
    "later.py": "import os\nif 'LATER' in os.environ:\n    import vllm\n",
    "facade.py": "def __getattr__(name):\n    import vllm\n    return getattr(vllm, name)\n",
}


@pytest.mark.parametrize("way", WAYS)
def test_it_imports_without_the_guard(sandbox: Sandbox, way: str) -> None:
    """Control: each way really loads the fake engine, or the next test would prove nothing."""
    sandbox.write(HELPERS)
    code = f"def go():\n    {WAYS[way]}\ngo()\nanswer(sorted({{'vllm', 'flashinfer'}} & set(sys.modules)))"
    if way == "thread":
        code = "import vllm\nanswer(['vllm'])"  # the scenario raises on purpose
    assert sandbox.run(code).answer


@pytest.mark.parametrize("way", WAYS)
def test_an_import_is_refused_and_names_role_rule_importer_and_way_out(sandbox: Sandbox, way: str) -> None:
    """F17: whichever way it comes, the error and the ledger say who asked."""
    sandbox.write(HELPERS)
    code = f"""
from nemo_rl_core import guard
guard.arm("train")
def go():
    {WAYS[way]}
error = None
try:
    go()
except ImportError as caught:
    error = caught
    while error.__cause__:  # runpy wraps it
        error = error.__cause__
found = guard.ledger().as_dicts()
answer(dict(message=str(error), forbidden=isinstance(error, guard.ForbiddenImportError), ledger=found,
            loaded=sorted({{"vllm", "flashinfer"}} & set(sys.modules)), env=os.environ.get("ENGINE_LOADED")))
"""
    got = sandbox.run(code).answer
    assert got["forbidden"]
    assert got["loaded"] == []
    assert got["env"] is None
    (violation,) = got["ledger"]["violations"]
    root = "flashinfer" if "flashinfer" in WAYS[way] else "vllm"
    assert violation["module"].partition(".")[0] == root
    importer = next((name for name in HELPERS if name.removesuffix(".py") in WAYS[way]), "script.py")
    assert violation["file"].endswith(importer)
    assert violation["chain"][-1] == violation["module"]
    assert got["ledger"]["attempts"] == []
    for part in ("a train process must not import", root, f"{violation['file']}:{violation['line']}", "Way out"):
        assert part in got["message"]


def test_the_chain_shows_three_levels_of_modules(sandbox: Sandbox) -> None:
    """F17: an import planted three levels deep shows each hop with its line."""
    sandbox.write({"a.py": "\nimport b\n", "b.py": "import c\n", "c.py": "\n\nimport vllm\n"})
    code = """
from nemo_rl_core import guard
guard.arm("driver")
try:
    import a
except guard.ForbiddenImportError as error:
    answer(error.chain)
"""
    chain = sandbox.run(code).answer
    assert [hop.partition(" ")[0] for hop in chain] == ["__main__", "a", "b", "c", "vllm"]
    assert [hop.rpartition(":")[2] for hop in chain[1:4]] == ["2)", "1)", "3)"]


def test_python_dash_m_is_refused(sandbox: Sandbox) -> None:
    code = 'import runpy\nfrom nemo_rl_core import guard\nguard.arm("train")\nrunpy._run_module_as_main("vllm")\n'
    outcome = sandbox.run(code)
    assert outcome.returncode != 0
    assert "engine ran" not in outcome.stdout
    assert "ForbiddenImportError" in outcome.stderr


def test_every_role_but_generation_is_refused(sandbox: Sandbox) -> None:
    code = """
from nemo_rl_core import guard
got = {}
for role in guard.ROLES:
    with guard.armed(role):
        try:
            import flashinfer
            got[role] = "loaded"
            del sys.modules["flashinfer"]
        except guard.ForbiddenImportError as error:
            got[role] = error.role
answer(got)
"""
    expected = {"driver": "driver", "train": "train", "rollout": "rollout", "generation": "loaded"}
    assert sandbox.run(code).answer == expected


def test_a_swallowed_violation_stays_in_the_ledger(sandbox: Sandbox) -> None:
    code = """
from nemo_rl_core import guard
guard.arm("train")
for _ in range(3):
    try:
        import vllm
    except ImportError:
        pass
answer([(entry.kind, entry.line > 0, entry.count) for entry in guard.ledger().violations])
"""
    assert sandbox.run(code).answer == [["import", True, 3]]


def test_exit_ends_the_process_even_in_a_thread_and_inside_except(sandbox: Sandbox) -> None:
    code = """
import threading
from nemo_rl_core import guard
guard.arm("train", on_violation="exit")
def work():
    try:
        import vllm
    except BaseException:
        pass
thread = threading.Thread(target=work)
print("before")
thread.start()
thread.join(30)
print("after")
"""
    outcome = sandbox.run(code)
    assert outcome.returncode == 78
    assert outcome.stdout == "before\n"
    assert "must not import 'vllm'" in outcome.stderr
    assert "script.py" in outcome.stderr


def test_record_prints_and_refuses(sandbox: Sandbox) -> None:
    code = """
from nemo_rl_core import guard
guard.arm("train", on_violation="record")
try:
    import vllm
except ImportError:
    answer("refused")
"""
    outcome = sandbox.run(code)
    assert outcome.answer == "refused"
    assert "must not import 'vllm'" in outcome.stderr


def test_the_first_party_is_a_violation_even_in_site_packages(sandbox: Sandbox) -> None:
    """Our own adapter imported in a train process is a violation wherever it is installed."""
    sandbox.write({"nemo_rl_vllm/__init__.py": "", "nemo_rl_vllm/worker.py": "import vllm\n"}, under=sandbox.site)
    code = """
sys.path.insert(0, os.environ["SITE"])
from nemo_rl_core import guard
guard.arm("train")
try:
    import nemo_rl_vllm.worker
except ImportError:
    pass
answer([entry.importer for entry in guard.ledger().violations])
"""
    assert sandbox.run(code, env={"SITE": str(sandbox.site)}).answer == ["nemo_rl_vllm.worker"]


def test_reload_of_a_module_that_came_round_the_finders_is_refused(sandbox: Sandbox) -> None:
    code = """
import importlib, importlib.util
from nemo_rl_core import guard
guard.arm("train")
path = os.path.join(os.environ["ENGINE"], "flashinfer.py")
spec = importlib.util.spec_from_file_location("flashinfer", path)
module = importlib.util.module_from_spec(spec)
sys.modules["flashinfer"] = module
spec.loader.exec_module(module)
try:
    importlib.reload(module)
except guard.ForbiddenImportError as error:
    answer(error.module)
"""
    assert sandbox.run(code, env={"ENGINE": str(sandbox.root / "engine")}).answer == "flashinfer"


def test_a_module_below_an_engine_that_came_round_the_finders_is_refused(sandbox: Sandbox) -> None:
    """The import system asks for the parent first, and finds it cached: the name below it is what is judged."""
    code = """
import importlib, importlib.util
from nemo_rl_core import guard
guard.arm("train")
path = os.path.join(os.environ["ENGINE"], "vllm", "__init__.py")
spec = importlib.util.spec_from_file_location("vllm", path)
sys.modules["vllm"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["vllm"])
try:
    importlib.import_module("vllm.config")
except guard.ForbiddenImportError as error:
    answer(error.module)
"""
    assert sandbox.run(code, env={"ENGINE": str(sandbox.root / "engine")}).answer == "vllm.config"


def test_the_error_survives_a_pickle_round_trip_without_the_engine(sandbox: Sandbox) -> None:
    code = """
import pickle
from nemo_rl_core import guard
guard.arm("train")
try:
    import vllm
except guard.ForbiddenImportError as error:
    again = pickle.loads(pickle.dumps(error))
    same = [getattr(again, name) == getattr(error, name) for name in ("role", "module", "importer", "chain", "name")]
    answer([type(again) is type(error), str(again) == str(error), error.module, *same])
"""
    assert sandbox.run(code).answer == [True, True, "vllm", True, True, True, True, True]
