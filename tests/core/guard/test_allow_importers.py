# SPDX-License-Identifier: Apache-2.0
"""The allow-list of importers: the one module that may, the engine that it loads, and nobody else."""

import pytest

from nemo_rl_core import guard
from nemo_rl_core.guard.policy import policy_from_environment
from tests.core.config.test_load import problems_of, small
from tests.core.guard.conftest import Sandbox

ARM = 'from nemo_rl_core import guard\nguard.arm("train", allow_importers=["mylib.bridge"])\n'

#: An engine as they are: it imports its own parts, what only it brings, and a library that does so for it.
REAL_ENGINE = {
    "vllm/__init__.py": "from vllm import config\nimport flashinfer\nimport helperlib\n",
    "vllm/config.py": "VALUE = 1\n",
    "vllm/late.py": "VALUE = 2\n",
    "vllm/entry.py": "def go():\n    import vllm.late, xgrammar\n    return vllm.late.VALUE\n",
    "xgrammar.py": "VALUE = 3\n",
}
LIBRARIES = {"helperlib.py": "import llguidance\n", "llguidance.py": "VALUE = 4\n", "curious.py": "import xgrammar\n"}
MYLIB = {
    "mylib/__init__.py": "",
    "mylib/bridge/__init__.py": "import importlib.util\nFOUND = importlib.util.find_spec('vllm') is not None\n"
    "def load():\n    import vllm\n    return vllm\n",
    "mylib/bridge/below.py": "from vllm import config\n",
    "mylib/bridges.py": "import vllm\n",
    "mylib/curious_bridge.py": "",
}
TRY = """
def refused(statement, where=None):
    try:
        exec(statement, {"__name__": where or __name__})
    except guard.ForbiddenImportError as error:
        return error.module
    return None
"""


@pytest.fixture
def box(sandbox: Sandbox) -> Sandbox:
    sandbox.write(REAL_ENGINE, under=sandbox.root / "engine")
    sandbox.write(LIBRARIES, under=sandbox.site)
    sandbox.write(MYLIB)
    return sandbox


def test_the_listed_module_loads_the_engine_with_all_that_the_engine_imports_for_itself(box: Sandbox) -> None:
    code = f"""
{ARM}{TRY}
import mylib.bridge
before = refused("import vllm")
engine = mylib.bridge.load()
entry = refused("import vllm.entry", "mylib.bridge")
late = sys.modules["vllm.entry"].go()
answer([before, mylib.bridge.FOUND, entry, late, sorted({{"flashinfer", "llguidance", "vllm", "xgrammar"}} & set(sys.modules)),
        [v.module for v in guard.ledger().violations], list(guard.ledger().attempts)])
"""
    everything = ["flashinfer", "llguidance", "vllm", "xgrammar"]
    assert box.run(code).answer == ["vllm", True, None, 2, everything, ["vllm"], []]


def test_a_name_covers_what_is_below_it_and_not_what_begins_alike(box: Sandbox) -> None:
    code = f"""
{ARM}{TRY}
answer([refused("import mylib.bridges"), refused("import mylib.bridge.below")])
"""
    assert box.run(code).answer == ["vllm", None]


def test_others_are_refused_before_and_after_and_their_probes_find_nothing(box: Sandbox) -> None:
    """What is cached is the limit, and the docs say so: a finder is never asked about it."""
    code = f"""
import importlib.util
{ARM}{TRY}
probe = importlib.util.find_spec("vllm")
import mylib.bridge
mylib.bridge.load()
answer([probe, refused("import vllm.late"), refused("import xgrammar"), refused("import vllm"), guard.is_armed()])
"""
    assert box.run(code).answer == [None, "vllm.late", "xgrammar", None, True]


def test_a_library_that_a_listed_module_happens_to_import_is_still_refused(box: Sandbox) -> None:
    """The list names who may; a library may only while the engine itself is calling it."""
    box.write(
        {
            "mylib/bridge/__init__.py": "try:\n    import curious\nexcept ImportError as error:\n    REASON = str(error)\n"
        }
    )
    code = f"{ARM}import mylib.bridge\nanswer([mylib.bridge.REASON, list(guard.ledger().attempts)])\n"
    reason, attempts = box.run(code).answer
    assert "mylib.bridge" in reason.rpartition("firewall.allow_importers")[2]
    assert attempts == ["curious"]


def test_what_a_listed_module_has_loaded_is_no_violation_when_the_settings_change_or_a_block_ends(box: Sandbox) -> None:
    code = f"""
{ARM}{TRY}
import mylib.bridge
engine = mylib.bridge.load()
guard.arm("train", on_violation="record", allow_importers=["mylib.bridge", "__main__"])
kept = sys.modules["vllm"] is engine
with guard.armed("generation"):
    pass
answer([kept, sys.modules["vllm"] is engine, refused("import vllm.late"), [v.kind for v in guard.ledger().violations]])
"""
    assert box.run(code).answer == [True, True, None, []]


def test_taking_the_list_away_makes_a_loaded_engine_a_violation(box: Sandbox) -> None:
    code = f"""
{ARM}
import mylib.bridge
mylib.bridge.load()
try:
    guard.arm("train")
except guard.ForbiddenImportError as error:
    answer(str(error))
"""
    assert "loaded before the guard was armed: " in box.run(code).answer


def test_the_list_travels_to_a_child_by_the_environment(box: Sandbox) -> None:
    variables = guard.environment_for("train", allow_importers=["mylib.bridge", "__main__"])
    assert variables["NEMO_RL_FIREWALL_ALLOW_IMPORTERS"] == "mylib.bridge,__main__"
    policy = policy_from_environment(variables)
    assert policy is not None
    assert policy.allow_importers == ("mylib.bridge", "__main__")
    code = "from nemo_rl_core import guard\nguard.arm_from_environment()\nimport vllm\nanswer(guard.is_armed())"
    assert box.run(code, env=variables).answer is True


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "full names of modules"),
        ("mylib.", "got 'mylib.'"),
        ("my-lib.bridge", "got 'my-lib.bridge'"),
        ("mylib.*", "got 'mylib.*'"),
        ("vllm", "names the module that imports, not what it imports"),
        ("xgrammar.core", "use allow or lifted"),
        ("nemo_rl_core.policy", "no module of nemo_rl_core may be an allowed importer"),
    ],
)
def test_a_name_that_can_be_no_importer_is_an_error(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"allow_importers|nemo_rl_core") as caught:
        guard.arm("train", allow_importers=[name])
    assert words in str(caught.value)
    assert guard.current_policy() is None


def test_the_config_takes_the_list_and_tells_a_wrong_name_with_its_other_problems() -> None:
    assert small("firewall.allow_importers=[mylib.bridge]").firewall.allow_importers == ("mylib.bridge",)
    told = problems_of("firewall.allow_importers=[a..b, vllm.x]", "firewall.allow=[vlllm]", "grpo.max_val_samples=0")
    for part in ("firewall.allow_importers: allow_importers takes full names", "got 'vllm.x'", "got 'vlllm'", "grpo."):
        assert part in told
