# SPDX-License-Identifier: Apache-2.0
"""A checkpoint with FP8 KV scales: the files of a HF folder, and the scales where vLLM's loader finds them.

The weights are hard links to those of the model, or copies where the file system has no links. The scales stand in a
safetensors file of their own, entered in the index, under their live names. A model without quantisation gets a
compressed-tensors configuration that quantises nothing but the KV cache: that is what makes stock vLLM create the
parameters that the scales load into. They are float32 there. A model with FP8 weights (``quant_method: fp8``) has the
parameters already, in the model's own dtype.
"""

import json
import os
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import ModelError
from nemo_rl_core.fp8.scale_rounding import ScaleDtype

__all__ = ["SCALES_FILE", "SourceCheckpoint", "write_scaled_checkpoint"]

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
#: The file with the scales.
SCALES_FILE = "model-kv-scales.safetensors"

#: What vLLM and its kind read as "weights as they are, the KV cache in FP8 with static scales for each tensor".
_CACHE_ONLY: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "config_groups": {},
    "ignore": [],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
}
_SCALE_ENDINGS = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale")
# Weights in other forms: an engine that finds them beside safetensors leaves them alone, and they are large.
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
# The header of a safetensors file names its tensors; the longest ones known have a few MB.
_LONGEST_HEADER = 2**28


@dataclass(frozen=True, kw_only=True)
class SourceCheckpoint:
    """A HF folder that can get scales.

    Attributes:
        folder: The folder.
        config: What ``config.json`` holds.
        index: What the index of the weights holds or would hold: ``metadata`` and ``weight_map``.
        kept_as: What an engine keeps scales in that it loads from the result.
    """

    folder: Path
    config: Mapping[str, Any]
    index: Mapping[str, Any]
    kept_as: ScaleDtype

    @classmethod
    def read(cls, folder: Path) -> "SourceCheckpoint":
        """Look at a folder, and refuse what could not be served with scales.

        Raises:
            ModelError: If the folder is missing or has no config or no safetensors, has another quantisation than FP8,
                or has scales of a KV cache already.
        """
        if not folder.is_dir():
            raise ModelError(f"the model must be a local HF folder, got {str(folder)!r}, which is none")
        config = _read_json(folder / CONFIG_FILE)
        if (folder / INDEX_FILE).is_file():
            index = _read_json(folder / INDEX_FILE)
        elif (folder / WEIGHTS_FILE).is_file():
            index = _index_of(folder / WEIGHTS_FILE)
        else:
            raise ModelError(
                f"{str(folder)!r} has neither {WEIGHTS_FILE} nor {INDEX_FILE}, and scales are added to safetensors alone; "
                f"save the model with save_pretrained first"
            )
        if not isinstance(index.get("weight_map"), dict):
            raise ModelError(f"{INDEX_FILE} of {str(folder)!r} has no 'weight_map'; save the model again")
        if lost := [name for name in set(index["weight_map"].values()) if not (folder / name).is_file()]:
            raise ModelError(f"{str(folder)!r} lacks {lost[0]!r}, which its index names; fetch the whole checkpoint")
        if scales := sorted(name for name in index["weight_map"] if name.endswith(_SCALE_ENDINGS)):
            raise ModelError(
                f"{str(folder)!r} has scales of a KV cache already, the first {scales[0]!r}; give the checkpoint from "
                f"before they were added"
            )
        return cls(folder=folder, config=config, index=index, kept_as=_kept_as(folder, config))

    @property
    def weight_files(self) -> tuple[str, ...]:
        """Names of the files that hold weights."""
        return tuple(sorted(set(self.index["weight_map"].values())))


def write_scaled_checkpoint(source: SourceCheckpoint, out: Path, scales: Mapping[str, float]) -> None:
    """Write the checkpoint into an empty folder. Nothing in the model's folder is changed.

    Args:
        source: The model.
        out: An empty folder that exists.
        scales: Live name to scale, as ``source.kept_as`` can hold it.

    Raises:
        OSError: If something cannot be written.
    """
    taken = {CONFIG_FILE, INDEX_FILE, SCALES_FILE}
    for name in source.weight_files:
        _link(source.folder / name, out / name)
    for path in sorted(source.folder.iterdir()):
        if path.is_file() and path.name not in taken and path.suffix not in _OTHER_WEIGHTS:
            shutil.copyfile(path, out / path.name)
    (out / SCALES_FILE).write_bytes(_scalars(scales))
    index = {
        **source.index,
        "metadata": _with_size(source.index.get("metadata"), 4 * len(scales)),
        "weight_map": {**source.index["weight_map"], **dict.fromkeys(scales, SCALES_FILE)},
    }
    _write_json(out / INDEX_FILE, index)
    config = dict(source.config)
    if not config.get("quantization_config"):
        config["quantization_config"] = _CACHE_ONLY
    _write_json(out / CONFIG_FILE, config)


def _kept_as(folder: Path, config: Mapping[str, Any]) -> ScaleDtype:
    """Return the dtype of scales in an engine that serves the result."""
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if not quantization:
        return "float32"
    if method != "fp8":
        raise ModelError(
            f"{str(folder)!r} is quantised by {method!r}; scales can be added to models without quantisation and to those "
            f"with quant_method 'fp8'. Calibrate the model that it was made from, and serve that one"
        )
    dtype = config.get("dtype", config.get("torch_dtype"))
    if dtype not in ("bfloat16", "float16"):
        raise ModelError(
            f"{str(folder)!r} has FP8 weights, whose engine keeps scales in the model's dtype, and its config.json says "
            f"{dtype!r}; write bfloat16 or float16 under 'dtype'"
        )
    return dtype


def _index_of(path: Path) -> dict[str, Any]:
    """Make the index of a single file."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        try:
            header = json.loads(file.read(length)) if 0 < length < _LONGEST_HEADER else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise ModelError(f"{str(path)!r} is no safetensors file: it has no header; save the model again")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    size = sum(end - begin for begin, end in (entry["data_offsets"] for entry in tensors.values()))
    return {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(sorted(tensors), path.name)}


def _scalars(values: Mapping[str, float]) -> bytes:
    """Return a safetensors file of float32 tensors with one element each."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for number, name in enumerate(values):
        header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [4 * number, 4 * number + 4]}
    text = json.dumps(header).encode()
    # The tensors begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + struct.pack(f"<{len(values)}f", *values.values())


def _link(source: Path, target: Path) -> None:
    """Link a file or copy it; a link of a link, as in a download cache, would point nowhere from another folder."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        # Another file system, one without links, or another owner's file.
        shutil.copyfile(source, target)


def _with_size(metadata: Any, more: int) -> dict[str, Any]:
    known = dict(metadata) if isinstance(metadata, dict) else {}
    return {**known, "total_size": known["total_size"] + more} if isinstance(known.get("total_size"), int) else known


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{str(path)!r} cannot be read: {error}; the model must be a whole HF folder") from error
    if not isinstance(values, dict):
        raise ModelError(f"{str(path)!r} holds no JSON object; the model must be a whole HF folder")
    return values


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
