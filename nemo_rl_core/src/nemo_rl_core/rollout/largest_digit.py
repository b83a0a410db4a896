# SPDX-License-Identifier: Apache-2.0
"""A task that a model of a million parameters learns from scratch in a minute: name the largest digit."""

import itertools
import random
from collections.abc import Sequence

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.rollout.tasks import Prompt

__all__ = ["LargestDigit"]


class LargestDigit:
    """Prompts such as ``372?``; the right completion is ``7``.

    All tuples of ``num_digits`` digits exist; some are held out, so accuracy there shows that the rule was learned and
    not the tuples.
    """

    name = "largest_digit"

    def __init__(self, *, num_digits: int = 3, heldout: int = 200, seed: int = 0) -> None:
        """Split the tuples.

        Args:
            num_digits: Digits of a prompt, 2 to 4.
            heldout: Number of tuples that are never trained on.
            seed: Seed of the split.

        Raises:
            ConfigError: If a number is out of range.
        """
        if not 2 <= num_digits <= 4:
            raise ConfigError(f"data.task_kwargs.num_digits must be from 2 to 4, got {num_digits}")
        total = 10**num_digits
        if not 1 <= heldout < total:
            raise ConfigError(
                f"data.task_kwargs.heldout must be from 1 to {total - 1} of the {total} tuples, got {heldout}"
            )
        tuples = list(itertools.product(range(10), repeat=num_digits))
        random.Random(seed).shuffle(tuples)
        prompts = [
            Prompt(text=f"{''.join(map(str, digits))}?", facts={"answer": str(max(digits))}) for digits in tuples
        ]
        self._heldout, self._train = prompts[:heldout], prompts[heldout:]

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the tuples to train on."""
        return self._train

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return the held-out tuples."""
        return self._heldout

    def reward(self, prompt: Prompt, completion: str) -> float:
        """Return 1 for the largest digit, else 0."""
        return float(self.is_correct(prompt, completion))

    def is_correct(self, prompt: Prompt, completion: str) -> bool:
        """Say whether the completion is the largest digit and nothing else."""
        return completion == prompt.facts["answer"]
