# SPDX-License-Identifier: Apache-2.0
"""The `policy.generation` section: backend, sampling, and where the generation workers run."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field

from nemo_rl_core.config.base import IntList, Section, StrList

__all__ = ["ColocatedSection", "GenerationSection", "KvScalesSection", "ResourcesSection"]


class ResourcesSection(Section):
    """What the generation side takes from the cluster."""

    gpus_per_node: int | None = Field(
        default=None,
        ge=1,
        description="Worker slots for generation. One node: required, the rest trains. Several nodes: the cluster's.",
    )
    num_nodes: int | None = Field(
        default=None, ge=1, description="Nodes for generation. One node: null or 1. Several nodes: required."
    )


class ColocatedSection(Section):
    """Whether generation shares the train workers' devices."""

    enabled: bool = Field(default=False, description="Must be false: training and generation have their own devices.")
    resources: ResourcesSection = Field(default_factory=ResourcesSection)


class KvScalesSection(Section):
    """Scales of an FP8 KV cache; without one, nothing here acts."""

    percentile: float = Field(
        default=100.0,
        gt=0,
        le=100,
        description="Of the magnitudes of all activations of a layer; 100 is their maximum.",
    )
    margin: float = Field(
        default=2.0,
        ge=1,
        le=1000,
        description="Headroom over it. Too small a scale saturates; twice as large a one costs nothing.",
    )
    include_q: bool = Field(
        default=True,
        description="Whether queries are calibrated too: some kernels on NVIDIA GPUs quantise them, others ignore it.",
    )
    initial: float = Field(
        default=1.0, ge=1e-6, le=1e4, description="Every scale until the first calibration, at the end of step 1."
    )
    calibration_period: int = Field(
        default=1, ge=1, description="Steps from one calibration to the next; between them the scales stay."
    )


class GenerationSection(Section):
    """How completions are sampled, and by which backend.

    A further key `<name>_cfg` holds the settings of one backend. It is kept as it stands and validated by that
    backend's own schema when the backend is chosen; the sections of other backends are left alone.
    """

    model_config = ConfigDict(extra="allow")

    backend: str = Field(min_length=1, description="Name of an installed generation backend, e.g. `torch`, `vllm`.")
    max_new_tokens: int = Field(default=256, ge=1, description="Tokens sampled for a prompt at most.")
    temperature: float = Field(default=1.0, gt=0, description="Logits are divided by it, on both sides.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Must be 1: the train side cannot reproduce a cut.")
    top_k: int | None = Field(default=None, description="Must be null: the train side cannot reproduce a cut.")
    stop_token_ids: IntList | None = Field(
        default=None, description="Sampling ends after one of these; null takes the tokenizer's end-of-sequence id."
    )
    stop_strings: StrList | None = Field(default=None, description="Sampling ends when one of these is complete.")
    parity: Literal["default", "strict"] = Field(
        default="default",
        description="`strict` sets both sides up for logprobs as close as they get: float32, and no engine feature that "
        "changes how they are computed. Slower; for finding out where a mismatch comes from.",
    )
    kv_scales: KvScalesSection = Field(default_factory=KvScalesSection)
    colocated: ColocatedSection = Field(default_factory=ColocatedSection)

    def backend_section(self, name: str) -> Mapping[str, Any]:
        """Return a backend's own settings as they stand in the file; empty if there are none.

        Args:
            name: The section's key, e.g. ``vllm_cfg``.
        """
        return (self.model_extra or {}).get(name) or {}
