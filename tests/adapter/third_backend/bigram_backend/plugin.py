# SPDX-License-Identifier: Apache-2.0
"""What the entry point names; light."""

from nemo_rl_core.protocols.generation import BackendSpec

BACKEND = BackendSpec(
    name="bigram",
    protocol=1,
    environment="base",
    worker_class="bigram_backend.worker:BigramWorker",
    config_section="bigram_cfg",
    config_schema="bigram_backend.config:BigramConfig",
    install_hint="pip install bigram-backend",
)
