# SPDX-License-Identifier: Apache-2.0
"""The small files of a HF folder on their way to a node that does not have the folder: config and tokenizer."""

import contextlib
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from nemo_rl_core.errors import ModelError
from nemo_rl_core.protocols.settings import GenerationSettings

__all__ = ["LARGEST_FOLDER_BYTES", "is_sent", "local_folders", "read_folder"]

#: Most that is sent of one folder. The largest tokenizers have some 35 MB.
LARGEST_FOLDER_BYTES: Final = 64 * 2**20

#: What configs and tokenizers of transformers consist of. Nothing else leaves the driver: no weights, no optimizer
#: states, and nothing that merely lies there.
_NAMES: Final = frozenset(
    {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        *(
            "chat_template.json",
            "special_tokens_map.json",
            "added_tokens.json",
            "vocab.json",
            "vocab.txt",
            "merges.txt",
        ),
        *("normalizer.json", "source.spm", "target.spm", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    }
)
_SUFFIXES: Final = (".model", ".tiktoken")


def is_sent(name: str) -> bool:
    """Say whether a file of that name belongs to a config or a tokenizer."""
    return name in _NAMES or name.endswith(_SUFFIXES)


def read_folder(folder: str) -> dict[str, bytes]:
    """Read what a generation worker needs of a HF folder.

    Args:
        folder: A local folder.

    Returns:
        File name to contents, in the order of the names.

    Raises:
        ModelError: If the folder or a file cannot be read, or they are too large to be sent.
    """
    try:
        paths = sorted(path for path in Path(folder).iterdir() if is_sent(path.name) and path.is_file())
        size = sum(path.stat().st_size for path in paths)
        if size > LARGEST_FOLDER_BYTES:
            largest = max(paths, key=lambda path: path.stat().st_size)
            raise ModelError(
                f"config and tokenizer in {folder!r} have {size} bytes, and at most {LARGEST_FOLDER_BYTES} are sent to "
                f"generation nodes; the largest file is {largest.name!r}: is it a tokenizer's?"
            )
        return {path.name: path.read_bytes() for path in paths}
    except OSError as error:
        raise ModelError(f"config and tokenizer in {folder!r} cannot be read: {error}") from error


@contextlib.contextmanager
def local_folders(settings: GenerationSettings) -> Generator[GenerationSettings]:
    """Write the files that the settings bring into private folders, for as long as the block runs.

    A generation worker builds config and tokenizer in it, whether or not its node has the folders of the driver.

    Args:
        settings: What the worker was told.

    Yields:
        The same settings, with the private folders in place of the driver's; unchanged where no files were brought.

    Raises:
        ModelError: If a file's name is not one that is sent.
    """
    with tempfile.TemporaryDirectory(prefix="nemo-rl-files-") as root:
        moved = {}
        for number, (folder, files) in enumerate(sorted(settings.files.items())):
            moved[folder] = str(_write(Path(root) / str(number), files))
        model, tokenizer = settings.model, settings.tokenizer
        if model.folder in moved:
            model = replace(model, folder=moved[model.folder])
        if tokenizer.folder in moved:
            tokenizer = replace(tokenizer, folder=moved[tokenizer.folder])
        yield replace(settings, model=model, tokenizer=tokenizer)


def _write(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Make a folder with these files; a name with a separator in it is none that was read from a folder."""
    folder.mkdir()
    for name, contents in files.items():
        if not is_sent(name) or Path(name).name != name:
            raise ModelError(f"a file named {name!r} is no part of a config or a tokenizer; it is not written")
        (folder / name).write_bytes(contents)
    return folder
