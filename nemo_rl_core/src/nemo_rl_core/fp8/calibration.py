# SPDX-License-Identifier: Apache-2.0
"""Calibration of FP8 query, key and value scales from the activations of a model's attention.

An ``ActivationObserver`` takes q, k and v of each attention layer, after the rotary embedding, over the real tokens
alone. What it keeps (a largest magnitude and a histogram for each layer and kind) merges exactly, so the scales depend
neither on micro-batches, padding or order, nor on how rows or layers are spread over ranks. It stays on the device, and
nothing waits for it before ``scales``.
"""

import contextlib
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import torch

from nemo_rl_core.errors import DataError, ModelError, StateError
from nemo_rl_core.fp8 import histogram
from nemo_rl_core.fp8.blockwise import E4M3_MAX

__all__ = ["DEFAULT_MARGIN", "KINDS", "ActivationObserver", "check_calibration"]

#: Headroom of a scale over the calibrated magnitude. The relative error of e4m3 is 2.65 % with a scale of amax / 448
#: and the same with scales 100 times as large, but 8.7 % with half of it: too small is the dangerous side, and
#: a policy's activations move between two calibrations. A factor of 2 costs nothing.
DEFAULT_MARGIN = 2.0
#: What is observed, in the order of the stored rows.
KINDS = ("q", "k", "v")
# Below this many times the scale e4m3 loses bits of its mantissa.
_SMALLEST_NORMAL = 2.0**-6


class ActivationObserver:
    """Magnitudes of q, k and v by global layer number."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        # For each layer int64 [3, NUM_BINS] and float32 [3].
        self._counts: dict[int, torch.Tensor] = {}
        self._amax: dict[int, torch.Tensor] = {}
        self._real_BS: torch.Tensor | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """Global numbers of the layers that were called, ascending."""
        return tuple(sorted(self._counts))

    @contextlib.contextmanager
    def tokens(self, real_BS: torch.Tensor) -> Generator[None]:
        """Say which tokens of the passes inside are real.

        Args:
            real_BS: bool [B, S]; False on padding.
        """
        self._real_BS = real_BS.bool().contiguous()
        try:
            yield
        finally:
            self._real_BS = None

    @torch.no_grad()
    def observe(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add one attention call; no value is copied to the host.

        Args:
            layer: Global number of the layer.
            q: [B, heads, S, head size], and k and v with their own numbers of heads.
            k: Keys after the rotary embedding.
            v: Values.

        Raises:
            StateError: If the call is outside ``tokens``.
            ModelError: If the shapes don't fit the tokens, as with a KV cache or packed rows.
        """
        real = self._real_BS
        if real is None:
            raise StateError("attention ran outside of observer.tokens(mask); say which tokens are real")
        if layer not in self._counts:
            self._counts[layer] = torch.zeros(3, histogram.NUM_BINS, dtype=torch.int64, device=k.device)
            self._amax[layer] = torch.zeros(3, device=k.device)
        for row, x in enumerate((q, k, v)):
            if x.ndim != 4 or (x.shape[0], x.shape[2]) != tuple(real.shape):
                raise ModelError(
                    f"{KINDS[row]} of layer {layer} must be [B, heads, S, head size] with B, S = {list(real.shape)}, got "
                    f"{list(x.shape)}; calibrate without a KV cache and without packing"
                )
            histogram.add_activations(x.detach(), real, self._counts[layer][row], self._amax[layer][row : row + 1])

    def merge(self, other: "ActivationObserver") -> None:
        """Add what another observer saw, of the same layers or of others."""
        for layer in other.layers:
            if layer in self._counts:
                self._counts[layer] = self._counts[layer] + other._counts[layer]
                self._amax[layer] = torch.maximum(self._amax[layer], other._amax[layer])
            else:
                self._counts[layer], self._amax[layer] = other._counts[layer].clone(), other._amax[layer].clone()

    def packed(self, layers: Iterable[int], *, rank: int, world_size: int, device: torch.device) -> torch.Tensor:
        """Return the state as int64, so that one sum over the ranks holds the counts' sums and every rank's amax.

        Args:
            layers: The layers of all ranks, in an order that all ranks share.
            rank: This rank.
            world_size: Number of ranks.
            device: Where the result lies.
        """
        parts = []
        for layer in layers:
            amax = torch.zeros(world_size, 3, dtype=torch.int64, device=device)
            if layer in self._counts:
                amax[rank] = self._amax[layer].view(torch.int32).long()
                parts += [self._counts[layer].flatten(), amax.flatten()]
            else:
                parts += [torch.zeros(3 * histogram.NUM_BINS, dtype=torch.int64, device=device), amax.flatten()]
        return torch.cat(parts)

    @classmethod
    def from_packed(cls, packed: torch.Tensor, layers: Iterable[int], *, world_size: int) -> "ActivationObserver":
        """Return the observer of all ranks from the sum of what they packed."""
        observer = cls()
        sizes = [3 * histogram.NUM_BINS, 3 * world_size]
        numbers = list(layers)
        parts = packed.split(sizes * len(numbers))
        for layer, counts, bits in zip(numbers, parts[::2], parts[1::2], strict=True):
            observer._counts[layer] = counts.view(3, histogram.NUM_BINS)
            # NaN is the largest here, as in torch.maximum.
            observer._amax[layer] = bits.view(world_size, 3).to(torch.int32).view(torch.float32).amax(0)
        return observer

    def scales(
        self, *, percentile: float = 100.0, margin: float = DEFAULT_MARGIN, include_q: bool = False
    ) -> dict[str, dict[str, float]]:
        """Return ``layer_<number>`` to ``k_scale``, ``v_scale`` and, if asked for, ``q_scale``.

        A scale is margin x magnitude / 448. A percentile is of activations and, by its bin, up to 1/32 too large.

        Raises:
            DataError: If percentile or margin is out of range.
            ModelError: If a layer saw no token, an activation was not finite, or all of them were zero; it names layer
                and kind.
        """
        check_calibration(percentile, margin)
        result = {}
        for layer in self._checked_layers():
            counts, amax = self._counts[layer].cpu(), self._amax[layer].tolist()
            scales = {}
            for row, kind in enumerate(KINDS):
                if kind == "q" and not include_q and not histogram.non_finite(counts[row]):
                    continue
                _refuse_unusable(layer, kind, counts[row], amax[row])
                magnitude = histogram.percentile_of(counts[row], percentile, amax[row])
                scales[f"{kind}_scale"] = margin * magnitude / E4M3_MAX
            result[f"layer_{layer}"] = scales
        return result

    def same_keys_and_values(self, layer: int, other: int) -> bool:
        """Return whether two layers that were seen had the same k and v, as layers that share a KV cache have."""
        counts, amax = ((state[layer][1:], state[other][1:]) for state in (self._counts, self._amax))
        return torch.equal(*counts) and torch.equal(*amax)

    def amax(self) -> dict[str, dict[str, float]]:
        """Return ``layer_<number>`` to the exact largest magnitude of q, k and v."""
        return {f"layer_{n}": dict(zip(KINDS, self._amax[n].tolist(), strict=True)) for n in self.layers}

    def rates(self, scales: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, dict[str, float]]]:
        """Return which share of what was seen saturates, and which is subnormal, under given scales.

        The scales may be those of earlier data. Shares are upper bounds to the width of a bin (1/32); a saturation of 0
        is exact, and where nothing seen exceeds 448 scales it is 0.

        Args:
            scales: As ``scales`` gives them.

        Returns:
            ``layer_<number>`` to kind to ``saturated`` and ``subnormal``, each from 0 to 1.

        Raises:
            ModelError: If no layer or a layer without tokens was seen.
            DataError: If a layer that was seen has no scales.
        """
        result = {}
        for layer in self._checked_layers():
            key = f"layer_{layer}"
            if key not in scales:
                raise DataError(f"there are no scales for {key!r}, only for {sorted(scales)}; calibrate this model")
            counts, amax = self._counts[layer].cpu(), self._amax[layer].tolist()
            result[key] = {
                kind: _rates(counts[row], amax[row], scales[key][f"{kind}_scale"])
                for row, kind in enumerate(KINDS)
                if f"{kind}_scale" in scales[key]
            }
        return result

    def _checked_layers(self) -> tuple[int, ...]:
        if not self.layers:
            raise ModelError("no attention layer was called; run the model inside observe_attention(model, observer)")
        return self.layers


def check_calibration(percentile: Any, margin: Any) -> None:
    """Refuse a percentile or a margin that can give no scale, before any pass runs.

    Raises:
        DataError: If the percentile is not in (0, 100], or the margin is not between 1 and 1000.
    """
    if isinstance(percentile, bool) or not 0 < percentile <= 100:
        raise DataError(f"percentile must be above 0 and at most 100, got {percentile!r}; 100 takes the largest value")
    if isinstance(margin, bool) or not 1 <= margin <= 1000:
        raise DataError(
            f"margin must be between 1 and 1000, got {margin!r}; below 1 the largest values saturate; "
            f"{DEFAULT_MARGIN} is the default"
        )


def _refuse_unusable(layer: int, kind: str, counts: torch.Tensor, amax: float) -> None:
    """Refuse what has no scale, by layer and kind."""
    if bad := histogram.non_finite(counts):
        raise ModelError(
            f"{bad} values of {kind} in layer {layer} are infinite or NaN, so it has no scale; look at the weights and "
            f"at the precision that the model runs in"
        )
    if not int(counts.sum()):
        raise ModelError(f"layer {layer} saw no token of {kind}; calibrate on rows with real tokens")
    if amax == 0.0:
        raise ModelError(f"all values of {kind} in layer {layer} are zero, so it has no scale; look at the weights")


def _rates(counts: torch.Tensor, amax: float, scale: float) -> dict[str, float]:
    total = max(int(counts.sum()), 1)
    # In float32, as the values were counted: 448 x (amax / 448) is amax again.
    limit = torch.tensor(scale * E4M3_MAX, dtype=torch.float32).item()
    return {
        "saturated": histogram.count_above(counts, limit, amax) / total,
        "subnormal": histogram.count_below(counts, scale * _SMALLEST_NORMAL) / total,
    }
