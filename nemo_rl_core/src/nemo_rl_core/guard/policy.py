# SPDX-License-Identifier: Apache-2.0
"""Who may import what: the roles, the one table of forbidden roots, and how a policy travels to a child process."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

__all__ = [
    "ENGINE_ROOTS",
    "FIRST_PARTY_ROOTS",
    "FORBIDDEN_ROOTS",
    "ON_VIOLATION",
    "ROLES",
    "VARIABLES",
    "BlockRule",
    "Policy",
    "Rule",
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
        "allow_importers": "NEMO_RL_FIREWALL_ALLOW_IMPORTERS",
    }
)

#: What Python and the guard themselves stand on; without one of these nothing goes on that could tell why.
_INDISPENSABLE = frozenset({"__main__", "builtins", "importlib", "nemo_rl_core", "os", "sys"})


class Rule(Protocol):
    """What a finder enforces: the rule of a process, or that of a block."""

    @property
    def role(self) -> str:
        """Role of the process, or what the block is for."""
        ...

    @property
    def on_violation(self) -> str:
        """One of ``ON_VIOLATION``."""
        ...

    @property
    def allow_importers(self) -> tuple[str, ...]:
        """Modules whose own imports of forbidden names pass."""
        ...

    @property
    def tells_attempts(self) -> bool:
        """Whether the first attempt of each third party is printed."""
        ...

    @property
    def roots(self) -> frozenset[str]:
        """Top-level names that must not be imported."""
        ...

    @property
    def way_out(self) -> str:
        """What to do about a refusal."""
        ...

    def rule_for(self, root: str) -> str:
        """Return the rule that forbids this top-level name, in words."""
        ...


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
        allow_importers: Modules, by full name and with everything below them, that may import the forbidden names
            all the same (``mylib.bridge``); what the engine then imports for itself passes too.

    Raises:
        ValueError: If a field has a value that the table does not know.
    """

    role: str
    on_violation: str = "raise"
    allow: tuple[str, ...] = ()
    lifted: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    allow_importers: tuple[str, ...] = ()

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
        for name in self.allow_importers:
            _check_importer(name, known)

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

    @property
    def tells_attempts(self) -> bool:
        """Printed, since a run that lacks what a library would have used should say so."""
        return True

    @property
    def way_out(self) -> str:
        """What to do about a refusal, for messages."""
        listed = f" (now: {', '.join(self.allow_importers)})" if self.allow_importers else ""
        return (
            f"do it in a generation worker and pass plain data, or put it under TYPE_CHECKING; name the one module "
            f"that may import it in firewall.allow_importers{listed}; where the environment brings the engine into "
            f"this role on purpose (fsdp+vllm), lift the rule there: {VARIABLES['lifted']}=<engine>"
        )

    def to_environment(self) -> dict[str, str]:
        """Return the variables that arm a child process the same way; empty lists leave no variable."""
        lists = {
            "allow": self.allow,
            "lifted": self.lifted,
            "forbid": self.forbid,
            "allow_importers": self.allow_importers,
        }
        scalars = {VARIABLES["role"]: self.role, VARIABLES["on_violation"]: self.on_violation}
        return scalars | {VARIABLES[field]: ",".join(names) for field, names in lists.items() if names}


def _check_importer(name: str, forbidden: frozenset[str]) -> None:
    """Refuse what can't be an allowed importer; whether the module exists can't be known before it is imported."""
    root, *below = name.split(".")
    if not all(part.isidentifier() for part in (root, *below)):
        raise ValueError(f"allow_importers takes full names of modules, such as mylib.bridge; got {name!r}")
    if root in forbidden:
        raise ValueError(
            f"allow_importers names the module that imports, not what it imports; got {name!r}, which is of the "
            f"forbidden kind: use allow or lifted to take it out of the table"
        )
    if root == "nemo_rl_core":
        raise ValueError(
            f"no module of nemo_rl_core may be an allowed importer, which is the point of it; got {name!r}"
        )


@dataclass(frozen=True, kw_only=True)
class BlockRule:
    """The rule of a block, whatever the role of the process.

    Attributes:
        names: Top-level names that the block must not import.
        because: Who forbids them, for messages.
        way_out: What to do about a refusal, for messages.
        role: What stands in errors and ledgers where a process's rule has its role.

    Raises:
        ValueError: If there is no name, or one that is no top-level name, or one that Python itself needs.
    """

    names: frozenset[str]
    because: str
    way_out: str
    role: str = "block"

    def __post_init__(self) -> None:
        """Check every name."""
        if not self.names:
            raise ValueError("name at least one package to forbid, got none")
        for name in sorted(self.names):
            if "." in name and all(part.isidentifier() for part in name.split(".")):
                raise ValueError(
                    f"only a top-level import name can be forbidden, since importing a part imports the whole; got "
                    f"{name!r}: forbid {name.partition('.')[0]!r}"
                )
            if not name.isidentifier():
                raise ValueError(f"only a top-level import name can be forbidden; got {name!r}")
            if name in _INDISPENSABLE or name in sys.builtin_module_names:
                raise ValueError(f"{name!r} can't be forbidden: Python, or the guard itself, needs it")

    @property
    def on_violation(self) -> str:
        """A block is no process that could be ended, so it always raises."""
        return "raise"

    @property
    def allow_importers(self) -> tuple[str, ...]:
        """Nobody is exempt."""
        return ()

    @property
    def tells_attempts(self) -> bool:
        """Not printed: whoever opens a block reads its ledger, and its output may be under test."""
        return False

    @property
    def roots(self) -> frozenset[str]:
        """Top-level names that the block must not import."""
        return self.names

    def rule_for(self, root: str) -> str:
        """Return the rule in words, for messages.

        Args:
            root: A name of ``roots``.
        """
        return f"{self.because} must not import {root!r}"


def environment_for(
    role: str,
    *,
    on_violation: str = "raise",
    allow: Iterable[str] = (),
    lifted: Iterable[str] = (),
    forbid: Iterable[str] = (),
    allow_importers: Iterable[str] = (),
) -> dict[str, str]:
    """Return the variables that a parent sets so that a child process is armed when its interpreter starts.

    Args:
        role: Role of the child.
        on_violation: See ``Policy``.
        allow: See ``Policy``.
        lifted: See ``Policy``.
        forbid: See ``Policy``.
        allow_importers: See ``Policy``.

    Raises:
        ValueError: If a value is unknown to the table.
    """
    policy = Policy(
        role=role,
        on_violation=on_violation,
        allow=tuple(allow),
        lifted=tuple(lifted),
        forbid=tuple(forbid),
        allow_importers=tuple(allow_importers),
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
        allow_importers=_names(environ.get(VARIABLES["allow_importers"], "")),
    )
