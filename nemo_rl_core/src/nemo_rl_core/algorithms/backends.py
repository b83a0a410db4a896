# SPDX-License-Identifier: Apache-2.0
"""The generation backend that a config names: found by entry point, its section checked by its own schema."""

import importlib
from typing import Any

from pydantic import BaseModel, ValidationError

from nemo_rl_core import plugins
from nemo_rl_core.config.run import RunConfig
from nemo_rl_core.errors import BackendBrokenError, ConfigError
from nemo_rl_core.protocols.generation import PROTOCOL_NUMBER, BackendSpec
from nemo_rl_core.protocols.settings import GenerationSettings

__all__ = ["check_settings", "chosen_backend", "validated_options"]


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
    schema: type[BaseModel] = _named(spec, "config schema", spec.config_schema)
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


def check_settings(spec: BackendSpec, settings: GenerationSettings) -> None:
    """Let the backend refuse, before any worker starts, what its engine could not run.

    Raises:
        ConfigError: In the backend's words.
        BackendBrokenError: If its check cannot be imported.
    """
    if spec.settings_check:
        _named(spec, "check of settings", spec.settings_check)(settings)


def _named(spec: BackendSpec, what: str, path: str) -> Any:
    """Import what a backend names by ``module:name``."""
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise BackendBrokenError(f"backend {spec.name!r} has no {what} at {path}: {error}") from error
