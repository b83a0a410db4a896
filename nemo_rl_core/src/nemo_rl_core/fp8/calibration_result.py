# SPDX-License-Identifier: Apache-2.0
"""What a calibration is asked for and what it answers: scales by the names of the live engine.

A ``CalibrationRequest`` is checked whole when it is made, before any pass runs. Its ``result`` turns what an
``ActivationObserver`` has seen into scales for exactly the names of the model's description.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.errors import ModelError
from nemo_rl_core.fp8.calibration import DEFAULT_MARGIN, ActivationObserver, check_calibration
from nemo_rl_core.fp8.model_description import AttentionBlock, ModelDescription
from nemo_rl_core.fp8.model_families import describe_model
from nemo_rl_core.fp8.scale_rounding import ScaleDtype

__all__ = ["CalibrationRequest", "describe_hf_model"]


def describe_hf_model(config: Any, class_name: str) -> ModelDescription:
    """Describe a HF model that may be calibrated.

    Args:
        config: Its HF configuration. The class that it names is the one that the engine builds.
        class_name: The model's own class, for a configuration that names none.

    Raises:
        ModelError: As ``describe_model``.
    """
    return describe_model(config, architecture=None if getattr(config, "architectures", None) else class_name)


@dataclass(frozen=True, kw_only=True)
class CalibrationRequest:
    """A calibration of one model, checked.

    Attributes:
        model: Which attention modules have scales, and their live names.
        percentile: Of the magnitudes of all activations of a layer and kind; 100 is their maximum.
        margin: Headroom over it, from 1.
        include_q: Whether q has scales too.
        previous: Live name to the scale that was live while the data was generated; None where there was none.
        kept_as: What the engine keeps scales in; they are rounded up to it.
    """

    model: ModelDescription
    percentile: float = 100.0
    margin: float = DEFAULT_MARGIN
    include_q: bool = False
    previous: Mapping[str, float] | None = None
    kept_as: ScaleDtype = "float32"

    def __post_init__(self) -> None:
        """Refuse what no pass could answer.

        Raises:
            DataError: If percentile or margin is out of range.
            ModelError: If the cache holds a latent (MLA), or a layer has two caches.
            ScaleNameError: If ``previous`` has other names than the model, or a value that is no scale.
        """
        check_calibration(self.percentile, self.margin)
        architecture, blocks = self.model.architecture, self.model.blocks
        for block in blocks:
            if block.cache == "latent":
                raise ModelError(
                    f"{architecture} caches one latent in {block.pattern!r} (MLA), and transformers' attention "
                    f"interface sees the keys and values that are unpacked from it; keep this model's KV cache in "
                    f"bfloat16"
                )
        if len(blocks) > 1:
            raise ModelError(
                f"{architecture} has {len(blocks)} attention modules with a cache in a layer "
                f"({', '.join(block.pattern for block in blocks)}), and calls of one layer number cannot be told apart; "
                f"keep this model's KV cache in bfloat16"
            )
        if self.previous is not None:
            self.model.from_vllm(self.previous)

    def result(self, seen: ActivationObserver) -> dict[str, Any]:
        """Return scales, magnitudes and rates of what all ranks have seen.

        Returns:
            ``format`` ("fp8"), ``percentile``, ``margin``; ``layers``: live name to scale, exactly
            ``model.names(include_q=include_q)``; ``amax``: live module to q, k and v and their largest magnitudes;
            ``rates``: live module to kind to ``saturated`` and ``subnormal``, shares of the data under the new scales;
            with ``previous`` also ``drift``: the same under the previous scales.

        Raises:
            ModelError: If the layers that were called are not those of the description, a layer computes keys or values
                of its own where it should read another's, or a layer and kind gives no scale; it names the layer.
        """
        block = self.model.blocks[0]
        self._require_layers(block, seen)
        for reader, writer in block.shares:
            if not seen.same_keys_and_values(reader, writer):
                raise ModelError(
                    f"{block.owner(reader)!r} reads the KV cache of layer {writer} in the engine, but was called with "
                    f"other keys or values here; this version of transformers runs another model than the engine"
                )
        scales = seen.scales(percentile=self.percentile, margin=self.margin, include_q=self.include_q)
        layers = self.model.to_vllm(scales, kept_as=self.kept_as)
        answer = {
            "format": "fp8",
            "percentile": self.percentile,
            "margin": self.margin,
            "layers": layers,
            "amax": _by_owner(block, seen.amax()),
            "rates": self._rates(block, seen, layers),
        }
        if self.previous is not None:
            answer["drift"] = self._rates(block, seen, self.previous)
        return answer

    def _require_layers(self, block: AttentionBlock, seen: ActivationObserver) -> None:
        """Refuse layers that were not called, and calls that no scale stands for."""
        if seen.layers and (missed := sorted(set(block.layers) - set(seen.layers))):
            raise ModelError(
                f"no pass reached {block.owner(missed[0])!r} ({len(missed)} of {len(block.layers)} layers of "
                f"{self.model.architecture}), so it has no scale; calibrate the whole model, or describe it with the "
                f"layers that it has"
            )
        if unknown := sorted(set(seen.layers) - set(block.layers)):
            raise ModelError(
                f"layer {unknown[0]} called attention, but the description of {self.model.architecture} has only the "
                f"layers {list(block.layers)} of {block.pattern!r}; its cache would have no scale: describe the model "
                f"with all layers that have a cache"
            )

    def _rates(self, block: AttentionBlock, seen: ActivationObserver, scales: Mapping[str, float]) -> dict[str, Any]:
        return _by_owner(block, seen.rates(self.model.from_vllm(scales)))


def _by_owner(block: AttentionBlock, by_layer: Mapping[str, Any]) -> dict[str, Any]:
    return {block.owner(layer): by_layer[f"layer_{layer}"] for layer in block.layers}
