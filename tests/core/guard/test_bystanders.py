# SPDX-License-Identifier: Apache-2.0
"""Probes get an honest "no", libraries with a fallback go on, and what is not forbidden is not touched."""

import pytest

from tests.core.guard.conftest import Sandbox

ARM = 'from nemo_rl_core import guard\nguard.arm("train")\n'


@pytest.mark.parametrize(
    "probe",
    [
        "importlib.util.find_spec('vllm') is None",
        "early_find_spec('vllm') is None",
        "importlib.util.find_spec('flashinfer') is None",
        "not hasattr(pkgutil, 'find_loader') or pkgutil.find_loader('vllm') is None",
        "not hasattr(pkgutil, 'get_loader') or pkgutil.get_loader('vllm') is None",
        "next(filter(None, (finder.find_spec('vllm', None) for finder in sys.meta_path)), None) is None",
    ],
)
def test_a_probe_gets_none_and_is_no_violation(sandbox: Sandbox, probe: str) -> None:
    """F19: absence is told by None, also to code that took find_spec before the guard was armed."""
    code = f"""
import importlib.util, pkgutil, warnings
from importlib.util import find_spec as early_find_spec
warnings.simplefilter("ignore")
unguarded = {probe}
{ARM}
guarded = {probe}
answer([unguarded, guarded, len(guard.ledger().violations), len(guard.ledger().attempts)])
"""
    unguarded, guarded, *entries = sandbox.run(code).answer
    if "hasattr" not in probe:
        assert not unguarded
    assert guarded
    assert entries == [0, 0]


def test_a_probe_of_a_submodule_behaves_as_if_the_engine_were_absent(sandbox: Sandbox) -> None:
    code = f"""
import importlib.util
{ARM}
def ask(name):
    try:
        return str(importlib.util.find_spec(name))
    except ModuleNotFoundError as error:
        return [type(error).__name__, error.name]
answer([ask("vllm.config"), ask("no_such_package.config"), len(guard.ledger().violations)])
"""
    forbidden, absent, violations = sandbox.run(code).answer
    assert forbidden == ["ModuleNotFoundError", "vllm"]
    assert absent == ["ModuleNotFoundError", "no_such_package"]
    assert violations == 0


def test_no_truthy_fake_is_left_behind(sandbox: Sandbox) -> None:
    """F19: nothing named like the engine stands in sys.modules after a refusal and a probe."""
    code = f"""
import importlib.util
{ARM}
for name in ("vllm", "vllm.config"):
    try:
        __import__(name)
    except ImportError:
        pass
importlib.util.find_spec("vllm")
answer([name for name in sys.modules if name.partition(".")[0] in ("vllm", "flashinfer")])
"""
    assert sandbox.run(code).answer == []


def test_a_librarys_handled_attempt_is_refused_recorded_printed_and_stops_nothing(sandbox: Sandbox) -> None:
    """A healthy run with the engine installed beside core passes, under the strictest setting."""
    code = """
from nemo_rl_core import guard
guard.arm("train", on_violation="exit")
import honest, narrow, prober
import importlib
importlib.reload(honest)
found = guard.ledger()
answer([honest.vllm, narrow.LLM, prober.HAS, len(found.violations),
        {package: [attempt.count, attempt.line] for package, attempt in found.attempts.items()}])
"""
    outcome = sandbox.run(code)
    assert outcome.answer == [None, None, False, 0, {"honest": [2, 2], "narrow": [1, 2]}]
    assert outcome.stderr.count("honest asked for vllm") == 1
    assert outcome.stderr.count("narrow asked for vllm") == 1


def test_code_that_a_library_makes_with_exec_is_the_librarys(sandbox: Sandbox) -> None:
    sandbox.write({"maker.py": 'try:\n    exec("import vllm")\nexcept ImportError:\n    pass\n'}, under=sandbox.site)
    code = """
from nemo_rl_core import guard
guard.arm("train", on_violation="exit")
import maker
try:
    exec("import vllm")
except guard.ForbiddenImportError:
    pass
"""
    outcome = sandbox.run(code)
    assert "maker asked for vllm" in outcome.stderr
    assert outcome.returncode == 78, "the same by the user's own code is a violation"


def test_a_library_without_a_fallback_fails_with_our_message(sandbox: Sandbox) -> None:
    code = f"""
{ARM}
try:
    import careless
except guard.ForbiddenImportError as error:
    answer([error.importer, list(guard.ledger().attempts)])
"""
    importer, attempts = sandbox.run(code).answer
    assert importer.endswith("careless.py:1 (careless)")
    assert attempts == ["careless"]


def test_other_packages_import_as_ever(sandbox: Sandbox) -> None:
    code = f"""
{ARM}
import importlib.util, innocent, json.tool, xml.dom.minidom
import importlib.metadata
missing = False
try:
    import no_such_package
except ModuleNotFoundError as error:
    missing = not isinstance(error, guard.ForbiddenImportError)
answer([innocent.VALUE, importlib.util.find_spec("honest") is not None, missing,
        len(list(importlib.metadata.distributions())) > 0])
"""
    assert sandbox.run(code).answer == [1, True, True, True]


def test_a_finder_called_by_hand_does_not_end_the_next_question(sandbox: Sandbox) -> None:
    """The guard's "no" to a direct call must not leak into the next import of the same thread."""
    code = f"""
{ARM}
sys.meta_path[0].find_spec("vllm")
import innocent
answer(innocent.VALUE)
"""
    assert sandbox.run(code).answer == 1


def test_many_threads_probe_and_import_at_once(sandbox: Sandbox) -> None:
    """One thread's "no" never ends another thread's question."""
    sandbox.write({f"mod{index}.py": f"VALUE = {index}\n" for index in range(40)})
    code = f"""
import importlib, importlib.util, threading
{ARM}
sys.setswitchinterval(1e-5)
values, probes, refused = [], [], []
def load(start):
    for index in range(start, 40, 4):
        values.append(importlib.import_module(f"mod{{index}}").VALUE)
def ask():
    for _ in range(100):
        probes.append(importlib.util.find_spec("vllm"))
        try:
            import vllm
        except ImportError:
            refused.append(1)
threads = [threading.Thread(target=load, args=(start,)) for start in range(4)]
threads += [threading.Thread(target=ask) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join(50)
answer([sorted(values) == list(range(40)), set(probes) == {{None}}, len(refused),
        [entry.count for entry in guard.ledger().violations]])
"""
    assert sandbox.run(code).answer == [True, True, 400, [400]]


def test_the_import_of_core_itself_marks_no_device(sandbox: Sandbox) -> None:
    """F22: with an engine that marks the process when imported, importing core and forking leaves no mark."""
    code = f"""
import nemo_rl_core.errors, nemo_rl_core.protocols.generation
{ARM}
pid = os.fork()
if pid == 0:
    os._exit(3 if "ENGINE_LOADED" in os.environ else 0)
answer(["ENGINE_LOADED" in os.environ, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])])
"""
    assert sandbox.run(code).answer == [False, 0]


def test_the_metadata_of_an_engine_that_is_installed_is_told_as_it_is(sandbox: Sandbox) -> None:
    """F19: what is installed is a question of its own; only what can be imported is answered by the guard."""
    sandbox.write(
        {
            "vllm-9.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\nRequires-Dist: torch\n",
            "vllm-9.9.dist-info/RECORD": "vllm/__init__.py,,\n",
            "vllm-9.9.dist-info/entry_points.txt": "[engines]\nvllm = vllm:LLM\n",
        },
        under=sandbox.root / "engine",
    )
    code = f"""
import importlib.metadata, importlib.util, importlib_metadata
{ARM}
told = []
for metadata in (importlib.metadata, importlib_metadata):
    (entry,) = metadata.entry_points(group="engines")
    told.append([metadata.version("vllm"), metadata.requires("vllm"), metadata.packages_distributions()["vllm"],
                 entry.value, entry.dist.name])
answer([told[0] == told[1], told[0], importlib.util.find_spec("vllm"), len(guard.ledger().violations)])
"""
    told = ["9.9", ["torch"], ["vllm"], "vllm:LLM", "vllm"]
    assert sandbox.run(code).answer == [True, told, None, 0]


def test_the_guards_answer_ends_one_question_and_no_other(sandbox: Sandbox) -> None:
    """A finder that asks about the engine while it is asked about something else gets both answers right."""
    code = f"""
import importlib.util
class Curious:
    def find_spec(self, name, path=None, target=None):
        if name == "innocent":
            found.append(importlib.util.find_spec("vllm"))
            found.extend(finder.find_spec("vllm") for finder in list(sys.meta_path) if isinstance(finder, guard_type))
found = []
{ARM}
guard_type = type(sys.meta_path[0])
sys.meta_path.insert(0, Curious())
import innocent
answer([innocent.VALUE, found])
"""
    assert sandbox.run(code).answer == [1, [None, None]]
