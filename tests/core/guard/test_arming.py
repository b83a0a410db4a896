# SPDX-License-Identifier: Apache-2.0
"""Arming, re-arming, disarming: first on the path, honest about what is loaded already, and undone without a trace."""

import pytest

from nemo_rl_core import guard
from tests.core.guard.conftest import Sandbox

ARM = 'from nemo_rl_core import guard\nguard.arm("train")\n'
TRY = """
def refused():
    try:
        import vllm
    except ImportError:
        return True
    del sys.modules["vllm"]
    return False
"""


def test_a_finder_that_is_inserted_before_it_later_does_not_win(sandbox: Sandbox) -> None:
    """F14: whoever inserts at index 0 after arming is asked after the guard."""
    code = f"""
from importlib.machinery import PathFinder
{ARM}{TRY}
sys.meta_path.insert(0, PathFinder)
answer([refused(), guard.is_armed()])
"""
    assert sandbox.run(code).answer == [True, True]


@pytest.mark.parametrize(
    ("replacement", "holds"),
    [("list(sys.meta_path)", True), ("sys.meta_path + []", True), ("[PathFinder] + sys.meta_path", False)],
)
def test_a_replaced_path_is_noticed_and_arming_again_repairs_it(
    sandbox: Sandbox, replacement: str, holds: bool
) -> None:
    """F14: a copy still refuses; a list with another finder in front is reported and repaired."""
    code = f"""
from importlib.machinery import PathFinder
{ARM}{TRY}
sys.meta_path = {replacement}
before = [guard.is_armed(), refused()]
guard.arm("train")
answer([before, [guard.is_armed(), refused()]])
"""
    before, after = sandbox.run(code).answer
    assert before[1] is holds
    assert before[0] is holds
    assert after == [True, True]


def test_a_probe_through_a_copied_path_says_absent_by_exception(sandbox: Sandbox) -> None:
    """F19: where None would not be heard, the answer is the exception that means the same, never a found spec."""
    code = f"""
import importlib.util
{ARM}
sys.meta_path = list(sys.meta_path)
try:
    answer(importlib.util.find_spec("vllm") is not None)
except ModuleNotFoundError:
    answer("absent")
"""
    assert sandbox.run(code).answer == "absent"


def test_arming_fails_where_something_answers_imports_before_the_import_system(sandbox: Sandbox) -> None:
    """F14: the self-test sees that the guard would have no effect."""
    code = """
import builtins, types
real = builtins.__import__
def fake(name, *rest):
    if name.startswith("_nemo_rl_guard"):
        raise ImportError(name)
    return real(name, *rest)
builtins.__import__ = fake
from nemo_rl_core import guard
try:
    guard.arm("train")
except RuntimeError as error:
    answer(str(error))
"""
    assert "not asked first" in sandbox.run(code).answer


def test_raise_refuses_to_arm_over_a_loaded_engine_and_names_the_holder(sandbox: Sandbox) -> None:
    """F15: a finder never sees cached modules, so arming reports them at once, with who holds them."""
    sandbox.write({"holder.py": "from vllm import LLM\n"})
    code = """
import holder
from nemo_rl_core import guard
try:
    guard.arm("train")
except guard.ForbiddenImportError as error:
    (entry,) = guard.ledger().violations
    answer([str(error), guard.is_armed(), entry.kind, entry.importer])
"""
    message, is_armed, kind, importer = sandbox.run(code).answer
    assert "loaded before the guard was armed: vllm (held by holder)" in message
    assert (is_armed, kind, importer) == (False, "preloaded", "holder")


def test_record_hides_a_loaded_engine_and_disarm_brings_it_back(sandbox: Sandbox) -> None:
    """F15, F16: later statements on the cached package and on its submodules fail; probes say None."""
    code = """
import importlib.util, vllm, vllm.config
from nemo_rl_core import guard
guard.arm("train", on_violation="record")
def fails(statement):
    try:
        exec(statement)
    except ModuleNotFoundError:
        return True
    return False
statements = ["import vllm", "import vllm.config", "from vllm import LLM", "from vllm.config import VALUE"]
guarded = [fails(statement) for statement in statements]
probe = importlib.util.find_spec("vllm")
kinds = [entry.kind for entry in guard.ledger().violations]
guard.disarm()
answer([guarded, probe, kinds, [fails(statement) for statement in statements], sys.modules["vllm"] is vllm])
"""
    outcome = sandbox.run(code)
    assert outcome.answer == [[True] * 4, None, ["preloaded"], [False] * 4, True]
    assert "loaded before the guard was armed" in outcome.stderr


def test_exit_ends_a_process_that_has_the_engine_loaded(sandbox: Sandbox) -> None:
    """F15: under exit, a preloaded engine ends the process."""
    outcome = sandbox.run('import vllm\nfrom nemo_rl_core import guard\nguard.arm("train", on_violation="exit")')
    assert outcome.returncode == 78
    assert "loaded before the guard was armed" in outcome.stderr


def test_an_entry_that_somebody_blocked_by_none_is_no_loaded_engine(sandbox: Sandbox) -> None:
    """F16: None in sys.modules is the absence that we want, not a violation."""
    assert sandbox.run(f'sys.modules["vllm"] = None\n{ARM}answer(guard.is_armed())').answer is True


def test_disarming_puts_the_same_list_back(sandbox: Sandbox) -> None:
    code = f"""
before, items = sys.meta_path, list(sys.meta_path)
{ARM}{TRY}
guarded = refused()
guard.disarm()
guard.disarm()
answer([guarded, sys.meta_path is before, sys.meta_path == items, refused(), guard.is_armed()])
"""
    assert sandbox.run(code).answer == [True, True, True, False, False]


def test_disarming_leaves_a_list_that_somebody_else_put_there(sandbox: Sandbox) -> None:
    code = f"""
{ARM}{TRY}
sys.meta_path = mine = list(sys.meta_path)
guard.disarm()
answer([sys.meta_path is mine, refused()])
"""
    assert sandbox.run(code).answer == [True, False]


def test_a_block_restores_what_was_there_before(sandbox: Sandbox) -> None:
    code = f"""
from nemo_rl_core import guard
{TRY}
with guard.armed("train") as read:
    inside = refused()
outside = refused()
guard.arm("driver")
refused()
with guard.armed("generation"):
    lifted = refused()
answer([inside, len(read().violations), outside, lifted, guard.current_policy().role, refused(),
        [entry.role for entry in guard.ledger().violations]])
"""
    assert sandbox.run(code).answer == [True, 1, False, False, "driver", True, ["driver"]]


def test_arming_twice_is_fine_and_another_role_is_a_mistake(sandbox: Sandbox) -> None:
    """F57: idempotent, and one guard in the list."""
    code = f"""
{ARM}
guard.arm("train")
guard.arm("train", on_violation="record")
count = sum(type(finder).__name__ == "GuardFinder" for finder in sys.meta_path)
try:
    guard.arm("generation")
except RuntimeError as error:
    answer([count, guard.current_policy().on_violation, str(error)])
"""
    count, on_violation, message = sandbox.run(code).answer
    assert (count, on_violation) == (1, "record")
    assert "armed as 'train'" in message


def test_a_call_overrides_what_the_environment_armed_and_not_the_other_way_round(sandbox: Sandbox) -> None:
    code = """
from nemo_rl_core import guard
guard.arm_from_environment({"NEMO_RL_ROLE": "driver"})
guard.arm("train", on_violation="exit")
armed = guard.arm_from_environment({"NEMO_RL_ROLE": "driver"})
answer([armed, guard.current_policy().role, guard.current_policy().on_violation])
"""
    assert sandbox.run(code).answer == [True, "train", "exit"]


@pytest.mark.parametrize(
    ("settings", "outcome"),
    [
        ({}, [False, False]),
        ({"lifted": ("vllm",)}, [True, True]),
        ({"allow": ("flashinfer",)}, [False, True]),
        ({"forbid": ("innocent",)}, [False, False]),
    ],
)
def test_lifting_takes_the_engine_with_what_it_brings_and_allowing_one_name(
    sandbox: Sandbox, settings: dict[str, tuple[str, ...]], outcome: list[bool]
) -> None:
    code = f"""
from nemo_rl_core import guard
def loads(name):
    try:
        __import__(name)
    except guard.ForbiddenImportError:
        return False
    return True
guard.arm("train", **{settings!r})
answer([loads("vllm"), loads("flashinfer"), loads("innocent")])
"""
    assert sandbox.run(code).answer == [*outcome, "forbid" not in settings]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"role": "trainer"}, "a role is one of driver, train, rollout, generation; got 'trainer'"),
        ({"role": "train", "on_violation": "warn"}, "got 'warn'"),
        ({"role": "train", "lifted": ("vlllm",)}, "got 'vlllm'"),
        ({"role": "train", "allow": ("vlllm",)}, "got 'vlllm'"),
        ({"role": "train", "forbid": ("a.b",)}, "got 'a.b'"),
    ],
)
def test_a_value_that_the_table_does_not_know_is_an_error(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        guard.arm(**settings)
    assert guard.current_policy() is None


def test_a_block_that_may_load_the_engine_leaves_an_armed_process_armed_and_the_engine_hidden(sandbox: Sandbox) -> None:
    code = f"""
{ARM}{TRY}
with guard.armed("generation"):
    import vllm
answer([guard.is_armed(), guard.current_policy().role, refused(), [v.kind for v in guard.ledger().violations]])
"""
    armed, role, refused, kinds = sandbox.run(code).answer
    assert (armed, role, refused) == (True, "train", True)
    assert "preloaded" in kinds


def test_neither_a_block_nor_a_change_of_role_forgets_what_was_seen_before(sandbox: Sandbox) -> None:
    code = f"""
{ARM}{TRY}
refused()
guard.disarm()
with guard.armed("rollout"):
    pass
after_block = len(guard.ledger().violations)
guard.arm("driver")
answer([after_block, [v.role for v in guard.ledger().violations]])
"""
    assert sandbox.run(code).answer == [1, ["train"]]


def test_the_policy_in_force_goes_to_children_with_its_further_names(sandbox: Sandbox) -> None:
    """F22: also to one of another role; without a policy there is nothing to hand on."""
    code = """
from nemo_rl_core import guard
try:
    guard.environment_for_children()
except RuntimeError as caught:
    error = str(caught)
guard.arm("train", forbid=["innocent"], on_violation="record", allow=["flashinfer"], allow_importers=["my.bridge"])
same = guard.policy.policy_from_environment(guard.environment_for_children()) == guard.current_policy()
other = guard.policy.policy_from_environment(guard.environment_for_children("rollout"))
answer([error, same, other.role, other.forbid, other.on_violation, other.allow, other.allow_importers])
"""
    error, *rest = sandbox.run(code).answer
    assert "call arm(role) first" in error
    assert rest == [True, "rollout", ["innocent"], "record", ["flashinfer"], ["my.bridge"]]
