# SPDX-License-Identifier: Apache-2.0
"""The generation backend that a config names: found by entry point, its section checked by its own schema."""

import importlib
from typing import Any

from pydantic import BaseModel, ValidationError

from nemo_rl_core import plugins
from nemo_rl_core.config.run import RunConfig
from nemo_rl_core.errors import BackendBrokenError, ConfigError
from nemo_rl_core.protocols.generation import PROTOCOL_NUMBER, BackendSpec

__all__ = ["chosen_backend", "validated_options"]


def chosen_backend(config: RunConfig) -> BackendSpec:
    """Load the one backend that ``policy.generation.backend`` names.

    Raises:
        BackendError: The subclass that says why it cannot be used.
    """
    name = config.generation.backend
    spec = plugins.load(name, group=plugins.GENERATION_GROUP, expected_protocol=PROTOCOL_NUMBER)
    if not isinstance(spec, BackendSpec):
        raise BackendBrokenError(
            f"the entry point of backend {name!r} must name a BackendSpec, got {type(spec).__name__}"
        )
    return spec


def validated_options(config: RunConfig, spec: BackendSpec) -> dict[str, Any]:
    """Check the backend's own section by its schema and return it with defaults filled in.

    Raises:
        ConfigError: Listing every problem with its key.
        BackendBrokenError: If the schema cannot be imported.
    """
    module_name, _, class_name = spec.config_schema.partition(":")
    try:
        schema: type[BaseModel] = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise BackendBrokenError(
            f"backend {spec.name!r} has no config schema at {spec.config_schema}: {error}"
        ) from error
    section = f"policy.generation.{spec.config_section}"
    try:
        return schema.model_validate(config.generation.backend_section(spec.config_section)).model_dump()
    except ValidationError as error:
        problems = [
            f"{section}.{'.'.join(map(str, item['loc']))}: {item['msg']}, got {item['input']!r}"
            for item in error.errors()
        ]
        known = ", ".join(sorted(schema.model_fields))
        raise ConfigError(f"{'; '.join(problems)}. Keys of {section}: {known}") from error
