# SPDX-License-Identifier: Apache-2.0
"""Schema of ``policy.generation.torch_cfg``; read on the driver only, so that workers need no pydantic."""

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["TorchConfig"]


class TorchConfig(BaseModel):
    """Options of the torch backend."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_batch_size: int = Field(default=512, ge=1, description="Requests decoded at one time.")
