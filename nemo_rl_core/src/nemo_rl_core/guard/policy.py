# SPDX-License-Identifier: Apache-2.0
"""Who may import what: the roles, the one table of forbidden roots, and how a policy travels to a child process."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = [
    "ENGINE_ROOTS",
    "FIRST_PARTY_ROOTS",
    "FORBIDDEN_ROOTS",
    "ON_VIOLATION",
    "ROLES",
    "VARIABLES",
    "Policy",
    "environment_for",
    "forbidden_roots",
    "policy_from_environment",
]

#: What a process is for.
ROLES = ("driver", "train", "rollout", "generation")

#: What a violation means beyond the refused import; see ``Policy.on_violation``.
ON_VIOLATION = ("raise", "record", "exit")

#: Top-level import names by engine: the engine, and what only the engine brings to an installation. Names that torch,
#: ray or transformers import themselves (triton, compressed_tensors, mistral_common, ...) do not belong here.
ENGINE_ROOTS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "vllm": frozenset(
            {
                "depyf",
                "flashinfer",
                "llguidance",
                "lmformatenforcer",
                "openai_harmony",
                "outlines_core",
                "partial_json_parser",
                "tokenspeed_mla",
                "vllm",
                "vllm_flash_attn",
                "xgrammar",
            }
        ),
    }
)

_ALL_ENGINES: frozenset[str] = frozenset().union(*ENGINE_ROOTS.values())

#: Role to the top-level names that its process must not import. The contracts in ``.importlinter`` are tested
#: against it.
FORBIDDEN_ROOTS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "driver": _ALL_ENGINES,
        "train": _ALL_ENGINES,
        "rollout": _ALL_ENGINES,
        "generation": frozenset(),
    }
)

#: Import names of this project. A violation in one of them is ours even where it is installed in site-packages.
FIRST_PARTY_ROOTS = frozenset({"nemo_rl_core", "nemo_rl_vllm", "nemo_rl_contracts"})

#: Field of a policy to the environment variable that carries it to a child process.
VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "role": "NEMO_RL_ROLE",
        "on_violation": "NEMO_RL_FIREWALL",
        "allow": "NEMO_RL_FIREWALL_ALLOW",
        "lifted": "NEMO_RL_FIREWALL_LIFTED",
        "forbid": "NEMO_RL_FIREWALL_FORBID",
    }
)


def forbidden_roots(role: str, lifted: Iterable[str] = ()) -> frozenset[str]:
    """Return the top-level names that a process of this role must not import.

    Args:
        role: One of ``ROLES``.
        lifted: Engines whose rule an environment lifts for this role (``fsdp+vllm`` lifts ``vllm``): the engine and
            everything in its row of ``ENGINE_ROOTS``.

    Raises:
        ValueError: If the role or an engine is unknown.
    """
    if role not in FORBIDDEN_ROOTS:
        raise ValueError(f"a role is one of {', '.join(ROLES)}; got {role!r}")
    roots = FORBIDDEN_ROOTS[role]
    for engine in lifted:
        if engine not in ENGINE_ROOTS:
            raise ValueError(f"only an engine can be lifted ({', '.join(sorted(ENGINE_ROOTS))}); got {engine!r}")
        roots = roots - ENGINE_ROOTS[engine]
    return roots


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The rule of one process.

    Attributes:
        role: One of ``ROLES``.
        on_violation: Every forbidden import is refused. Beyond that ``raise`` leaves it at the exception, and refuses
            to arm where a forbidden module is loaded already; ``record`` prints each violation and hides modules that
            were loaded already; ``exit`` prints it and ends the process.
        allow: Single top-level names that are taken out of the table.
        lifted: Engines that are taken out of the table, each with everything that only it brings.
        forbid: Further top-level names that are forbidden in this process.

    Raises:
        ValueError: If a field has a value that the table does not know.
    """

    role: str
    on_violation: str = "raise"
    allow: tuple[str, ...] = ()
    lifted: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check every field against the table."""
        roots = forbidden_roots(self.role, self.lifted)
        if self.on_violation not in ON_VIOLATION:
            raise ValueError(f"firewall.on_violation is one of {', '.join(ON_VIOLATION)}; got {self.on_violation!r}")
        for name in self.forbid:
            if not name.isidentifier():
                raise ValueError(f"only a top-level import name can be forbidden; got {name!r}")
        known = roots | _ALL_ENGINES | frozenset(self.forbid)
        for name in self.allow:
            # A typo here would leave the rule standing and the user puzzled.
            if name not in known:
                raise ValueError(f"allow takes names of the table ({', '.join(sorted(known))}); got {name!r}")

    @property
    def roots(self) -> frozenset[str]:
        """Top-level names that this process must not import."""
        return (forbidden_roots(self.role, self.lifted) | frozenset(self.forbid)) - frozenset(self.allow)

    def rule_for(self, root: str) -> str:
        """Return the rule that forbids this top-level name, in words, for messages.

        Args:
            root: A name of ``roots``.
        """
        engines = sorted(engine for engine, roots in ENGINE_ROOTS.items() if root in roots)
        because = f"{engines[0]} and what only it brings" if engines else "forbidden by this process's own settings"
        return f"a {self.role} process must not import {root!r} ({because})"

    def to_environment(self) -> dict[str, str]:
        """Return the variables that arm a child process the same way; empty lists leave no variable."""
        lists = {"allow": self.allow, "lifted": self.lifted, "forbid": self.forbid}
        scalars = {VARIABLES["role"]: self.role, VARIABLES["on_violation"]: self.on_violation}
        return scalars | {VARIABLES[field]: ",".join(names) for field, names in lists.items() if names}


def environment_for(
    role: str,
    *,
    on_violation: str = "raise",
    allow: Iterable[str] = (),
    lifted: Iterable[str] = (),
    forbid: Iterable[str] = (),
) -> dict[str, str]:
    """Return the variables that a parent sets so that a child process is armed when its interpreter starts.

    Args:
        role: Role of the child.
        on_violation: See ``Policy``.
        allow: See ``Policy``.
        lifted: See ``Policy``.
        forbid: See ``Policy``.

    Raises:
        ValueError: If a value is unknown to the table.
    """
    policy = Policy(
        role=role, on_violation=on_violation, allow=tuple(allow), lifted=tuple(lifted), forbid=tuple(forbid)
    )
    return policy.to_environment()


def _names(value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(",") if name.strip())


def policy_from_environment(environ: Mapping[str, str]) -> Policy | None:
    """Read a policy from environment variables; None where no role is named.

    Args:
        environ: The variables, usually ``os.environ``.

    Raises:
        ValueError: If a variable holds a value that the table does not know.
    """
    role = environ.get(VARIABLES["role"], "").strip()
    if not role:
        return None
    return Policy(
        role=role,
        on_violation=environ.get(VARIABLES["on_violation"], "").strip() or "raise",
        allow=_names(environ.get(VARIABLES["allow"], "")),
        lifted=_names(environ.get(VARIABLES["lifted"], "")),
        forbid=_names(environ.get(VARIABLES["forbid"], "")),
    )
