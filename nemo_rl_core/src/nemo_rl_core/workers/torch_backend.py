# SPDX-License-Identifier: Apache-2.0
"""Core's own generation backend, declared as every other one is: by entry point. Light: no torch, no pydantic."""

from nemo_rl_core.protocols.generation import PROTOCOL_NUMBER, BackendSpec

__all__ = ["BACKEND"]

BACKEND = BackendSpec(
    name="torch",
    protocol=PROTOCOL_NUMBER,
    environment="base",
    worker_class="nemo_rl_core.workers.torch_generation:TorchGenerationWorker",
    config_section="torch_cfg",
    config_schema="nemo_rl_core.workers.torch_config:TorchConfig",
)
