# SPDX-License-Identifier: Apache-2.0
"""The sections about machines and processes: `cluster`, `refit`, `workers`, `env`, `firewall`, `logger`."""

from typing import Literal

from pydantic import Field

from nemo_rl_core.config.base import Section, StrList

__all__ = ["ClusterSection", "EnvSection", "FirewallSection", "LoggerSection", "RefitSection", "WorkersSection"]


class ClusterSection(Section):
    """The machines, train and generation together."""

    num_nodes: int = Field(default=1, ge=1, description="Nodes in all.")
    gpus_per_node: int = Field(
        default=2, ge=1, description="Worker slots of a node: GPUs, or CPU slots where the device is `cpu`."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="`auto` takes GPUs where the cluster has any, else CPUs."
    )


class RefitSection(Section):
    """How weights travel from train to generation workers; defaults as in `refit.settings`, which config cannot import."""

    bucket_bytes: int = Field(
        default=64 * 2**20, ge=512, description="Bytes of one transfer bucket; the sender's rules."
    )
    rendezvous_timeout_s: float = Field(
        default=60.0, gt=0, le=604800, description="Seconds until all ranks must have met."
    )
    transfer_timeout_s: float = Field(default=120.0, gt=0, le=604800, description="Seconds that one refit may take.")
    silence_timeout_s: float = Field(
        default=10.0, gt=0, le=604800, description="Seconds without a sign of life of a peer."
    )
    digest: bool = Field(
        default=True, description="Compare a digest of the live weights after each refit; one more pass."
    )


class WorkersSection(Section):
    """Deadlines of worker processes."""

    start_timeout_s: float = Field(
        default=600.0, gt=0, le=604800, description="Seconds until every constructor has returned."
    )
    call_timeout_s: float = Field(
        default=3600.0, gt=0, le=604800, description="Seconds that one call of a worker may take."
    )


class EnvSection(Section):
    """Which interpreter a worker runs with; both override the registry."""

    py_executables: dict[str, str] = Field(
        default_factory=dict, description="Environment name to the path of its interpreter."
    )
    actor_environments: dict[str, str] = Field(
        default_factory=dict, description="Class path of a worker to the name of its environment."
    )


class FirewallSection(Section):
    """The runtime guard."""

    on_violation: Literal["raise", "record", "exit"] = Field(
        default="raise", description="What a forbidden import of our own or the user's module does."
    )
    allow: StrList = Field(default=(), description="Module roots that are let through although policy forbids them.")
    allow_importers: StrList = Field(
        default=(), description="Modules, by full name, that may import what policy forbids; see docs/firewall.md."
    )


class LoggerSection(Section):
    """What is written beside `metrics.jsonl`."""

    tensorboard: bool = Field(default=True, description="Write TensorBoard event files.")
