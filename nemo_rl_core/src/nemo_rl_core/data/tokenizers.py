# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: from a local folder, or built from a list of characters for tiny models."""

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nemo_rl_core.errors import ModelError
from nemo_rl_core.protocols.settings import TokenizerSettings

__all__ = ["build_tokenizer", "character_tokenizer", "load_tokenizer"]


def build_tokenizer(settings: TokenizerSettings) -> PreTrainedTokenizerBase:
    """Build the tokenizer that the settings describe.

    Raises:
        ModelError: If the settings name neither or both kinds, or the tokenizer cannot be built.
    """
    if (settings.folder is None) == (settings.characters is None):
        raise ModelError("a tokenizer needs exactly one of policy.tokenizer.name (a folder) and .characters")
    if settings.folder is not None:
        return load_tokenizer(settings.folder, settings.chat_template)
    tokenizer = character_tokenizer(settings.characters or "")
    tokenizer.chat_template = settings.chat_template
    return tokenizer


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token for each character, plus ``<pad>``, ``<eos>`` and ``<unk>`` (ids 0 to 2).

    Args:
        characters: The alphabet; ids are given in its order, from 3 on.

    Raises:
        ModelError: If a character stands twice.
    """
    if len(set(characters)) != len(characters):
        doubles = sorted({c for c in characters if characters.count(c) > 1})
        raise ModelError(f"policy.tokenizer.characters must name each character once, got {doubles} more than once")
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def load_tokenizer(folder: str, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local HF folder; nothing is fetched.

    Args:
        folder: Folder that holds the tokenizer's files.
        chat_template: Jinja template that replaces the folder's own.

    Raises:
        ModelError: If the folder is missing, holds no tokenizer, or one without padding and end-of-sequence token.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(f"policy.tokenizer.name must be a local folder, got {folder!r}, which is none")
    try:
        # transformers annotates a union that includes None; at run time it is a tokenizer or an exception.
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"no tokenizer could be loaded from {folder!r}: {error}") from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(f"the tokenizer in {folder!r} has neither a padding nor an end-of-sequence token; add one")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
