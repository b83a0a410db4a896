# SPDX-License-Identifier: Apache-2.0
"""Optimizers and schedules by dotted path."""

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.workers.settings import OptimizerSettings

__all__ = ["build_optimizer", "check_optimizer"]


def build_optimizer(
    settings: OptimizerSettings, parameters: Iterable[nn.Parameter]
) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
    """Build the optimizer and, where one is named, its schedule.

    Raises:
        ConfigError: If a path does not name such a class, or its arguments do not fit.
    """
    optimizer = _build("policy.optimizer", settings.name, torch.optim.Optimizer, [parameters], settings.kwargs)
    if settings.scheduler_name is None:
        return optimizer, None
    kwargs = settings.scheduler_kwargs
    return optimizer, _build("policy.scheduler", settings.scheduler_name, LRScheduler, [optimizer], kwargs)


def check_optimizer(settings: OptimizerSettings) -> None:
    """Build it for one number, so that a mistake shows before any worker starts; raises as ``build_optimizer``."""
    build_optimizer(settings, [nn.Parameter(torch.zeros(1))])


def _build(key: str, path: str, kind: type, arguments: list[Any], kwargs: Mapping[str, Any]) -> Any:
    module_name, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}.name {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"{key}.name must be the path of a {kind.__module__}.{kind.__qualname__}, got {path!r}")
    try:
        return found(*arguments, **kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}.kwargs do not fit {path}: {error}; got {dict(kwargs)}") from error
