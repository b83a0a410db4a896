# SPDX-License-Identifier: Apache-2.0
"""The audit: import every module of an installed package, each in a process of its own, and see who loads what.

    from nemo_rl_core.firewall import AuditRequest, audit

    report = audit(AuditRequest(package="accelerate", forbid=("vllm",)))
    report.verdict, report.findings

The standard library and the guard's table only. ``nemo-rl firewall audit`` is the command.
"""

from nemo_rl_core.firewall.audit import AuditRequest, audit
from nemo_rl_core.firewall.report import (
    SCHEMA,
    Ask,
    AuditReport,
    Failure,
    Finding,
    ForbiddenName,
    ModuleResult,
    ModuleState,
    Verdict,
)

__all__ = [
    "SCHEMA",
    "Ask",
    "AuditReport",
    "AuditRequest",
    "Failure",
    "Finding",
    "ForbiddenName",
    "ModuleResult",
    "ModuleState",
    "Verdict",
    "audit",
]
