# SPDX-License-Identifier: Apache-2.0
"""Calibration passes over a model that lies on disk, in this process alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from transformers import PretrainedConfig, PreTrainedModel

from nemo_rl_core.data.batched_data_dict import BatchedDataDict
from nemo_rl_core.data.microbatches import plan_by_tokens
from nemo_rl_core.errors import ModelError
from nemo_rl_core.fp8.calibration import ActivationObserver
from nemo_rl_core.protocols.settings import ModelSettings
from nemo_rl_core.workers.calibration import calibration_passes, observe_attention
from nemo_rl_core.workers.models import build_model, load_config

__all__ = ["calibration_settings", "load_for_calibration", "observe_sequences"]

_NUM_REPORTS = 10


def calibration_settings(folder: str) -> tuple[ModelSettings, PretrainedConfig]:
    """Return how a folder's model is loaded for a calibration, and its configuration.

    Weights in FP8 are taken back to the model's own dtype: its kernels for FP8 would have to be downloaded, and what the
    cache holds hardly depends on them.

    Raises:
        ModelError: As ``load_config``.
    """
    settings = ModelSettings(folder=folder, max_total_sequence_length=1)
    config = load_config(settings)
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict):
        settings = replace(settings, overrides={"quantization_config": {**quantization, "dequantize": True}})
    return settings, config


def load_for_calibration(settings: ModelSettings, device: Literal["cpu", "cuda"]) -> PreTrainedModel:
    """Load a model in the dtype of its checkpoint, in evaluation mode.

    Raises:
        ModelError: If it cannot be loaded, or does not fit the device.
    """
    config = load_config(settings)
    named = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    dtype = named if isinstance(named, torch.dtype) else getattr(torch, named)
    # transformers wraps `to` in a way that hides its type.
    model: Any = build_model(settings, dtype).eval()
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the model does not fit the memory of one GPU: {error}; calibrate on the CPU, or spread over several GPUs "
            f"with Policy.calibrate_qkv_fp8_scales"
        ) from error


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
