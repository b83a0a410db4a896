# SPDX-License-Identifier: Apache-2.0
"""Blocks that forbid packages whatever the role: layers that add up, end in any order and leave nothing behind."""

import pytest

from nemo_rl_core import guard
from tests.core.guard.conftest import Sandbox

HEAD = """
import contextlib, importlib.util
from nemo_rl_core import guard
def refused(name):
    try:
        __import__(name)
    except guard.ForbiddenImportError:
        return True
    sys.modules.pop(name)
    return False
def state():
    return [refused("flashinfer"), refused("innocent")]
"""


def test_a_block_refuses_and_says_who_forbids_it(sandbox: Sandbox) -> None:
    code = f"""{HEAD}
before, items = sys.meta_path, list(sys.meta_path)
with guard.forbidding("innocent", because="the export", way_out="use the other one") as read:
    try:
        import innocent
    except guard.ForbiddenImportError as error:
        message = str(error)
    probe = importlib.util.find_spec("innocent")
(violation,) = read().violations
answer([message, probe, violation.module, violation.role, sys.meta_path is before, sys.meta_path == items, state(),
        len(guard.ledger().violations)])
"""
    message, probe, module, role, *rest = sandbox.run(code).answer
    assert message.startswith("import of 'innocent' is refused: the export must not import 'innocent'. Asked by ")
    assert message.endswith("Way out: use the other one")
    assert (probe, module, role) == (None, "innocent", "block")
    assert rest == [True, True, [False, False], 0]


def test_what_is_loaded_is_hidden_and_comes_back_as_the_same_objects(sandbox: Sandbox) -> None:
    """F15, F16: with what is below it; a stub that the block put there goes with the block."""
    code = f"""{HEAD}
import vllm, vllm.config
names = ("vllm", "vllm.config")
before = [sys.modules[name] for name in names]
with guard.forbidding("vllm"):
    inside = [[name in sys.modules, refused(name)] for name in names]
    probe = importlib.util.find_spec("vllm")
    held = vllm.config.VALUE
    sys.modules["vllm"] = object()
answer([inside, probe, held, [sys.modules[name] for name in names] == before])
"""
    assert sandbox.run(code).answer == [[[False, True]] * 2, None, 1, True]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_blocks_add_up_and_may_end_in_any_order(sandbox: Sandbox, order: tuple[int, int]) -> None:
    code = f"""{HEAD}
before = sys.meta_path
blocks = [guard.forbidding("flashinfer"), guard.forbidding("innocent")]
for block in blocks:
    block.__enter__()
seen = [state(), [importlib.util.find_spec(name) for name in ("flashinfer", "innocent")]]
for index in {order!r}:
    blocks[index].__exit__(None, None, None)
    seen.append(state())
answer([seen, sys.meta_path is before])
"""
    between = [False, True] if order == (0, 1) else [True, False]
    assert sandbox.run(code).answer == [[[True, True], [None, None], between, [False, False]], True]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_a_loaded_package_stays_hidden_until_the_last_block_that_forbids_it_ends(
    sandbox: Sandbox, order: tuple[int, int, int]
) -> None:
    """F15: three blocks that overlap; another package that only one of them forbids is back when that one ends."""
    code = f"""{HEAD}
import vllm, vllm.config, innocent
before = dict(sys.modules)
blocks = [guard.forbidding("vllm", "innocent"), guard.forbidding("vllm"), guard.forbidding("vllm")]
reads = [block.__enter__() for block in blocks]
seen = []
for index in {order!r}:
    blocks[index].__exit__(None, None, None)
    try:
        import vllm.config
        seen.append(True)
    except guard.ForbiddenImportError:
        seen.append("vllm" in sys.modules)
same = all(sys.modules[name] is before[name] for name in ("vllm", "vllm.config", "innocent"))
answer([seen, same, sum(each.count for read in reads for each in read().violations)])
"""
    # Each of the two refusals is on record once, with whichever layer was asked first.
    assert sandbox.run(code).answer == [[False, False, True], True, 2]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_stub_of_a_block_is_gone_after_the_last_block(
    sandbox: Sandbox, order: tuple[int, int], is_loaded: bool
) -> None:
    """F19: also where the package was not loaded before, and where a second block came after the stub."""
    code = f"""{HEAD}
if {is_loaded}:
    import innocent
before = sys.modules.get("innocent")
blocks = [guard.forbidding("innocent"), guard.forbidding("innocent")]
blocks[0].__enter__()
sys.modules["innocent"] = sys.modules["innocent.part"] = object()
blocks[1].__enter__()
hidden = "innocent" not in sys.modules
for index in {order!r}:
    blocks[index].__exit__(None, None, None)
answer([hidden, sys.modules.get("innocent") is before, "innocent.part" in sys.modules, refused("innocent")])
"""
    assert sandbox.run(code).answer == [True, True, False, False]


def test_a_process_that_is_armed_or_disarmed_within_a_block_brings_nothing_back(sandbox: Sandbox) -> None:
    """F15: a block that ends does not load the engine in a process that was armed meanwhile, nor does `disarm`."""
    code = f"""{HEAD}
import vllm
before, seen = vllm, []
def gone():
    return sys.modules.get("vllm") is None and importlib.util.find_spec("flashinfer") is None
with guard.forbidding("vllm", "flashinfer"):
    guard.arm("train")
seen.append([gone(), guard.is_armed()])
guard.disarm()
seen.append(sys.modules["vllm"] is before)
guard.arm("train", on_violation="record")
with guard.forbidding("vllm", "flashinfer"):
    guard.disarm()
    seen.append([gone(), refused("vllm")])
seen.append(sys.modules["vllm"] is before)
answer(seen)
"""
    assert sandbox.run(code).answer == [[True, True], True, [True, True], True]


def test_what_an_allowed_importer_has_loaded_is_back_after_a_block(sandbox: Sandbox) -> None:
    """Also where the process was armed anew within the block."""
    sandbox.write({"bridge.py": "import vllm\n"})
    code = f"""{HEAD}
guard.arm("train", allow_importers=["bridge"])
import bridge
before = sys.modules["vllm"]
with guard.forbidding("vllm"):
    inside = "vllm" in sys.modules
    with guard.armed("generation"):
        pass
answer([inside, sys.modules.get("vllm") is before])
"""
    assert sandbox.run(code).answer == [False, True]


def test_a_forked_child_inherits_the_block_with_a_ledger_of_its_own_and_a_new_interpreter_does_not(
    sandbox: Sandbox,
) -> None:
    """F22: as the page on it says."""
    code = f"""{HEAD}
import subprocess
with guard.forbidding("innocent") as read:
    started = subprocess.run([sys.executable, "-c", "import innocent"], timeout=60).returncode
    child = os.fork()
    if not child:
        os._exit(10 * refused("innocent") + len(read().violations))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
answer([started, status, len(read().violations)])
"""
    assert sandbox.run(code).answer == [0, 11, 0]


def test_a_block_and_the_rule_of_the_process_stand_side_by_side(sandbox: Sandbox) -> None:
    """Whichever came first; each has its ledger, and arming or disarming inside the block leaves the block alone."""
    code = f"""{HEAD}
seen = []
guard.arm("train")
with guard.forbidding("innocent") as read:
    seen.append([state(), guard.is_armed(), guard.current_policy().role])
    with guard.armed("generation"):
        seen.append([state(), guard.is_armed()])
    guard.disarm()
    seen.append([state(), guard.is_armed()])
    guard.arm("driver")
    seen.append([state(), guard.is_armed()])
seen.append([state(), guard.is_armed()])
ledgers = [sorted({{v.module for v in ledger.violations}}) for ledger in (read(), guard.ledger())]
guard.disarm()
answer([seen, ledgers, state()])
"""
    seen, ledgers, after = sandbox.run(code).answer
    assert seen == [
        [[True, True], True, "train"],
        [[False, True], True],
        [[False, True], False],
        [[True, True], True],
        [[True, False], True],
    ]
    assert ledgers == [["innocent"], ["flashinfer"]]
    assert after == [False, False]


def test_a_copy_of_the_path_that_outlives_a_block_refuses_nothing(sandbox: Sandbox) -> None:
    code = f"""{HEAD}
with guard.forbidding("innocent"):
    copy = list(sys.meta_path)
    during = state()
sys.meta_path = copy
after = state()
with guard.forbidding("flashinfer"):
    again = state()
answer([during, after, again, sys.meta_path is copy])
"""
    assert sandbox.run(code).answer == [[False, True], [False, False], [True, False], True]


def test_the_block_ends_also_when_it_raises(sandbox: Sandbox) -> None:
    code = f"""{HEAD}
with contextlib.suppress(ZeroDivisionError), guard.forbidding("innocent"):
    1 / 0
answer(state())
"""
    assert sandbox.run(code).answer == [False, False]


def test_a_librarys_attempt_is_on_record_and_not_printed(sandbox: Sandbox) -> None:
    code = f"""{HEAD}
with guard.forbidding("vllm") as read:
    import honest
answer([honest.vllm, len(read().violations), list(read().attempts)])
"""
    outcome = sandbox.run(code)
    assert outcome.answer == [None, 0, ["honest"]]
    assert outcome.stderr == ""


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), "name at least one package"),
        (("a.b",), "got 'a.b': forbid 'a'"),
        (("a-b",), "got 'a-b'"),
        (("",), "got ''"),
        (("sys",), "'sys' can't be forbidden"),
        (("importlib",), "'importlib' can't be forbidden"),
        (("nemo_rl_core",), "'nemo_rl_core' can't be forbidden"),
    ],
)
def test_a_name_that_can_not_be_forbidden_is_an_error(names: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match="forbid") as caught, guard.forbidding(*names):
        pass
    assert words in str(caught.value)
