# SPDX-License-Identifier: Apache-2.0
"""The FP8 scales of the engine's KV cache over a run: declared at first, then calibrated on what was trained on."""

import warnings
from collections.abc import Mapping
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nemo_rl_core.config.generation import KvScalesSection
from nemo_rl_core.data.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ModelError
from nemo_rl_core.fp8.blockwise import E4M3_MAX
from nemo_rl_core.fp8.calibration import ActivationObserver
from nemo_rl_core.fp8.calibration_result import CalibrationRequest, describe_hf_model
from nemo_rl_core.fp8.model_description import ModelDescription
from nemo_rl_core.policy.policy import Policy
from nemo_rl_core.protocols.settings import ModelSettings
from nemo_rl_core.workers.calibration import observe_attention
from nemo_rl_core.workers.models import check_model, empty_model, load_config

__all__ = ["KvScales", "describe_attention"]

#: Share of the values of a layer that may saturate before it is told.
_MAX_SATURATED = 0.001


def describe_attention(model: ModelSettings, settings: KvScalesSection) -> ModelDescription:
    """Say which modules of the engine will get scales, and refuse what no calibration could answer.

    Raises:
        ModelError: If the model's architecture is not known, or its cache can't be calibrated: MLA, cross-attention, or
            attention that transformers' interface does not reach.
        DataError: If percentile or margin is out of range.
    """
    check_model(model, tokenizer_size=0)
    config = load_config(model)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type)
    try:
        attention = describe_hf_model(config, name)
        CalibrationRequest(
            model=attention, percentile=settings.percentile, margin=settings.margin, include_q=settings.include_q
        )
        with observe_attention(empty_model(model), ActivationObserver()):
            pass
    except ModelError as error:
        # A run has no place for a description by hand, which these errors point to.
        raise ModelError(
            f"an FP8 KV cache needs scales that nobody can calibrate for this model: {error}. In a run, keep the cache in the "
            "model's precision (vllm_cfg.kv_cache_dtype: auto)"
        ) from error
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
        #: What the last refit brought; None before the first.
        self._live: dict[str, float] | None = None

    def arrived(self) -> None:
        """Note that a refit has brought ``current``."""
        self._live = dict(self.current)

    def is_due(self, step: int) -> bool:
        """Say whether a step, counted from 1, ends with a calibration."""
        return (step - 1) % self._settings.calibration_period == 0

    def calibrate(self, policy: Policy, batch: BatchedDataDict) -> dict[str, float]:
        """Calibrate on a batch, under the weights that the next refit moves.

        Args:
            policy: The train side, after its optimizer steps.
            batch: What it was trained on: prompts with the responses that were sampled under the last refit's scales.

        Returns:
            Metrics.

        Raises:
            WorkerError: If a layer's activations give no scale; the cause names it.
        """
        settings = self._settings
        result = policy.calibrate_qkv_fp8_scales(
            batch,
            percentile=settings.percentile,
            margin=settings.margin,
            include_q=settings.include_q,
            previous=self._live,
            model=self._attention,
        )
        self.current, self._is_calibrated = dict(result["layers"]), True
        metrics = _range_metrics(result)
        if self._live is not None:
            metrics |= _drift_metrics(result, self._live)
            self._warn(metrics["saturated"])
        return metrics | self.status()

    def _warn(self, saturated: float) -> None:
        """Tell the user that the policy has outgrown its scales; a percentile below 100 saturates some on purpose."""
        allowed = max(_MAX_SATURATED, 2 * (100 - self._settings.percentile) / 100)
        if saturated > allowed:
            warnings.warn(
                f"{saturated:.2%} of the values of a layer of the KV cache did not fit the FP8 scales that this rollout was "
                f"sampled under (more than {allowed:.2%}); raise policy.generation.kv_scales.margin, lower its "
                "calibration_period, or, in the first step, raise its initial",
                stacklevel=3,
            )

    def status(self) -> dict[str, float]:
        """Return as a metric whether the scales of the next refit are calibrated (1) or still the declared one (0)."""
        return {"calibrated": float(self._is_calibrated)}


def _range_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    return {"smallest": min(result["layers"].values()), "largest": max(result["layers"].values())}


def _drift_metrics(result: Mapping[str, Any], previous: Mapping[str, float]) -> dict[str, float]:
    """Return how the scales that the batch was sampled under fare on it now, at their worst."""
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
    }
