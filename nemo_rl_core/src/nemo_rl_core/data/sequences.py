# SPDX-License-Identifier: Apache-2.0
"""Token sequences from a file of texts: one on each line, plain or as JSON."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nemo_rl_core.errors import DataError, ModelError, text_of

__all__ = ["Sequences", "read_sequences", "text_tokenizer"]

_RULE = (
    'a line of a .jsonl file must be one JSON object with "text", with "prompt" and "response" (texts), or with '
    '"input_ids" (a list of token ids)'
)
_MOST_QUOTED = 80
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
    first without special tokens between them (no chat template is applied); or ``input_ids``. Other keys are left alone. ``.txt`` has a text on each
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
                f"{where} has the token id {_quoted(max(ids))}, but the model's vocabulary has {vocab_size}; take the tokenizer "
                f"that belongs to the model"
            )
        num_cut += len(ids) > max_tokens
        rows.append(tuple(ids[:max_tokens]))
    if not rows:
        raise DataError(f"{path} has no line with a sequence; give it at least one")
    return Sequences(ids=tuple(rows), num_cut=num_cut)


def text_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local HF folder for texts alone: it needs neither a padding nor an end token.

    Raises:
        ModelError: If the folder holds none that can be loaded.
    """
    try:
        # transformers annotates a union that includes None; at run time it is a tokenizer or an exception.
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # A tokenizer's files may break anything in there, and its Rust side raises the root class.
    except Exception as error:
        reason = " ".join(text_of(error).split())[:300]
        raise ModelError(
            f"no tokenizer could be loaded from {str(folder)!r}: {type(error).__name__}: {reason}; repair its files, or give "
            f"the data as input_ids"
        ) from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        # Of some families transformers makes an empty one where the files are missing.
        raise ModelError(
            f"the tokenizer in {str(folder)!r} knows no text: it has special tokens alone; add its files, or give the data as "
            f"input_ids"
        )
    return tokenizer


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
        return self._opening(row["prompt"]) + self._plain(row["response"])

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _opening(self, prompt: str) -> list[int]:
        """Return a prompt's tokens with the special ones before it, and without an end token after it."""
        ids, plain = self._tokenizer(prompt)["input_ids"], self._plain(prompt)
        for start in range(len(ids) - len(plain) + 1):
            if ids[start : start + len(plain)] == plain:
                return ids[: start + len(plain)]
        return ids


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
        except RecursionError as error:
            raise DataError(f"{where} is JSON that is nested too deeply to be read; {_RULE}") from error
        except ValueError as error:
            raise DataError(f"{where} is no JSON ({error}); {_RULE}") from error
        if not isinstance(row, dict):
            raise DataError(f"{where} is no JSON object, but {_quoted(row)}; {_RULE}")
        forms = [form for form in _FORMS if form & row.keys()]
        if len(forms) != 1 or not forms[0] <= row.keys():
            raise DataError(f"{where} has the keys {_quoted(sorted(row))}; {_RULE}, and with one of the three")
        texts = {key: row[key] for key in forms[0] if key != "input_ids"}
        for key, value in texts.items():
            if not isinstance(value, str):
                raise DataError(f"{where} has a {key!r} that is no text, but {_quoted(value)}; {_RULE}")
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise DataError(
                    f"{where} has a {key!r} with half of a character (a lone surrogate); write the text anew as UTF-8"
                )
        yield where, texts or {"input_ids": row["input_ids"]}


def _quoted(value: Any) -> str:
    """Return a value to show, shortened where it is long."""
    text = repr(value)
    return text if len(text) <= _MOST_QUOTED else f"{text[: _MOST_QUOTED - 3]}..."


def _checked_ids(where: str, ids: Any) -> list[int]:
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise DataError(f"{where} has 'input_ids' that are no list of whole numbers from 0; {_RULE}")
    return ids
