# SPDX-License-Identifier: Apache-2.0
"""The runtime guard and its ledger: standard library only, importable in any interpreter.

    from nemo_rl_core import guard

    guard.arm("train")          # from now on `import vllm` raises ForbiddenImportError
    guard.ledger().violations   # what was refused, also where an `except ImportError` swallowed it

A child process is armed when its interpreter starts if its parent sets ``guard.environment_for("train")``,
or ``guard.environment_for_children()`` for the policy that is in force here.
"""

from nemo_rl_core.guard.forbidding import forbidding
from nemo_rl_core.guard.policy import (
    FORBIDDEN_ROOTS,
    ROLES,
    Policy,
    environment_for,
    forbidden_roots,
)
from nemo_rl_core.guard.records import Attempt, ForbiddenImportError, Ledger, Violation, merge_reports
from nemo_rl_core.guard.runtime import (
    arm,
    arm_from_environment,
    armed,
    current_policy,
    disarm,
    environment_for_children,
    is_armed,
    ledger,
)

__all__ = [
    "FORBIDDEN_ROOTS",
    "ROLES",
    "Attempt",
    "ForbiddenImportError",
    "Ledger",
    "Policy",
    "Violation",
    "arm",
    "arm_from_environment",
    "armed",
    "current_policy",
    "disarm",
    "environment_for",
    "environment_for_children",
    "forbidden_roots",
    "forbidding",
    "is_armed",
    "ledger",
    "merge_reports",
]
