# SPDX-License-Identifier: Apache-2.0
"""The behaviour that every generation backend must show, as checks that run against one live worker.

`run` takes a `Subject` (how to build a worker, two models to refit it with) and returns a `Report` with one named result
for each check. It needs neither pytest nor Ray, so it also runs in an engine's own interpreter; there
``python -m nemo_rl_core.testing.conformance module:function`` prints the report.

`subject` says what is tested, `teachers` holds models that judge, `bench` drives the worker, the modules ``checks_*`` hold
the checks, and `runner` their order.
"""

from nemo_rl_core.testing.conformance.runner import check_names, run
from nemo_rl_core.testing.conformance.subject import Report, Result, Sender, Subject, Teacher, installed_worker
from nemo_rl_core.testing.conformance.teachers import HfTeacher

__all__ = [
    "HfTeacher",
    "Report",
    "Result",
    "Sender",
    "Subject",
    "Teacher",
    "check_names",
    "installed_worker",
    "run",
]
