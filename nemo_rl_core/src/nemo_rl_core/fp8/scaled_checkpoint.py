# SPDX-License-Identifier: Apache-2.0
"""A checkpoint with FP8 KV scales: the files of a HF folder, and the scales where vLLM's loader finds them.

The weights are hard links to those of the model, or copies where the file system has no links. The scales stand in a
safetensors file of their own, entered in the index, under their live names. A model without quantisation gets a
compressed-tensors configuration that quantises nothing but the KV cache: that is what makes stock vLLM create the
parameters that the scales load into. They are float32 there. A model with FP8 weights (``quant_method: fp8``) has the
parameters already, in the model's own dtype.

It is written in two steps, since what is large and can fail comes before the passes, and the scales come after. No step
writes onto a file that is there, which may be a link to the model's own.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import DataError
from nemo_rl_core.fp8.source_checkpoint import CONFIG_FILE, INDEX_FILE, SCALES_FILE, SourceCheckpoint

__all__ = ["add_scales", "copy_checkpoint", "write_new"]

#: What vLLM and its kind read as "weights as they are, the KV cache in FP8 with static scales for each tensor".
_CACHE_ONLY: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "config_groups": {},
    "ignore": [],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
}
#: For the scales, the index, the report and the picture.
_ROOM_BYTES = 16 * 2**20


def copy_checkpoint(source: SourceCheckpoint, out: Path, tell: Callable[[str], None]) -> None:
    """Bring the model's files into an empty folder, all but its index and configuration.

    Args:
        source: The model; nothing in its folder is changed.
        out: An empty folder that exists.
        tell: Gets a line where weights have to be copied.

    Raises:
        DataError: If the file system has too little room.
        OSError: If something cannot be written.
    """
    weights = [name for name in source.weight_files if not _is_linked(source.folder / name, out / name)]
    names = [*weights, *source.other_files]
    needed = sum((source.folder / name).stat().st_size for name in names) + _ROOM_BYTES
    free = shutil.disk_usage(out).free
    if needed > free:
        raise DataError(
            f"the output needs {needed / 1e9:.2f} GB, of which {len(weights)} files of weights that cannot be linked are a "
            f"part, and its file system has {free / 1e9:.2f} GB free; give a folder with more room, or one on the model's "
            f"file system"
        )
    if weights:
        tell(f"copying {len(weights)} files of weights ({needed / 1e9:.1f} GB): no hard links from there to the output")
    for name in names:
        with (source.folder / name).open("rb") as file, (out / name).open("xb") as copy:
            shutil.copyfileobj(file, copy, 2**24)


def add_scales(source: SourceCheckpoint, out: Path, scales: Mapping[str, float]) -> None:
    """Write what makes the copied files a checkpoint with scales: the scales, the index and the configuration.

    Args:
        source: The model.
        out: The folder that ``copy_checkpoint`` has filled.
        scales: Live name to scale, as ``source.kept_as`` can hold it.

    Raises:
        OSError: If something cannot be written, or is there already.
    """
    write_new(out / SCALES_FILE, _scalars(scales))
    index = {
        **source.index,
        "metadata": _with_size(source.index["metadata"], 4 * len(scales)),
        "weight_map": {**source.index["weight_map"], **dict.fromkeys(scales, SCALES_FILE)},
    }
    write_new(out / INDEX_FILE, _json(index))
    config = dict(source.config)
    if not config.get("quantization_config"):
        config["quantization_config"] = _CACHE_ONLY
    write_new(out / CONFIG_FILE, _json(config))


def write_new(path: Path, contents: str | bytes) -> None:
    """Write a file that is not there yet.

    Raises:
        OSError: If it is there, or cannot be written.
    """
    with path.open("xb") as file:
        file.write(contents.encode() if isinstance(contents, str) else contents)


def _scalars(values: Mapping[str, float]) -> bytes:
    """Return a safetensors file of float32 tensors with one element each."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for number, name in enumerate(values):
        header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [4 * number, 4 * number + 4]}
    text = json.dumps(header).encode()
    # The tensors begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + struct.pack(f"<{len(values)}f", *values.values())


def _is_linked(source: Path, target: Path) -> bool:
    """Link a file, if that works; a link of a link, as in a download cache, would point nowhere from another folder."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        # Another file system, one without links, or another owner's file.
        return False
    return True


def _with_size(metadata: Mapping[str, Any], more: int) -> dict[str, Any]:
    known = dict(metadata)
    return {**known, "total_size": known["total_size"] + more} if isinstance(known.get("total_size"), int) else known


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"
