# SPDX-License-Identifier: Apache-2.0
"""Names of FP8 query, key and value scales on their way from calibration to vLLM.

A calibration result is keyed by layer (``{"layer_3": {"k_scale": 0.02, "v_scale": 0.01}}``); a vLLM checkpoint key is
flat (``model.layers.3.self_attn.k_scale``). The mapping between the two is injective, total and invertible, and which
layers it covers comes from a description of the model, because hybrid models have attention in some layers only.

The default names are not symmetric: ``q_scale`` carries the name of the inner attention module and the other two do
not. vLLM 0.11 renames the short k and v keys, drops their long forms, and never renames q; from 0.23 both forms load.
The asymmetric triple is the only one that loads in every release (``AttentionNaming.live_names`` gives the other).
"""

import math
import numbers
import operator
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from nemo_rl_core.errors import ScaleNameError

__all__ = [
    "LLAMA_LIKE",
    "AttentionNaming",
    "ScaleKey",
    "ScaleKind",
    "checked_scale",
    "convert_calibration_to_vllm_format",
    "convert_vllm_format_to_calibration",
    "get_vllm_qkv_scale_names",
    "parse_vllm_scale_name",
]

#: What a scale belongs to; also its key in a layer's calibration result.
ScaleKind = Literal["q_scale", "k_scale", "v_scale"]

_KINDS: tuple[ScaleKind, ...] = get_args(ScaleKind)
_REQUIRED: tuple[ScaleKind, ...] = ("k_scale", "v_scale")
# One spelling for each number, so that two keys can never mean the same layer. Nine digits are beyond any model and
# keep `int` clear of Python's limit on the length of a number.
_NUMBER = r"(0|[1-9][0-9]{0,8})"
_LAYER_KEY = re.compile(rf"layer_{_NUMBER}")
_LOOSE_LAYER_KEY = re.compile(r"layer_0*([0-9]{1,9})")
_DOTTED = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*")
_MAX_LAYER = 999_999_999


@dataclass(frozen=True, kw_only=True)
class AttentionNaming:
    """How a model names the attention of its layers, and which layers have one.

    With the defaults, layer 3 is ``model.layers.3.self_attn`` and its inner module ``model.layers.3.self_attn.attn``.

    Attributes:
        prefix: Module path before the layer's number, e.g. ``model.layers``, ``transformer.h``.
        attention: Path of the attention block inside a layer, e.g. ``self_attn``, ``attn``, ``mixer``.
        inner: vLLM's attention module inside that block.
        live_names: False gives NeMo-RL's triple, which vLLM from 0.11 on accepts for ``self_attn`` families. True
            gives k and v the inner module too, which is the parameter's own name: vLLM from 0.23 on, and the only
            form for blocks that are themselves called ``attn`` (GPT-2).
        layers: Global numbers of the layers that have attention, in any order; None means that they are not known, and
            no completeness is checked.
    """

    prefix: str = "model.layers"
    attention: str = "self_attn"
    inner: str = "attn"
    live_names: bool = False
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check the description and bring ``layers`` into ascending order.

        Raises:
            ScaleNameError: If a path is no dotted name, or a layer is not a number or is listed twice.
        """
        for field in ("prefix", "attention", "inner"):
            value = getattr(self, field)
            if not isinstance(value, str) or not _DOTTED.fullmatch(value):
                raise ScaleNameError(
                    f"AttentionNaming.{field} must be a dotted module path of ASCII letters, digits and underscores, "
                    f"got {value!r}; take it from the model's named_modules()"
                )
        if self.layers is not None:
            object.__setattr__(self, "layers", _checked_layers(self.layers))

    def name(self, layer_idx: int, kind: ScaleKind) -> str:
        """Return the vLLM key of one scale.

        Args:
            layer_idx: Global number of the layer.
            kind: ``q_scale``, ``k_scale`` or ``v_scale``.

        Raises:
            ScaleNameError: If the number is no layer of this model, or the kind is another.
        """
        layer = self._checked_layer(layer_idx)
        if kind not in _KINDS:
            raise ScaleNameError(f"a scale kind is one of {', '.join(_KINDS)}, got {kind!r}")
        block = f"{self.prefix}.{layer}.{self.attention}"
        return f"{block}.{self.inner}.{kind}" if self.live_names or kind == "q_scale" else f"{block}.{kind}"

    def _checked_layer(self, layer_idx: int, shown: object = None) -> int:
        """Return the number if it is a layer of this model; ``shown`` is the key to name in the error."""
        layer = _layer_number(layer_idx, shown)
        if self.layers is not None and layer not in self.layers:
            raise ScaleNameError(
                f"{layer_idx if shown is None else shown!r} names layer {layer}, which has no attention in this model; "
                f"its attention layers are {list(self.layers)}"
            )
        return layer


#: Names of Llama, Qwen2, Qwen3, Qwen3-MoE, Mixtral, Gemma and others; layers not known.
LLAMA_LIKE = AttentionNaming()


@dataclass(frozen=True, kw_only=True)
class ScaleKey:
    """What a vLLM scale name stands for.

    Attributes:
        layer: Global number of the layer.
        kind: ``q_scale``, ``k_scale`` or ``v_scale``.
    """

    layer: int
    kind: ScaleKind


def get_vllm_qkv_scale_names(layer_idx: int, naming: AttentionNaming = LLAMA_LIKE) -> dict[str, str]:
    """Return the vLLM names of the three scales of one layer.

    ``get_vllm_qkv_scale_names(0)`` is ``{"q_scale": "model.layers.0.self_attn.attn.q_scale",
    "k_scale": "model.layers.0.self_attn.k_scale", "v_scale": "model.layers.0.self_attn.v_scale"}``.

    Args:
        layer_idx: Global number of the layer, from 0.
        naming: Description of the model's attention.

    Raises:
        ScaleNameError: If the number is negative, no integer, or no attention layer of this model.
    """
    return {kind: naming.name(layer_idx, kind) for kind in _KINDS}


def convert_calibration_to_vllm_format(
    results: Mapping[str, Mapping[str, float]], naming: AttentionNaming = LLAMA_LIKE
) -> dict[str, float]:
    """Flatten a calibration result to vLLM names.

    Args:
        results: ``layer_<number>`` to its scales. ``k_scale`` and ``v_scale`` are required; ``q_scale`` is passed on
            where it is given and never invented (vLLM runs q at 1.0 where none arrives).
        naming: Description of the model's attention; with ``layers`` given, exactly these layers must be there.

    Returns:
        vLLM name to scale, layers ascending, q before k before v.

    Raises:
        ScaleNameError: If a layer key is malformed, doubled, missing or not of this model; if a kind is missing or
            unknown; or if a scale is no positive number that float32 can hold. The message names the key.
    """
    _require_mapping(results, "a calibration result")
    layers: dict[int, Mapping[str, float]] = {}
    for key, scales in results.items():
        layers[naming._checked_layer(_parse_layer_key(key, results), key)] = _checked_scales(key, scales)
    _require_all_layers(layers, naming)
    return {
        naming.name(layer, kind): float(layers[layer][kind])
        for layer in sorted(layers)
        for kind in _KINDS
        if kind in layers[layer]
    }


def parse_vllm_scale_name(name: str, naming: AttentionNaming = LLAMA_LIKE) -> ScaleKey:
    """Return layer and kind of a vLLM name; the inverse of ``AttentionNaming.name``.

    Only names that ``naming`` itself produces are accepted: another spelling would be a second name for one scale.

    Raises:
        ScaleNameError: If the name is not one of these.
    """
    if isinstance(name, str):
        pattern = rf"{re.escape(naming.prefix)}\.{_NUMBER}\.{re.escape(naming.attention)}\.(?:.*\.)?([qkv]_scale)"
        if match := re.fullmatch(pattern, name):
            key = ScaleKey(layer=naming._checked_layer(int(match[1]), name), kind=cast("ScaleKind", match[2]))
            if naming.name(key.layer, key.kind) == name:
                return key
    forms = ", ".join(naming.name(_example_layer(naming), kind) for kind in _KINDS)
    raise ScaleNameError(f"{name!r} is no scale name of this model; its names have the forms {forms}")


def convert_vllm_format_to_calibration(
    scales: Mapping[str, float], naming: AttentionNaming = LLAMA_LIKE
) -> dict[str, dict[str, float]]:
    """Group flat vLLM names by layer; the inverse of ``convert_calibration_to_vllm_format``.

    Args:
        scales: vLLM name to scale.
        naming: Description of the model's attention; with ``layers`` given, exactly these layers must be there.

    Returns:
        ``layer_<number>`` to its scales, layers ascending.

    Raises:
        ScaleNameError: If a name is none of this model's, k or v of a layer is missing, a layer is missing, or a
            scale is no positive number that float32 can hold. The message names the key.
    """
    _require_mapping(scales, "a flat set of scales")
    layers: dict[int, dict[str, float]] = {}
    for name, value in scales.items():
        key = parse_vllm_scale_name(name, naming)
        layers.setdefault(key.layer, {})[key.kind] = checked_scale(name, value)
    for layer, found in layers.items():
        for kind in _REQUIRED:
            if kind not in found:
                raise ScaleNameError(f"{naming.name(layer, kind)!r} is missing: k_scale and v_scale come together")
    _require_all_layers(layers, naming)
    return {f"layer_{layer}": {k: layers[layer][k] for k in _KINDS if k in layers[layer]} for layer in sorted(layers)}


def checked_scale(key: str, value: object) -> float:
    """Return a scale as a float.

    The engine divides by it in float32, so it must be positive and finite there.

    Args:
        key: Whose scale it is, for the message.
        value: A real number.

    Raises:
        ScaleNameError: If it is no number, or zero, negative, infinite or NaN in float32.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ScaleNameError(
            f"scale {key!r} must be a real number, got {value!r} ({type(value).__name__}); of a tensor, pass .item()"
        )
    try:
        scale = float(value)
        as_float32 = struct.unpack("<f", struct.pack("<f", scale))[0]
    except OverflowError:
        scale, as_float32 = math.inf, math.inf
    if not (math.isfinite(as_float32) and as_float32 > 0.0):
        raise ScaleNameError(
            f"scale {key!r} must be positive and finite in float32, got {value!r}; a layer that saw no data has no "
            f"scale: calibrate it again on tokens that reach it"
        )
    return scale


def _layer_number(value: object, shown: object = None) -> int:
    """Return a layer number as a plain int, or say what is wrong with it."""
    key = value if shown is None else shown
    if isinstance(value, bool):
        raise ScaleNameError(f"a layer number must be an integer, got the truth value {key!r}")
    try:
        number = operator.index(cast("Any", value))
    except TypeError:
        raise ScaleNameError(f"a layer number must be an integer, got {key!r} ({type(value).__name__})") from None
    if not 0 <= number <= _MAX_LAYER:
        raise ScaleNameError(f"a layer number must be between 0 and {_MAX_LAYER}, got {key!r}")
    return number


def _checked_layers(layers: Iterable[int]) -> tuple[int, ...]:
    numbers_ = [_layer_number(layer) for layer in layers]
    doubled = sorted({n for n in numbers_ if numbers_.count(n) > 1}) if len(set(numbers_)) < len(numbers_) else []
    if doubled:
        raise ScaleNameError(f"AttentionNaming.layers must list each layer once, {doubled[0]} stands there twice")
    return tuple(sorted(numbers_))


def _parse_layer_key(key: object, results: Mapping[str, Any]) -> int:
    """Return the layer of a calibration key."""
    if isinstance(key, str):
        if match := _LAYER_KEY.fullmatch(key):
            return int(match[1])
        if loose := _LOOSE_LAYER_KEY.fullmatch(key):
            canonical = f"layer_{int(loose[1])}"
            also = f" and doubles {canonical!r}, which is there too" if canonical in results else ""
            raise ScaleNameError(f"layer key {key!r} has leading zeros{also}; write {canonical!r}")
        if key == "layers":
            raise ScaleNameError("'layers' is no layer key: pass the mapping under it, results['layers']")
    raise ScaleNameError(
        f"a layer key must be 'layer_<number>' with ASCII digits, no sign and no leading zeros, got {key!r}"
    )


def _checked_scales(key: str, scales: object) -> dict[str, float]:
    """Check the scales of one layer."""
    if not isinstance(scales, Mapping):
        raise ScaleNameError(f"{key!r} must map scale kinds to numbers, got {type(scales).__name__}")
    for kind in scales:
        if kind not in _KINDS:
            raise ScaleNameError(f"{key!r} has the unknown scale {kind!r}; the kinds are {', '.join(_KINDS)}")
    for kind in _REQUIRED:
        if kind not in scales:
            raise ScaleNameError(f"{key!r} lacks {kind!r}: k_scale and v_scale are required, q_scale is optional")
    return {kind: checked_scale(f"{key}.{kind}", value) for kind, value in scales.items()}


def _require_mapping(value: object, what: str) -> None:
    if not isinstance(value, Mapping):
        raise ScaleNameError(f"{what} must be a mapping, got {type(value).__name__}")


def _require_all_layers(layers: Iterable[int], naming: AttentionNaming) -> None:
    """Refuse a set that leaves attention layers without scales: vLLM would silently run them at 1.0."""
    missing = sorted(set(naming.layers or ()) - set(layers))
    if missing:
        raise ScaleNameError(
            f"no scales for {', '.join(f'layer_{n}' for n in missing)}: each attention layer needs k and v"
        )


def _example_layer(naming: AttentionNaming) -> int:
    return naming.layers[0] if naming.layers else 0
