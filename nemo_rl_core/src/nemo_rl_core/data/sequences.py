# SPDX-License-Identifier: Apache-2.0
"""Token sequences from a file of texts: one on each line, plain or as JSON."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl_core.errors import DataError

__all__ = ["Sequences", "read_sequences"]

_RULE = (
    'a line of a .jsonl file must be one JSON object with "text", with "prompt" and "response" (texts), or with '
    '"input_ids" (a list of token ids)'
)
_FORMS = (frozenset({"text"}), frozenset({"prompt", "response"}), frozenset({"input_ids"}))


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """What a file holds, as token ids.

    Attributes:
        ids: Token ids of each sequence, in the order of the lines; none is empty.
        num_cut: Sequences that were longer than allowed and lost their end.
    """

    ids: tuple[tuple[int, ...], ...]
    num_cut: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(row) for row in self.ids)


def read_sequences(
    path: Path, tokenizer_of: Callable[[], PreTrainedTokenizerBase], *, vocab_size: int, max_tokens: int
) -> Sequences:
    """Read a file of texts.

    ``.jsonl`` has a JSON object on each line: ``text``; ``prompt`` and ``response``, of which the second follows the
    first without special tokens between them; or ``input_ids``. Other keys are left alone. ``.txt`` has a text on each
    line. Empty lines are skipped, and a sequence that is too long loses its end.

    Args:
        path: The file.
        tokenizer_of: Gives the tokenizer; called where a line has text.
        vocab_size: Token ids must be below it.
        max_tokens: Longest sequence.

    Raises:
        DataError: If the file can't be read, has another suffix or no sequence, or a line is malformed; it names the line.
    """
    reader = {".jsonl": _json_rows, ".txt": _text_rows}.get(path.suffix)
    if reader is None:
        raise DataError(f"{path} must be a .jsonl file ({_RULE}), or a .txt file with a text on each line")
    texts = _Tokens(tokenizer_of)
    rows, num_cut = [], 0
    for where, row in reader(path):
        ids = _checked_ids(where, row["input_ids"]) if "input_ids" in row else texts.ids(row)
        if not ids:
            raise DataError(f"{where} has no token; remove the line")
        if max(ids) >= vocab_size:
            raise DataError(
                f"{where} has the token id {max(ids)}, but the model's vocabulary has {vocab_size}; take the tokenizer "
                f"that belongs to the model"
            )
        num_cut += len(ids) > max_tokens
        rows.append(tuple(ids[:max_tokens]))
    if not rows:
        raise DataError(f"{path} has no line with a sequence; give it at least one")
    return Sequences(ids=tuple(rows), num_cut=num_cut)


class _Tokens:
    """Turns texts into token ids; the tokenizer is loaded for the first of them."""

    def __init__(self, tokenizer_of: Callable[[], PreTrainedTokenizerBase]) -> None:
        self._tokenizer_of = tokenizer_of
        self._tokenizer: Any = None

    def ids(self, row: Mapping[str, str]) -> list[int]:
        if self._tokenizer is None:
            self._tokenizer = self._tokenizer_of()
        if "text" in row:
            return self._tokenizer(row["text"])["input_ids"]
        prompt = self._tokenizer(row["prompt"])["input_ids"]
        return prompt + self._tokenizer(row["response"], add_special_tokens=False)["input_ids"]


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each line that is not blank, with its place."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}, line {number},"
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError as error:
                    raise DataError(f"{where} is not UTF-8: {error.reason} at byte {error.start}") from error
                if text:
                    yield where, text
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _text_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for where, line in _lines(path):
        yield where, {"text": line}


def _json_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for where, line in _lines(path):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where} is no JSON ({error}); {_RULE}") from error
        if not isinstance(row, dict):
            raise DataError(f"{where} is no JSON object, but {line[:60]!r}; {_RULE}")
        forms = [form for form in _FORMS if form & row.keys()]
        if len(forms) != 1 or not forms[0] <= row.keys():
            raise DataError(f"{where} has the keys {sorted(row)}; {_RULE}, and with one of the three")
        texts = {key: row[key] for key in forms[0] if key != "input_ids"}
        if wrong := [key for key, value in texts.items() if not isinstance(value, str)]:
            raise DataError(f"{where} has a {wrong[0]!r} that is no text, but {texts[wrong[0]]!r}; {_RULE}")
        yield where, texts or {"input_ids": row["input_ids"]}


def _checked_ids(where: str, ids: Any) -> list[int]:
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise DataError(f"{where} has 'input_ids' that are no list of whole numbers from 0; {_RULE}")
    return ids
