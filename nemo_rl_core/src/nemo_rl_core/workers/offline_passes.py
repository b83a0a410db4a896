# SPDX-License-Identifier: Apache-2.0
"""Calibration passes over a model that lies on disk, in this process alone."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from nemo_rl_core.data.batched_data_dict import BatchedDataDict
from nemo_rl_core.data.microbatches import plan_by_tokens
from nemo_rl_core.errors import ModelError, NemoRLError, text_of
from nemo_rl_core.fp8.calibration import ActivationObserver
from nemo_rl_core.protocols.settings import ModelSettings
from nemo_rl_core.workers.calibration import calibration_passes, observe_attention
from nemo_rl_core.workers.models import build_with_unexpected, empty_model, load_config

__all__ = ["calibration_settings", "load_for_calibration", "observe_sequences", "with_observable_attention"]

_NUM_REPORTS = 10
_LONGEST_ERROR = 400


def calibration_settings(folder: str) -> tuple[ModelSettings, PretrainedConfig]:
    """Return how a folder's model is loaded for a calibration, and its configuration.

    Weights in FP8 are taken back to the model's own dtype: its kernels for FP8 would have to be downloaded, and what the
    cache holds hardly depends on them.

    Raises:
        ModelError: As ``load_config``, and for whatever else a configuration's values break.
    """
    settings = ModelSettings(folder=folder, max_total_sequence_length=1)
    with _plain_errors("its config.json cannot be read"):
        config = load_config(settings)
        text_config = config.get_text_config()
    if not isinstance(getattr(text_config, "vocab_size", None), int):
        raise ModelError(f"the config.json of {folder!r} must have a whole number as vocab_size; save the model again")
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict):
        settings = replace(settings, overrides={"quantization_config": {**quantization, "dequantize": True}})
    return settings, config


def with_observable_attention(settings: ModelSettings) -> ModelSettings:
    """Return the settings with an attention that can be observed, whatever the configuration asks for.

    Tried on a model without storage, so it takes no memory.

    Raises:
        ModelError: If transformers has no causal LM of this configuration, or one whose attention no observer reaches.
    """
    config = load_config(settings)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"transformers has no causal LM for model_type {config.model_type!r}, which calibration passes need; take scales "
            f"from the engine's own tools, or keep this model's KV cache in bfloat16"
        )
    with _plain_errors("no model can be built from its config.json"):
        try:
            settings = replace(settings, attn_implementation="sdpa")
            model = empty_model(settings)
        except ValueError:
            # A family without sdpa has eager attention.
            settings = replace(settings, attn_implementation="eager")
            model = empty_model(settings)
    try:
        with observe_attention(model, ActivationObserver()):
            return settings
    except ModelError as error:
        raise ModelError(f"{error}, so no calibration sees its keys; keep this model's KV cache in bfloat16") from error


def load_for_calibration(settings: ModelSettings, device: Literal["cpu", "cuda"]) -> PreTrainedModel:
    """Load a model in the dtype of its checkpoint, in evaluation mode.

    Raises:
        ModelError: If it cannot be loaded, does not fit the device, or would leave tensors of its modules aside.
    """
    config = load_config(settings)
    named = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    dtype = named if isinstance(named, torch.dtype) else getattr(torch, named)
    # transformers wraps `to` in a way that hides its type.
    with _plain_errors("its weights cannot be loaded"):
        built, unexpected = build_with_unexpected(settings, dtype)
    _require_none_left_aside(built, unexpected)
    model: Any = built.eval()
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the model does not fit the memory of one GPU: {error}; calibrate on the CPU, or spread over several GPUs "
            f"with Policy.calibrate_qkv_fp8_scales"
        ) from error


def _require_none_left_aside(model: PreTrainedModel, unexpected: Iterable[str]) -> None:
    """Refuse tensors that belong to modules with weights, and that transformers would leave aside.

    Those of parts that the model does not build, like towers and layers for speculation, are nobody's here.
    """
    modules = dict(model.named_modules())
    lost = [name for name in unexpected if _has_weights(_owner(modules, name))]
    if lost:
        raise ModelError(
            f"modules of {type(model).__name__} do not know tensors that the checkpoint has for them ({len(lost)}, the first "
            f"{lost[0]!r}): they would run without, and differ from what is served; give the checkpoint that this class saves"
        )


def _owner(modules: Mapping[str, torch.nn.Module], tensor: str) -> torch.nn.Module:
    """Return the innermost module around a tensor; the root's name is empty."""
    name = tensor
    while name not in modules:
        name = name.rpartition(".")[0]
    return modules[name]


def _has_weights(module: torch.nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


@contextlib.contextmanager
def _plain_errors(what: str) -> Generator[None]:
    """Turn whatever transformers raises for odd values into one line."""
    try:
        yield
    except NemoRLError as error:
        raise ModelError(_one_line(error)) from error
    except Exception as error:  # a checkpoint's values may break anything in there
        raise ModelError(f"{what}: {type(error).__name__}: {_one_line(error)}; save the model again") from error


def _one_line(error: Exception) -> str:
    text = " ".join(text_of(error).split())
    return text if len(text) <= _LONGEST_ERROR else text[:_LONGEST_ERROR] + " ..."


def observe_sequences(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], *, batch_tokens: int, tell: Callable[[str], None]
) -> ActivationObserver:
    """Run a model over sequences, those of similar length together, and return what its attention was given.

    Args:
        model: The model, in evaluation mode.
        sequences: Token ids, none empty.
        batch_tokens: Padded tokens of one pass; a longer sequence runs alone.
        tell: Gets a line now and then.

    Raises:
        ModelError: If the model's attention cannot be observed, or a pass does not fit the device.
    """
    lengths = [len(row) for row in sequences]
    plan = plan_by_tokens(lengths, max(batch_tokens, *lengths))
    total, done, told = sum(lengths), 0, 0
    decoder = model.get_decoder()
    observer = ActivationObserver()
    with observe_attention(model, observer):
        for indices in plan:
            rows = [torch.tensor(sequences[i]) for i in indices]
            batch = BatchedDataDict(
                input_ids=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
                input_lengths=torch.tensor([lengths[i] for i in indices]),
            )
            try:
                calibration_passes(
                    # Without the head: nobody looks at logits, and they are the largest tensor.
                    lambda ids: decoder(input_ids=ids, use_cache=False),
                    batch.to(model.device),
                    [list(range(len(indices)))],
                    observer,
                )
            except torch.OutOfMemoryError as error:
                raise ModelError(
                    f"a pass of {len(indices)} sequences of up to {lengths[indices[0]]} tokens does not fit the GPU: "
                    f"{error}; lower --batch-tokens ({batch_tokens}) or --max-tokens"
                ) from error
            done += sum(lengths[i] for i in indices)
            if done * _NUM_REPORTS // total > told:
                told = done * _NUM_REPORTS // total
                tell(f"calibrating: {done:,} of {total:,} tokens ({100 * done // total} %)")
    return observer
