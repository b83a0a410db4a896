# SPDX-License-Identifier: Apache-2.0
"""The schema of policy.generation.bigram_cfg."""

from pydantic import BaseModel, ConfigDict


class BigramConfig(BaseModel):
    """No options."""

    model_config = ConfigDict(extra="forbid", frozen=True)
