# SPDX-License-Identifier: Apache-2.0
"""From a model and a file of texts to a checkpoint that an engine serves with an FP8 KV cache."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nemo_rl_core import __version__
from nemo_rl_core.data.sequences import Sequences, read_sequences
from nemo_rl_core.data.tokenizers import load_tokenizer
from nemo_rl_core.errors import DataError
from nemo_rl_core.fp8.calibration import DEFAULT_MARGIN
from nemo_rl_core.fp8.calibration_report import report_text, rows_of
from nemo_rl_core.fp8.calibration_result import CalibrationRequest, describe_hf_model
from nemo_rl_core.fp8.model_description import ModelDescription
from nemo_rl_core.fp8.scale_picture import scale_picture
from nemo_rl_core.fp8.scaled_checkpoint import SourceCheckpoint, write_scaled_checkpoint
from nemo_rl_core.workers.offline_passes import calibration_settings, load_for_calibration, observe_sequences

__all__ = ["CalibrationJob", "calibrate_folder"]


@dataclass(frozen=True, kw_only=True)
class CalibrationJob:
    """What to calibrate, on what, and where the result goes.

    Attributes:
        model: Local HF folder with safetensors; nothing in it is changed.
        data: A .jsonl or .txt file; see ``read_sequences``.
        out: Folder of the result; must not exist, or be empty.
        percentile: Of the magnitudes of all activations of a layer and kind; 100 is their maximum.
        margin: Headroom over it, from 1.
        include_q: Whether q gets scales too.
        max_tokens: Longest sequence; longer ones lose their end. None for the model's context.
        batch_tokens: Padded tokens of one pass.
        device: ``auto`` takes a GPU where there is one.
        description: Which live modules have scales, for an architecture that ``describe_model`` does not know.
    """

    model: Path
    data: Path
    out: Path
    percentile: float = 100.0
    margin: float = DEFAULT_MARGIN
    include_q: bool = False
    max_tokens: int | None = None
    batch_tokens: int = 8192
    device: Literal["auto", "cpu", "cuda"] = "auto"
    description: ModelDescription | None = None


def calibrate_folder(job: CalibrationJob, tell: Callable[[str], None]) -> dict[str, Any]:
    """Calibrate a model and write its checkpoint with scales, the scales alone, a report and a picture.

    What can be refused is refused before the model is loaded. The folder appears whole, in one step, or not at all.

    Args:
        job: What to do.
        tell: Gets lines on the progress.

    Returns:
        What ``kv_scales.json`` holds.

    Raises:
        ModelError: If the model cannot be read, is not known, or cannot be served with scales from a checkpoint; or if an
            activation is not finite.
        DataError: If the data is malformed, or the output folder holds something or cannot be written.
        ScaleNameError: If the engine loads no scales of this model from a checkpoint.
    """
    _require_free(job)
    source = SourceCheckpoint.read(job.model)
    settings, config = calibration_settings(str(job.model))
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type)
    request = CalibrationRequest(
        model=job.description or describe_hf_model(config, class_name),
        percentile=job.percentile,
        margin=job.margin,
        include_q=job.include_q,
        kept_as=source.kept_as,
    )
    request.model.checkpoint_names(include_q=job.include_q)
    device = _device(job.device)
    sequences = _read_data(job, config.get_text_config())
    tell(f"{len(sequences.ids):,} sequences, {sequences.num_tokens:,} tokens, {sequences.num_cut:,} cut to the limit")
    tell(f"loading {job.model} on {device}")
    model = load_for_calibration(settings, device)
    observer = observe_sequences(model, sequences.ids, batch_tokens=job.batch_tokens, tell=tell)
    record: dict[str, Any] = {
        **request.result(observer),
        "include_q": job.include_q,
        "kept_as": source.kept_as,
        "model": {**asdict(request.model), "folder": job.model.resolve().name, "dtype": str(model.dtype)[6:]},
        "data": {
            "file": job.data.name,
            "sequences": len(sequences.ids),
            "tokens": sequences.num_tokens,
            "cut": sequences.num_cut,
        },
        "device": device,
        "versions": {
            "nemo-rl-core": __version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
    }
    with _whole_or_not_at_all(job.out) as folder:
        write_scaled_checkpoint(source, folder, record["layers"])
        (folder / "kv_scales.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        (folder / "report.md").write_text(report_text(record, _facts(record), sequences.num_tokens), encoding="utf-8")
        (folder / "scales.svg").write_text(_picture(request.model, record), encoding="utf-8")
    return record


def _require_free(job: CalibrationJob) -> None:
    """Refuse an output folder that holds something, or that lies in the model's own."""
    out = job.out.resolve()
    if out.is_relative_to(job.model.resolve()):
        raise DataError(f"the output folder {str(job.out)!r} must lie outside of the model's, which is not changed")
    try:
        filled = next(out.iterdir(), None) if out.exists() else None
    except OSError as error:
        raise DataError(f"the output {str(job.out)!r} must be a folder that can be written: {error}") from error
    if filled is not None:
        raise DataError(
            f"the output folder {str(job.out)!r} must be new or empty, so that nothing is overwritten; it holds "
            f"{filled.name!r}"
        )


def _device(device: str) -> Literal["cpu", "cuda"]:
    if device == "cuda" and not torch.cuda.is_available():
        raise DataError("--device cuda needs an NVIDIA GPU, and torch sees none; use --device cpu")
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def _read_data(job: CalibrationJob, config: Any) -> Sequences:
    context = getattr(config, "max_position_embeddings", None)
    limits = [limit for limit in (job.max_tokens, context) if isinstance(limit, int)]
    return read_sequences(
        job.data,
        lambda: load_tokenizer(str(job.model)),
        vocab_size=config.vocab_size,
        max_tokens=min(limits, default=2**31),
    )


@contextlib.contextmanager
def _whole_or_not_at_all(out: Path) -> Generator[Path]:
    """Give a folder beside the output's place, and move it there when the block is through; else leave nothing.

    Raises:
        DataError: If something cannot be written.
    """
    folder = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        yield folder
        # An empty folder there is replaced, one that was filled meanwhile is not.
        folder.rename(out)
    except OSError as error:
        raise DataError(f"the output folder {str(out)!r} cannot be written: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _facts(record: dict[str, Any]) -> dict[str, str]:
    """Return what the head of the report lists."""
    data, model = record["data"], record["model"]
    return {
        "model": f"{model['folder']} ({model['architecture']}, run in {model['dtype']} on {record['device']})",
        "data": f"{data['file']}: {data['sequences']:,} sequences, {data['tokens']:,} tokens, {data['cut']:,} cut",
        "percentile": f"{record['percentile']:g} of the magnitudes of a layer and kind",
        "margin": f"{record['margin']:g}",
        "scales": f"{len(record['layers'])}, kept as {record['kept_as']} by the engine",
        "q": "calibrated too" if record["include_q"] else "not calibrated: the engine runs it at 1.0 where it reads it",
        "versions": ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        "to serve it": "`vllm serve` this folder with `--kv-cache-dtype fp8`",
    }


def _picture(model: ModelDescription, record: dict[str, Any]) -> str:
    numbers = {block.owner(layer): layer for block in model.blocks for layer in block.layers}
    title = f"{record['model']['folder']}: FP8 scales by layer"
    return scale_picture(rows_of(record), numbers, title)
