# SPDX-License-Identifier: Apache-2.0
"""Tasks: prompts to train on, prompts held out, and a reward for a completion."""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

from nemo_rl_core.errors import ConfigError, DataError

__all__ = ["BUILT_IN_TASKS", "Prompt", "Task", "load_task", "prompts_of"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt of a task.

    Attributes:
        text: Plain text; used when ``messages`` is empty.
        messages: Chat messages (``role``, ``content``), rendered by the tokenizer's chat template.
        facts: What the reward needs to know, e.g. the answer.
    """

    text: str = ""
    messages: tuple[Mapping[str, str], ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return what a person would read."""
        return self.text or " / ".join(message["content"] for message in self.messages)


@runtime_checkable
class Task(Protocol):
    """What GRPO is trained on. A user's own task is a class with these methods, named by its dotted path."""

    name: str

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the prompts to train on."""
        ...

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return prompts that are never trained on."""
        ...

    def reward(self, prompt: Prompt, completion: str) -> float:
        """Return the reward of a completion's text; finite."""
        ...

    def is_correct(self, prompt: Prompt, completion: str) -> bool:
        """Say whether validation counts the completion as right."""
        ...


#: Tasks that come with core, by name.
BUILT_IN_TASKS: Mapping[str, str] = MappingProxyType(
    {
        "largest_digit": "nemo_rl_core.rollout.largest_digit:LargestDigit",
        "arithmetic": "nemo_rl_core.rollout.arithmetic:Arithmetic",
    }
)


def load_task(name: str, kwargs: Mapping[str, Any] | None = None) -> Task:
    """Build a task by its built-in name or by dotted path (``module:Class`` or ``module.Class``).

    Raises:
        ConfigError: If the name is unknown, the path cannot be imported, the arguments do not fit, or the object lacks
            a method of ``Task``.
    """
    path = BUILT_IN_TASKS.get(name, name)
    if ":" not in path and "." not in path:
        near = get_close_matches(name, BUILT_IN_TASKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"data.task {name!r} is neither a built-in task ({', '.join(sorted(BUILT_IN_TASKS))}) nor a dotted path{hint}"
        )
    module_name, _, class_name = path.rpartition(":" if ":" in path else ".")
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # the task is the user's code; whatever it raises is reported as such
        raise ConfigError(f"data.task {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    _check_arguments(name, factory, kwargs or {})
    try:
        task = factory(**(kwargs or {}))
    except ConfigError:
        raise
    except Exception as error:  # the task is the user's code; whatever it raises is reported as such
        raise ConfigError(f"data.task {name!r} failed while it was built: {type(error).__name__}: {error}") from error
    if not isinstance(task, Task):
        wanted = ["name", "train_prompts", "heldout_prompts", "reward", "is_correct"]
        missing = [attribute for attribute in wanted if not hasattr(task, attribute)]
        raise ConfigError(f"data.task {name!r} is no task: it lacks {', '.join(missing)}")
    return task


def prompts_of(task: Task, method: Literal["train_prompts", "heldout_prompts"]) -> list[Prompt]:
    """Ask a task for its prompts.

    Raises:
        DataError: If the task raises, or gives something else than prompts.
    """
    try:
        prompts = list(getattr(task, method)())
    except Exception as error:  # the task is the user's code; whatever it raises is reported as such
        raise DataError(f"{method}() of task {task.name!r} failed: {type(error).__name__}: {error}") from error
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, Prompt):
            raise DataError(
                f"{method}() of task {task.name!r} must give nemo_rl_core.rollout.tasks.Prompt objects, got "
                f"{type(prompt).__name__} at {index}"
            )
    return prompts


def _check_arguments(name: str, factory: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` unless ``factory`` takes ``kwargs``; errors inside it are its own."""
    if not callable(factory):
        raise ConfigError(f"data.task {name!r} must name a class or a function that builds a task, got {factory!r}")
    try:
        signature = inspect.signature(factory)
    except ValueError:
        return  # a built-in type that does not say what it takes
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"data.task_kwargs do not fit {name!r}: {error}; it takes {signature}") from error
