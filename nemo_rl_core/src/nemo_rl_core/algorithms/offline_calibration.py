# SPDX-License-Identifier: Apache-2.0
"""From a model and a file of texts to a checkpoint that an engine serves with an FP8 KV cache."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nemo_rl_core import __version__
from nemo_rl_core.algorithms.output_folder import OutputFolder, require_free_place
from nemo_rl_core.data.sequences import Sequences, read_sequences, text_tokenizer
from nemo_rl_core.errors import DataError
from nemo_rl_core.fp8.calibration import DEFAULT_MARGIN
from nemo_rl_core.fp8.calibration_report import report_text, rows_of
from nemo_rl_core.fp8.calibration_result import CalibrationRequest, describe_hf_model
from nemo_rl_core.fp8.model_description import ModelDescription
from nemo_rl_core.fp8.scale_picture import scale_picture
from nemo_rl_core.fp8.scaled_checkpoint import add_scales, copy_checkpoint, write_new
from nemo_rl_core.fp8.source_checkpoint import SourceCheckpoint
from nemo_rl_core.workers.offline_passes import (
    calibration_settings,
    load_for_calibration,
    observe_sequences,
    with_observable_attention,
)

__all__ = ["CalibrationJob", "calibrate_folder"]

#: Below it most of a cache would saturate: it is a share (0.999) given for a percentage, or a slip.
_LEAST_PERCENTILE = 50
_MOST_NAMES = 5


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

    What can be refused is refused before the model is loaded, and the model's files are brought to the output before it
    too. The folder appears whole, in one step, or not at all.

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
    _require_percentile(job.percentile)
    require_free_place(job.out, job.model)
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
    settings = with_observable_attention(settings)
    device = _device(job.device)
    sequences = _read_data(job, config.get_text_config())
    count = "1 sequence" if len(sequences.ids) == 1 else f"{len(sequences.ids):,} sequences"
    tell(f"{count}, {sequences.num_tokens:,} tokens, {sequences.num_cut:,} cut to the limit")
    with OutputFolder.claim(job.out) as place:
        try:
            copy_checkpoint(source, place.folder, tell)
        except OSError as error:
            raise DataError(
                f"the output folder {str(job.out)!r} cannot be filled: {error}; nothing was calibrated"
            ) from error
        if source.left_out:
            tell(f"not taken along from {job.model}: {_listed(source.left_out)}")
        tell(f"loading {job.model} on {device}")
        model = load_for_calibration(settings, device)
        observer = observe_sequences(model, sequences.ids, batch_tokens=job.batch_tokens, tell=tell)
        result = request.result(observer)
        ran = {"device": device, "dtype": str(model.dtype)[6:]}
        record = {**result, **_circumstances(job, source, request, sequences, **ran)}
        _finish(place, source, request.model, record, job.out)
    return record


def _circumstances(
    job: CalibrationJob,
    source: SourceCheckpoint,
    request: CalibrationRequest,
    sequences: Sequences,
    *,
    device: str,
    dtype: str,
) -> dict[str, Any]:
    """Return what a record says besides the result: what was calibrated, on what, by what."""
    return {
        "include_q": job.include_q,
        "kept_as": source.kept_as,
        "model": {**asdict(request.model), "folder": job.model.resolve().name, "dtype": dtype},
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


def _finish(
    place: OutputFolder, source: SourceCheckpoint, model: ModelDescription, record: dict[str, Any], out: Path
) -> None:
    """Write what came out, and move the folder to its place; where that fails, save at least the scales.

    Raises:
        DataError: If it fails; it says where the scales are.
    """
    scales = json.dumps(record, indent=2) + "\n"
    try:
        add_scales(source, place.folder, record["layers"])
        write_new(place.folder / "kv_scales.json", scales)
        write_new(place.folder / "report.md", report_text(record, _facts(record), record["data"]["tokens"]))
        write_new(place.folder / "scales.svg", _picture(model, record))
        place.publish()
    except OSError as error:
        # First, since its copies may be what fills the file system.
        place.discard()
        saved = place.rescue("kv_scales.json", scales)
        kept = (
            f"the scales are in {str(saved)!r}"
            if saved
            else "the scales could not be saved either: the calibration is lost"
        )
        raise DataError(f"the output folder {str(out)!r} cannot be written: {error}; {kept}") from error


def _require_percentile(percentile: float) -> None:
    """Refuse what would cut most of a cache off, above all a share where a percentage is asked for."""
    if 0 < percentile <= 1:
        raise DataError(
            f"percentile must be from {_LEAST_PERCENTILE} to 100, got {percentile!r}; did you mean {100 * percentile:g}?"
        )
    if not _LEAST_PERCENTILE <= percentile <= 100:
        raise DataError(
            f"percentile must be from {_LEAST_PERCENTILE} to 100, got {percentile!r}: all values above it saturate; 100 takes "
            f"the largest, and 99.9 leaves a thousandth of them out"
        )


def _listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"


def _device(device: str) -> Literal["cpu", "cuda"]:
    if device == "cuda" and not torch.cuda.is_available():
        raise DataError("--device cuda needs an NVIDIA GPU, and torch sees none; use --device cpu")
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def _read_data(job: CalibrationJob, config: Any) -> Sequences:
    context = getattr(config, "max_position_embeddings", None)
    limits = [limit for limit in (job.max_tokens, context) if isinstance(limit, int)]
    return read_sequences(
        job.data,
        lambda: text_tokenizer(job.model),
        vocab_size=config.vocab_size,
        max_tokens=min(limits, default=2**31),
    )


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
