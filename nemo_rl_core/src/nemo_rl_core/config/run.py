# SPDX-License-Identifier: Apache-2.0
"""The whole config of a run."""

from typing import Self

from pydantic import Field, model_validator

from nemo_rl_core.config.base import Section
from nemo_rl_core.config.cluster import (
    ClusterSection,
    EnvSection,
    FirewallSection,
    LoggerSection,
    RefitSection,
    WorkersSection,
)
from nemo_rl_core.config.generation import GenerationSection
from nemo_rl_core.config.grpo import DataSection, GrpoSection, LossSection
from nemo_rl_core.config.placement import Placement, plan_placement
from nemo_rl_core.config.policy import PolicySection
from nemo_rl_core.config.rules import check_rules

__all__ = ["RunConfig"]


class RunConfig(Section):
    """A checked config: every rule of the schema and between keys holds.

    `load_config` builds it from files; building it directly raises pydantic's ``ValidationError`` (a ``ValueError``).
    """

    policy: PolicySection
    loss_fn: LossSection = Field(default_factory=LossSection)
    grpo: GrpoSection = Field(default_factory=GrpoSection)
    data: DataSection
    cluster: ClusterSection = Field(default_factory=ClusterSection)
    refit: RefitSection = Field(default_factory=RefitSection)
    workers: WorkersSection = Field(default_factory=WorkersSection)
    env: EnvSection = Field(default_factory=EnvSection)
    firewall: FirewallSection = Field(default_factory=FirewallSection)
    logger: LoggerSection = Field(default_factory=LoggerSection)
    run_dir: str | None = Field(
        default=None, min_length=1, description="Folder of the run's files; null makes `results/<config name>/<time>`."
    )

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        sections = {
            name: value for name in type(self).model_fields if isinstance(value := getattr(self, name), Section)
        }
        if problems := check_rules(sections):
            raise ValueError("; ".join(map(str, problems)))
        return self

    @property
    def generation(self) -> GenerationSection:
        """The generation section, which a checked config has."""
        assert self.policy.generation is not None
        return self.policy.generation

    @property
    def placement(self) -> Placement:
        """How the cluster is divided."""
        return plan_placement(self.cluster, self.generation.colocated.resources)

    @property
    def train_world_size(self) -> int:
        """Number of train workers."""
        return self.placement.train_world_size

    @property
    def generation_world_size(self) -> int:
        """Number of worker slots for generation; a replica may take several."""
        return self.placement.generation_world_size

    @property
    def rollout_batch_size(self) -> int:
        """Sequences of one rollout: prompts times group size."""
        return self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt

    @property
    def optimizer_steps_per_rollout(self) -> int:
        """Optimizer steps that one rollout is cut into."""
        return self.rollout_batch_size // self.policy.train_global_batch_size

    @property
    def train_batch_size_per_worker(self) -> int:
        """Sequences of one optimizer step on one train worker."""
        return self.policy.train_global_batch_size // self.train_world_size

    @property
    def needs_reference_model(self) -> bool:
        """Whether the loss has a KL term and so a reference model has to be kept."""
        return self.loss_fn.reference_policy_kl_penalty > 0
