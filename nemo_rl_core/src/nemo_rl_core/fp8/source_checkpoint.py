# SPDX-License-Identifier: Apache-2.0
"""A HF folder that is to get FP8 KV scales: read by its index and its headers alone, and refused where it could not."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import ModelError
from nemo_rl_core.fp8.safetensors_header import read_header
from nemo_rl_core.fp8.scale_rounding import ScaleDtype
from nemo_rl_core.fp8.source_weights import require_usable_weights

__all__ = ["CONFIG_FILE", "INDEX_FILE", "RESULT_FILES", "SCALES_FILE", "SourceCheckpoint"]

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
#: The file with the scales.
SCALES_FILE = "model-kv-scales.safetensors"
#: What the result has of its own, whatever the model has under these names.
RESULT_FILES = (SCALES_FILE, "kv_scales.json", "report.md", "scales.svg")

_SCALE_ENDINGS = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale")
# Weights in other forms: an engine that finds them beside safetensors leaves them alone, and they are large.
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
_DTYPES = ("float32", "bfloat16", "float16")


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
        """Look at a folder, and refuse what could not be calibrated, or not be served with scales.

        Raises:
            ModelError: If the folder is missing or has no config or no safetensors, an index that contradicts its files
                or names files that are not plain ones of this folder, another quantisation than FP8 with
                ``weight_scale_inv``, or scales of a KV cache already.
        """
        if not folder.is_dir():
            raise ModelError(f"the model must be a local HF folder, got {str(folder)!r}, which is none")
        config = _read_json(folder / CONFIG_FILE)
        index = _checked_index(folder)
        _require_one_set(folder, index)
        dtypes = _tensor_dtypes(folder, index)
        _refuse_scales(folder, dtypes)
        require_usable_weights(folder, config, dtypes)
        return cls(folder=folder, config=config, index=index, kept_as=_kept_as(folder, config))

    @property
    def weight_files(self) -> tuple[str, ...]:
        """Names of the files that hold weights."""
        return tuple(sorted(set(self.index["weight_map"].values())))

    @property
    def other_files(self) -> tuple[str, ...]:
        """Names of the files that go along as they are: tokenizer, templates, licences."""
        taken = {CONFIG_FILE, INDEX_FILE, *RESULT_FILES}
        return tuple(
            path.name
            for path in sorted(self.folder.iterdir())
            if path.is_file() and path.name not in taken and path.suffix not in _OTHER_WEIGHTS
        )

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names in the folder that do not go along: folders, weights in other forms, and files that the result has."""
        goes = {CONFIG_FILE, INDEX_FILE, *self.weight_files, *self.other_files}
        return tuple(path.name for path in sorted(self.folder.iterdir()) if path.name not in goes)


def _checked_index(folder: Path) -> Mapping[str, Any]:
    """Return the index, with a map of tensors to plain files that are there."""
    where = f"{INDEX_FILE} of {str(folder)!r}"
    if (folder / INDEX_FILE).is_file():
        index = _read_json(folder / INDEX_FILE)
        if not isinstance(index.get("metadata"), dict):
            raise ModelError(
                f"{where} must have an object 'metadata', or transformers cannot load it; save the model again"
            )
    elif (folder / WEIGHTS_FILE).is_file():
        entries = read_header(folder / WEIGHTS_FILE)
        size = sum(entry.num_bytes for entry in entries.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(sorted(entries), WEIGHTS_FILE)}
        where = f"{WEIGHTS_FILE} of {str(folder)!r}"
    else:
        raise ModelError(
            f"{str(folder)!r} has neither {WEIGHTS_FILE} nor {INDEX_FILE}, and scales are added to safetensors alone; "
            f"save the model with save_pretrained first"
        )
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(
            f"{where} must name at least one tensor in 'weight_map', got {weight_map!r:.80}; save the model again"
        )
    # First, since a folder that has scales from here is no other mistake.
    _refuse_scales(folder, weight_map)
    for name in sorted({str(value) for value in weight_map.values()}):
        if name != Path(name).name or not name.endswith(".safetensors"):
            raise ModelError(
                f"{where} must name plain .safetensors files of its own folder, got {name[:80]!r}; save the model again, in "
                f"one folder"
            )
        if name == SCALES_FILE:
            raise ModelError(
                f"{where} names {name!r}, which the result has for its scales; rename that file of the model"
            )
        if not (folder / name).is_file():
            raise ModelError(f"{str(folder)!r} lacks {name!r}, which its index names; fetch the whole checkpoint")
    return index


def _refuse_scales(folder: Path, names: Iterable[str]) -> None:
    """Refuse a checkpoint that has scales of a KV cache: a second set would be a matter of order."""
    if scales := sorted(name for name in names if name.endswith(_SCALE_ENDINGS)):
        raise ModelError(
            f"{str(folder)!r} has scales of a KV cache already, the first {scales[0]!r}; give the checkpoint from "
            f"before they were added"
        )


def _require_one_set(folder: Path, index: Mapping[str, Any]) -> None:
    """Refuse a single file beside an index that names others: readers disagree on which of the two is the model."""
    others = sorted(set(index["weight_map"].values()) - {WEIGHTS_FILE})
    if others and (folder / WEIGHTS_FILE).exists():
        raise ModelError(
            f"{str(folder)!r} has two sets of weights: transformers loads {WEIGHTS_FILE}, and vLLM what {INDEX_FILE} names "
            f"({others[0]!r} is one of {len(others)}); move away the one that is out of date"
        )


def _tensor_dtypes(folder: Path, index: Mapping[str, Any]) -> dict[str, str]:
    """Return the dtype of each tensor of the files, and refuse an index that is not of these files.

    Tensors that the index does not name are there too: readers take whole files.
    """
    found: dict[str, str] = {}
    for file in sorted(set(index["weight_map"].values())):
        entries = read_header(folder / file)
        for name, where in index["weight_map"].items():
            if (where == file) != (name in entries):
                holds, lacks = ("the file", "the index") if name in entries else ("the index", "the file")
                raise ModelError(
                    f"{INDEX_FILE} and {file!r} of {str(folder)!r} contradict each other: {holds} has {name[:80]!r} there, "
                    f"and {lacks} has not; fetch or save the model again"
                )
        found |= {name: entry.dtype for name, entry in entries.items()}
    return found


def _kept_as(folder: Path, config: Mapping[str, Any]) -> ScaleDtype:
    """Return the dtype of scales in an engine that serves the result, and refuse a dtype that nobody can load."""
    text_config = config.get("text_config")
    sections = [config, text_config] if isinstance(text_config, dict) else [config]
    for section in sections:
        for key in ("dtype", "torch_dtype"):
            if section.get(key) not in (None, *_DTYPES):
                raise ModelError(
                    f"{str(folder / CONFIG_FILE)!r} must have one of {', '.join(_DTYPES)} under {key!r}, got "
                    f"{section[key]!r:.80}; write the one that its weights are in"
                )
    if not config.get("quantization_config"):
        return "float32"
    dtype = config.get("dtype", config.get("torch_dtype"))
    if dtype not in ("bfloat16", "float16"):
        raise ModelError(
            f"{str(folder)!r} has FP8 weights, whose engine keeps scales in the model's dtype, and its config.json says "
            f"{dtype!r}; write bfloat16 or float16 under 'dtype'"
        )
    return dtype


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{str(path)!r} cannot be read: {error}; the model must be a whole HF folder") from error
    if not isinstance(values, dict):
        raise ModelError(f"{str(path)!r} holds no JSON object; the model must be a whole HF folder")
    return values
