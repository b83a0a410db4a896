# SPDX-License-Identifier: Apache-2.0
"""The FP8 scales of the engine's KV cache over a run: declared at first, then calibrated on what was trained on."""

from collections.abc import Mapping
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nemo_rl_core.config.generation import KvScalesSection
from nemo_rl_core.data.batched_data_dict import BatchedDataDict
from nemo_rl_core.fp8.blockwise import E4M3_MAX
from nemo_rl_core.fp8.calibration_result import CalibrationRequest, describe_hf_model
from nemo_rl_core.fp8.model_description import ModelDescription
from nemo_rl_core.policy.policy import Policy
from nemo_rl_core.protocols.settings import ModelSettings
from nemo_rl_core.workers.models import load_config

__all__ = ["KvScales", "describe_attention"]


def describe_attention(model: ModelSettings, settings: KvScalesSection) -> ModelDescription:
    """Say which modules of the engine will get scales, and refuse what no calibration could answer.

    Raises:
        ModelError: If the model's architecture is not known, or its cache can't be calibrated (MLA, cross-attention).
        DataError: If percentile or margin is out of range.
    """
    config = load_config(model)
    attention = describe_hf_model(config, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type))
    CalibrationRequest(
        model=attention, percentile=settings.percentile, margin=settings.margin, include_q=settings.include_q
    )
    return attention


class KvScales:
    """What the next refit brings, and how the scales before fared."""

    def __init__(self, attention: ModelDescription, settings: KvScalesSection) -> None:
        """Start with the declared scale everywhere.

        Args:
            attention: The engine's modules, as ``describe_attention`` gives them.
            settings: How to calibrate.
        """
        self._attention = attention
        self._settings = settings
        #: Scales by live name.
        self.current: dict[str, float] = dict.fromkeys(attention.names(include_q=settings.include_q), settings.initial)
        self._is_calibrated = False

    def calibrate(self, policy: Policy, batch: BatchedDataDict, step: int) -> dict[str, float]:
        """Calibrate on a batch where it is time to, under the weights that the next refit moves.

        Args:
            policy: The train side, after its optimizer steps.
            batch: What it was trained on: prompts with the responses that were sampled under ``current``.
            step: Number of the step, from 1.

        Returns:
            Metrics: of the calibration, where this step has one, and whether the scales are calibrated.

        Raises:
            WorkerError: If a layer's activations give no scale; the cause names it.
        """
        settings = self._settings
        if (step - 1) % settings.calibration_period:
            return self.status()
        result = policy.calibrate_qkv_fp8_scales(
            batch,
            percentile=settings.percentile,
            margin=settings.margin,
            include_q=settings.include_q,
            previous=self.current,
            model=self._attention,
        )
        metrics = _metrics(result, self.current)
        self.current, self._is_calibrated = dict(result["layers"]), True
        return metrics | self.status()

    def status(self) -> dict[str, float]:
        """Return as a metric whether the scales are calibrated (1) or still the declared one (0)."""
        return {"calibrated": float(self._is_calibrated)}


def _metrics(result: Mapping[str, Any], previous: Mapping[str, float]) -> dict[str, float]:
    """Return how the scales that the batch was sampled under fare on it now, at their worst, and the new ones' range."""
    headroom = [
        E4M3_MAX * previous[f"{owner}.{kind}_scale"] / amax
        for owner, kinds in result["amax"].items()
        for kind, amax in kinds.items()
        if f"{owner}.{kind}_scale" in previous
    ]
    drift = [rates for kinds in result["drift"].values() for rates in kinds.values()]
    return {
        "saturated": max(rates["saturated"] for rates in drift),
        "subnormal": max(rates["subnormal"] for rates in drift),
        "headroom": min(headroom),
        "smallest": min(result["layers"].values()),
        "largest": max(result["layers"].values()),
    }
