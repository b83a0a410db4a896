# SPDX-License-Identifier: Apache-2.0
"""Prompts as tokens, and the sampler that says which ones come next and which group they form."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from nemo_rl_core.errors import ConfigError, DataError
from nemo_rl_core.rollout.tasks import Prompt

__all__ = ["EncodedPrompt", "PromptSampler", "encode_prompts"]


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A prompt and its token ids."""

    prompt: Prompt
    token_ids: tuple[int, ...]


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, max_total_sequence_length: int
) -> list[EncodedPrompt]:
    """Turn prompts into tokens, all of them before anything starts.

    Raises:
        DataError: If a prompt has no tokens, leaves no room in the context, holds a character that the tokenizer does
            not know, or chat is asked of a tokenizer without a chat template.
    """
    # Some tokenizers use one token for "unknown" and for the end of a text; that one may stand in a template.
    unknown = tokenizer.unk_token_id if tokenizer.unk_token not in (tokenizer.eos_token, tokenizer.bos_token) else None
    encoded = []
    for index, prompt in enumerate(prompts):
        token_ids = _encode(prompt, tokenizer)
        if not token_ids:
            raise DataError(f"prompt {index} ({str(prompt)[:60]!r}) is empty; a prompt needs at least one token")
        if unknown in token_ids:
            raise DataError(f"prompt {index} ({str(prompt)[:60]!r}) holds characters unknown to the tokenizer")
        if len(token_ids) >= max_total_sequence_length:
            raise DataError(
                f"prompt {index} ({str(prompt)[:60]!r}) has {len(token_ids)} tokens, which leaves no room for a completion "
                f"in policy.max_total_sequence_length={max_total_sequence_length}; shorten it or raise the limit"
            )
        encoded.append(EncodedPrompt(prompt=prompt, token_ids=tuple(token_ids)))
    return encoded


def _encode(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if not prompt.messages:
        return tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    if tokenizer.chat_template is None:
        raise DataError(
            "the task has chat prompts, but the tokenizer has no chat template; set policy.tokenizer.chat_template"
        )
    messages = [dict(message) for message in prompt.messages]
    try:
        ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    except TemplateError as error:
        raise DataError(
            f"the chat template fails: {type(error).__name__}: {error}; see policy.tokenizer.chat_template"
        ) from error
    return list(ids)


class PromptSampler:
    """Hands out prompts, every one of them once before any comes again, in an order that the seed fixes.

    Each prompt handed out gets a group id of its own: the same prompt drawn twice forms two groups.
    """

    def __init__(self, prompts: Sequence[EncodedPrompt], *, seed: int) -> None:
        """Take the prompts.

        Raises:
            ConfigError: If there are none.
        """
        if not prompts:
            raise ConfigError("the task has no prompts to train on")
        self._prompts = list(prompts)
        self._random = random.Random(seed)
        self._queue: list[EncodedPrompt] = []
        self._next_group = 0

    def take(self, count: int) -> list[tuple[int, EncodedPrompt]]:
        """Return ``count`` pairs of group id and prompt."""
        taken = []
        for _ in range(count):
            if not self._queue:
                self._queue = self._random.sample(self._prompts, len(self._prompts))
            taken.append((self._next_group, self._queue.pop()))
            self._next_group += 1
        return taken
