# SPDX-License-Identifier: Apache-2.0
"""Two-operand arithmetic in chat form, with a reward for the right number."""

import random
import re
from collections.abc import Sequence

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.rollout.tasks import Prompt

__all__ = ["Arithmetic"]

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Arithmetic:
    """``What is 17 + 25?`` as one user message; the last number of the answer counts.

    The reward is 1 for the right number, else 0, plus ``format_bonus`` when the answer is the number alone.
    """

    name = "arithmetic"

    def __init__(
        self,
        *,
        operations: str = "+",
        largest: int = 20,
        num_train: int = 256,
        num_heldout: int = 64,
        format_bonus: float = 0.1,
        seed: int = 0,
    ) -> None:
        """Draw the problems.

        Args:
            operations: Any of ``+``, ``-`` and ``*``, as one string.
            largest: Operands are drawn from 0 to this.
            num_train: Number of problems to train on.
            num_heldout: Number of held-out problems; no problem is in both.
            format_bonus: Added when the answer is nothing but a number.
            seed: Seed of the draw.

        Raises:
            ConfigError: If an operation is unknown or there are not enough different problems.
        """
        unknown = sorted(set(operations) - set(OPERATIONS))
        if unknown or not operations:
            raise ConfigError(f"data.task_kwargs.operations may hold {' '.join(OPERATIONS)}, got {operations!r}")
        problems = [
            (a, op, b) for op in sorted(set(operations)) for a in range(largest + 1) for b in range(largest + 1)
        ]
        if num_train < 1 or num_heldout < 1 or num_train + num_heldout > len(problems):
            raise ConfigError(
                f"data.task_kwargs asks for {num_train} + {num_heldout} problems, each at least 1, of the {len(problems)} "
                "that exist; raise largest or name more operations"
            )
        random.Random(seed).shuffle(problems)
        prompts = [_prompt(a, op, b) for a, op, b in problems[: num_train + num_heldout]]
        self._heldout, self._train = prompts[:num_heldout], prompts[num_heldout:]
        self._format_bonus = format_bonus

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the problems to train on."""
        return self._train

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return the held-out problems."""
        return self._heldout

    def reward(self, prompt: Prompt, completion: str) -> float:
        """Return 1 for the right number plus the bonus for a bare one."""
        bare = NUMBER.fullmatch(completion.strip().rstrip(".")) is not None
        return float(self.is_correct(prompt, completion)) + self._format_bonus * bare

    def is_correct(self, prompt: Prompt, completion: str) -> bool:
        """Say whether the last number of the completion is the answer."""
        numbers = NUMBER.findall(completion)
        return bool(numbers) and float(numbers[-1].replace(",", "")) == prompt.facts["answer"]


def _prompt(a: int, operation: str, b: int) -> Prompt:
    question = f"What is {a} {operation} {b}? Answer with the number only."
    return Prompt(messages=({"role": "user", "content": question},), facts={"answer": OPERATIONS[operation](a, b)})
