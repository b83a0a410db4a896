# SPDX-License-Identifier: Apache-2.0
"""Arming and disarming the guard of this process."""

import contextlib
import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import cast

from nemo_rl_core.guard import layers
from nemo_rl_core.guard.finder import GuardFinder, end_process, report
from nemo_rl_core.guard.policy import Policy, policy_from_environment
from nemo_rl_core.guard.records import ForbiddenImportError, Ledger, Recorder, Violation

__all__ = [
    "arm",
    "arm_from_environment",
    "armed",
    "current_policy",
    "disarm",
    "environment_for_children",
    "is_armed",
    "ledger",
]

_HOLDER_LIMIT = 5


@dataclass(frozen=True, kw_only=True)
class _Active:
    """The guard in force: how it was armed, and what has to be put back."""

    policy: Policy
    by_environment: bool
    finder: GuardFinder


# The guard of a process is one thing, like sys.meta_path itself; it can't live anywhere else.
# Arming is the first thing that a process does, so nothing here is meant to be raced from two threads.
_active: _Active | None = None
_recorder: Recorder | None = None


def arm(
    role: str,
    *,
    on_violation: str = "raise",
    allow: Iterable[str] = (),
    lifted: Iterable[str] = (),
    forbid: Iterable[str] = (),
    allow_importers: Iterable[str] = (),
) -> None:
    """Refuse forbidden imports in this process from now on.

    Calling it again with the same role is fine: it checks that the guard is still first and takes the new settings.
    A call overrides what the environment armed; two calls with different roles are a mistake.

    Args:
        role: What this process is for; one of ``ROLES``.
        on_violation: ``raise``, ``record`` or ``exit``; see ``Policy``.
        allow: Single top-level names to take out of the table.
        lifted: Engines to take out of the table with everything that only they bring.
        forbid: Further top-level names to forbid.
        allow_importers: Modules that may import the forbidden names all the same; see ``Policy``. Once one of them has
            loaded the engine, a later import of it by anybody finds it cached, where no guard is asked.

    Raises:
        ForbiddenImportError: If a forbidden module is loaded already and ``on_violation`` is ``raise``; the guard is
            then not armed.
        ValueError: If a value is unknown to the table.
        RuntimeError: If the process is armed for another role, or the self-test fails.
    """
    policy = Policy(
        role=role,
        on_violation=on_violation,
        allow=tuple(allow),
        lifted=tuple(lifted),
        forbid=tuple(forbid),
        allow_importers=tuple(allow_importers),
    )
    _arm(policy, by_environment=False)


def arm_from_environment(environ: Mapping[str, str] | None = None) -> bool:
    """Arm as the environment variables say; a guard that a call has armed stays as it is.

    Args:
        environ: The variables; None means those of this process.

    Returns:
        True if the guard is armed, False where no role is named.

    Raises:
        ForbiddenImportError: As ``arm``.
        ValueError: If a variable holds a value that the table does not know.
    """
    policy = policy_from_environment(os.environ if environ is None else environ)
    if policy is None:
        return _active is not None
    if _active is None or _active.by_environment:
        _arm(policy, by_environment=True)
    else:
        layers.prove(_active.finder)
    return True


def disarm() -> None:
    """Put the import system back as it was, hidden modules included; the ledger stays readable."""
    global _active
    if _active is None:
        return
    state, _active = _active, None
    layers.give_back(state.finder)
    layers.remove(state.finder)


@contextlib.contextmanager
def armed(
    role: str,
    *,
    on_violation: str = "raise",
    allow: Iterable[str] = (),
    lifted: Iterable[str] = (),
    forbid: Iterable[str] = (),
    allow_importers: Iterable[str] = (),
) -> Generator[Callable[[], Ledger]]:
    """Arm within a block; afterwards the guard is what it was before, armed or not.

    A forbidden module that the block was allowed to load is then a violation on record, and hidden from later imports.

    Args:
        role: As ``arm``.
        on_violation: As ``arm``.
        allow: As ``arm``.
        lifted: As ``arm``.
        forbid: As ``arm``.
        allow_importers: As ``arm``.

    Yields:
        A function that returns the ledger of this block, during it and afterwards.

    Raises:
        ForbiddenImportError: As ``arm``.
        ValueError: As ``arm``.
    """
    global _recorder
    policy = Policy(
        role=role,
        on_violation=on_violation,
        allow=tuple(allow),
        lifted=tuple(lifted),
        forbid=tuple(forbid),
        allow_importers=tuple(allow_importers),
    )
    before, recorder_before = _active, _recorder
    disarm()
    _recorder = None
    try:
        yield _arm(policy, by_environment=False).snapshot
    finally:
        disarm()
        _recorder = recorder_before
        if before is not None:
            # What the block was allowed to load is hidden and put on record. Raising here would leave the process
            # unguarded, and hide the block's own exception.
            granted = before.finder.granted
            _arm(before.policy, by_environment=before.by_environment, hide_preloaded=True, granted=granted)


def ledger() -> Ledger:
    """Return what the guard has seen in this process since it was first armed."""
    return Ledger() if _recorder is None else _recorder.snapshot()


def current_policy() -> Policy | None:
    """Return the policy in force, or None."""
    return None if _active is None else _active.policy


def environment_for_children(role: str | None = None) -> dict[str, str]:
    """Return the variables that arm a child process by the policy in force, further forbidden names included.

    What `forbidding` forbids for a block is no part of the policy and does not travel.

    Args:
        role: Role of the child; None means that of this process. All other settings are those of this process.

    Raises:
        RuntimeError: If this process is not armed, so that there is nothing to hand on.
        ValueError: If the role is unknown.
    """
    if _active is None:
        raise RuntimeError(
            "this process is not armed, so it has no policy for its children; call arm(role) first, or name the "
            "policy yourself: environment_for(role, ...)"
        )
    policy = _active.policy
    return replace(policy, role=policy.role if role is None else role).to_environment()


def is_armed() -> bool:
    """Tell whether the guard is armed and really is asked first."""
    return _active is not None and layers.is_first(_active.finder)


def _arm(
    policy: Policy,
    *,
    by_environment: bool,
    hide_preloaded: bool = False,
    granted: frozenset[str] = frozenset(),
) -> Recorder:
    """Put the policy in force and return the recorder that it writes to.

    Args:
        policy: The rule.
        by_environment: Whether the environment asked for it.
        hide_preloaded: Hide modules that are loaded already, also where ``on_violation`` says otherwise.
        granted: Forbidden roots that allowed importers have loaded under an earlier rule of this process.
    """
    global _active, _recorder
    if _active is not None:
        if _active.policy.role != policy.role and not _active.by_environment:
            raise RuntimeError(
                f"this process is armed as {_active.policy.role!r} and can't become {policy.role!r}; call disarm() "
                f"first, or use armed() for a block"
            )
        if _active.policy == policy:
            _active = replace(_active, by_environment=_active.by_environment and by_environment)
            layers.prove(_active.finder)
            return _active.finder.recorder
        if policy.allow_importers:  # new settings: what an allowed importer has loaded is still no violation
            granted |= _active.finder.granted
        disarm()
    if _recorder is None or _recorder.role != policy.role:
        earlier, _recorder = _recorder, Recorder(policy.role)
        if earlier is not None:
            _recorder.adopt(earlier)
    hide = hide_preloaded or policy.on_violation == "record"
    hidden = _settle_preloaded(policy, _recorder, hide=hide, granted=granted)
    finder = GuardFinder(policy, _recorder, granted=granted)
    finder.hidden.update(hidden)
    _active = _Active(policy=policy, by_environment=by_environment, finder=finder)
    layers.install(finder)
    layers.prove(finder)
    return _recorder


def _settle_preloaded(
    policy: Policy, recorder: Recorder, *, hide: bool, granted: frozenset[str]
) -> dict[str, ModuleType]:
    """Deal with forbidden modules that are loaded already; a finder never sees those.

    Args:
        policy: The rule.
        recorder: Where they are put on record.
        hide: Hide them; else ``on_violation`` says what happens.
        granted: Roots that allowed importers have loaded; they stay.

    Returns:
        The modules that were hidden, by name.
    """
    roots = policy.roots - granted
    loaded = {
        name: module
        for name, module in sorted(sys.modules.items())
        if module is not None and name.partition(".")[0] in roots
    }
    tops = sorted({name.partition(".")[0] for name in loaded})
    if not tops:
        return {}
    lines = []
    for top in tops:
        holders = _holders(top)
        violation = Violation(
            kind="preloaded", role=policy.role, module=top, importer=", ".join(holders), file="", line=0, chain=(top,)
        )
        recorder.add_violation(violation)
        lines.append(f"{top} (held by {violation.importer or 'no loaded module'})")
    message = (
        f"loaded before the guard was armed: {'; '.join(lines)}. Rule: {policy.rule_for(tops[0])}. Way out: arm first "
        f"(NEMO_RL_ROLE={policy.role} in the environment arms when the interpreter starts), or remove the import"
    )
    if not hide and policy.on_violation == "exit":
        end_process(message)
    if not hide:
        raise ForbiddenImportError(message, role=policy.role, module=tops[0], importer=", ".join(_holders(tops[0])))
    report(message)
    for name in loaded:
        # The import system's own sign for "there is none", which the type of sys.modules does not know.
        sys.modules[name] = cast(ModuleType, None)
    return loaded


def _holders(top: str) -> list[str]:
    """Name loaded modules outside ``top`` that refer to it; reads only plain namespaces, so nothing lazy wakes up."""
    holders = []
    for name, module in sorted(sys.modules.items()):
        if not issubclass(type(module), ModuleType) or name.partition(".")[0] == top:
            continue
        namespace = object.__getattribute__(module, "__dict__")
        if any(_comes_from(value, top) for value in list(namespace.values())):
            holders.append(name)
    return holders[:_HOLDER_LIMIT]


def _comes_from(value: object, top: str) -> bool:
    if type(value) is ModuleType:
        origin = value.__name__
    elif type(value) in (type, FunctionType):
        origin = getattr(value, "__module__", "")
    else:
        return False
    return isinstance(origin, str) and origin.partition(".")[0] == top
