# SPDX-License-Identifier: Apache-2.0
"""The generation backend that a config names: found by entry point, its section checked by its own schema."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from nemo_rl_core import plugins
from nemo_rl_core.data.folders import local_folders
from nemo_rl_core.errors import BackendBrokenError, ConfigError
from nemo_rl_core.protocols.generation import PROTOCOL_NUMBER, BackendSpec
from nemo_rl_core.protocols.settings import Fp8Weights, GenerationSettings

__all__ = [
    "ChosenBackend",
    "check_settings",
    "choose_backend",
    "load_backend",
    "num_ranks",
    "settle_fp8_weights",
    "validated_options",
]


@dataclass(frozen=True, kw_only=True)
class ChosenBackend:
    """The backend of a run, with what its own package says of the config; plain data.

    Attributes:
        spec: The backend.
        options: Its own section of the config, checked, with defaults.
        num_ranks: Ranks of one replica, each on a slot of its own.
        fp8_kv_cache: Whether its KV cache is FP8, so that each refit brings scales.
        fp8_weights: Which weights a refit brings in FP8; None for none.
        distribution: The distribution that brings it; "" where the metadata does not say.
        version: That distribution's version.
        node: Address of the generation node that said all this; "" for the driver itself.
    """

    spec: BackendSpec
    options: Mapping[str, Any]
    num_ranks: int
    fp8_kv_cache: bool
    fp8_weights: Fp8Weights | None
    distribution: str
    version: str
    node: str = ""


def choose_backend(name: str, sections: Mapping[str, Any], settings: GenerationSettings) -> ChosenBackend:
    """Load a backend's description, and let its package check its section and the settings of its workers.

    Args:
        name: Name of the backend.
        sections: The backends' own sections of the config, as they stand there.
        settings: What every generation worker is told, but for ``options``.

    Raises:
        BackendError: If the backend cannot be used; the subclass says why.
        ConfigError: If its section does not fit, or the engine could not run what is asked for.
    """
    spec = load_backend(name)
    options = validated_options(sections.get(spec.config_section) or {}, spec)
    # The folders are the driver's, which another machine that is asked for this does not have.
    with local_folders(replace(settings, options=options)) as local:
        check_settings(spec, local)
        fp8_weights = settle_fp8_weights(spec, local)
    plugin = plugins.discover().get(name)
    return ChosenBackend(
        spec=spec,
        options=options,
        num_ranks=num_ranks(spec, options),
        fp8_kv_cache=bool(spec.fp8_kv_cache and _named(spec, "say on its KV cache", spec.fp8_kv_cache)(options)),
        fp8_weights=fp8_weights,
        distribution=plugin.distribution if plugin else "",
        version=plugin.version if plugin else "",
    )


def load_backend(name: str) -> BackendSpec:
    """Load the one backend of that name.

    Raises:
        BackendError: The subclass that says why it cannot be used.
    """
    spec = plugins.load(name, group=plugins.GENERATION_GROUP, expected_protocol=PROTOCOL_NUMBER)
    if not isinstance(spec, BackendSpec):
        raise BackendBrokenError(
            f"the entry point of backend {name!r} must name a BackendSpec, got {type(spec).__name__}"
        )
    return spec


def validated_options(values: Mapping[str, Any], spec: BackendSpec) -> dict[str, Any]:
    """Check the backend's own section by its schema and return it with defaults filled in.

    Args:
        values: The section as it stands in the config.
        spec: The backend.

    Raises:
        ConfigError: Listing every problem with its key.
        BackendBrokenError: If the schema cannot be imported.
    """
    schema: type[BaseModel] = _named(spec, "config schema", spec.config_schema)
    section = f"policy.generation.{spec.config_section}"
    try:
        return schema.model_validate(values).model_dump()
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


def settle_fp8_weights(spec: BackendSpec, settings: GenerationSettings) -> Fp8Weights | None:
    """Let the backend say, by the real names of the model's modules, which weights a refit brings in FP8.

    Returns:
        None for the model's precision.

    Raises:
        ConfigError: In the backend's words, if its engine could not compute with them.
        ModelError: If the model cannot be built from its config.
        BackendBrokenError: If what says so cannot be imported.
    """
    if not spec.fp8_weights:
        return None

    def shapes() -> Mapping[str, tuple[int, ...]]:
        # Building a model takes seconds, and torch, which is not needed where nothing is cast.
        from nemo_rl_core.workers.fp8_weights import matrix_shapes

        return matrix_shapes(settings.model)

    return _named(spec, "say on FP8 weights", spec.fp8_weights)(settings, shapes)


def num_ranks(spec: BackendSpec, options: Mapping[str, Any]) -> int:
    """Return how many ranks one replica has, each on a slot of its own.

    Args:
        spec: The backend.
        options: Its section, as `validated_options` returned it.

    Raises:
        BackendBrokenError: If what says so cannot be imported, or says no number of ranks.
    """
    if not spec.num_ranks:
        return 1
    ranks = _named(spec, "number of ranks", spec.num_ranks)(options)
    if not isinstance(ranks, int) or ranks < 1:
        raise BackendBrokenError(f"backend {spec.name!r}: {spec.num_ranks} must return at least 1, got {ranks!r}")
    return ranks


def _named(spec: BackendSpec, what: str, path: str) -> Any:
    """Import what a backend names by ``module:name``."""
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise BackendBrokenError(f"backend {spec.name!r} has no {what} at {path}: {error}") from error
