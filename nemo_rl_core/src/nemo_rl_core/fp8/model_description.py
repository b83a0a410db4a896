# SPDX-License-Identifier: Apache-2.0
"""Which attention modules of a live engine have scales, and under which names the scales reach them.

``nemo_rl_core.fp8.model_families`` makes a description from a model's configuration. For a model that it does not know,
a description is written by hand: the names come from the engine's ``named_modules()``.

    ModelDescription(
        architecture="MyForCausalLM",
        blocks=(AttentionBlock(prefix="model.layers", module="self_attn.attn", layers=(3, 7, 11)),),
    )

Every name here is that of the live module (the owner) and of the scale in it: ``model.layers.3.self_attn.attn.k_scale``.
vLLM from 0.23 on takes this name from a checkpoint for every family whose owner has scale parameters, where short forms
are dropped or refused by some. Where it has no parameters or loses even this name, the block says ``delivery="set"``.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from nemo_rl_core.errors import ScaleNameError
from nemo_rl_core.fp8.scale_names import (
    AttentionNaming,
    ScaleKind,
    convert_calibration_to_vllm_format,
    parse_vllm_scale_name,
)
from nemo_rl_core.fp8.scale_rounding import ScaleDtype, round_up_scale

__all__ = ["AttentionBlock", "CacheKind", "Delivery", "ModelDescription"]

#: What a block's cache holds: keys and values, or the one latent of MLA.
CacheKind = Literal["kv", "latent"]

#: How scales get into the live module: by its weight loader, or only by setting its buffers.
Delivery = Literal["load", "set"]

_DOTTED = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*")
_KV: tuple[ScaleKind, ...] = ("k_scale", "v_scale")
_QKV: tuple[ScaleKind, ...] = get_args(ScaleKind)


@dataclass(frozen=True, kw_only=True)
class AttentionBlock:
    """The attention modules that stand at one place of each layer.

    Attributes:
        prefix: Module path before the layer's number, in the live engine, e.g. ``language_model.model.layers``.
        module: Path of the engine's attention module inside a layer, e.g. ``self_attn.attn``.
        layers: Global numbers of the layers that have this module, in any order.
        shares: Pairs (reader, writer): the reader has no KV cache of its own and reads the writer's. It has scales of
            its own all the same, which must be the writer's for k and v.
        cache: ``latent`` for MLA: one tensor is cached, so k and v have one scale.
        delivery: ``set`` where the engine has no scale parameters or loses them at load.
    """

    prefix: str
    module: str
    layers: tuple[int, ...]
    shares: tuple[tuple[int, int], ...] = ()
    cache: CacheKind = "kv"
    delivery: Delivery = "load"

    def __post_init__(self) -> None:
        """Check the description and bring ``layers`` and ``shares`` into ascending order.

        Raises:
            ScaleNameError: If a path is no dotted name, a layer is none or listed twice, no layer is there, or a pair
                of ``shares`` is not of a later reader and a layer with a cache.
        """
        for field in ("prefix", "module"):
            value = getattr(self, field)
            if not isinstance(value, str) or not _DOTTED.fullmatch(value):
                raise ScaleNameError(
                    f"AttentionBlock.{field} must be a dotted module path of ASCII letters, digits and underscores, "
                    f"got {value!r}; take it from the engine's named_modules()"
                )
        for field, allowed in (("cache", get_args(CacheKind)), ("delivery", get_args(Delivery))):
            if getattr(self, field) not in allowed:
                raise ScaleNameError(
                    f"AttentionBlock.{field} must be one of {', '.join(allowed)}, got {getattr(self, field)!r}"
                )
        layers = AttentionNaming(layers=self.layers).layers
        if not layers:
            raise ScaleNameError(
                f"AttentionBlock.layers must name at least one layer, got {self.layers!r}; a model without attention "
                f"has no KV cache and no scales"
            )
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "shares", self._checked_shares())

    @property
    def pattern(self) -> str:
        """The owners' common name, e.g. ``model.layers.*.self_attn.attn``."""
        return f"{self.prefix}.*.{self.module}"

    @property
    def cache_layers(self) -> tuple[int, ...]:
        """The layers with a KV cache of their own."""
        readers = dict(self.shares)
        return tuple(layer for layer in self.layers if layer not in readers)

    @property
    def naming(self) -> AttentionNaming:
        """The same names for ``nemo_rl_core.fp8.scale_names``.

        Raises:
            ScaleNameError: If ``module`` has one component only, which ``AttentionNaming`` can't say.
        """
        attention, _, inner = self.module.partition(".")
        if not inner:
            raise ScaleNameError(
                f"{self.pattern!r} has no block around the engine's attention module, and AttentionNaming needs one; "
                f"use ModelDescription.to_vllm and from_vllm"
            )
        return AttentionNaming(
            prefix=self.prefix, attention=attention, inner=inner, live_names=True, layers=self.layers
        )

    def owner(self, layer: int) -> str:
        """Return the live module of one layer, e.g. ``model.layers.3.self_attn.attn``.

        Raises:
            ScaleNameError: If this is no layer of the block.
        """
        if not _is_layer(layer, self.layers):
            raise ScaleNameError(f"layer {layer!r} has no {self.pattern!r}; the layers are {list(self.layers)}")
        return f"{self.prefix}.{layer}.{self.module}"

    def names(self, *, include_q: bool = False) -> tuple[str, ...]:
        """Return every scale name of the block, layers ascending, q before k before v."""
        kinds = _QKV if include_q else _KV
        return tuple(f"{self.owner(layer)}.{kind}" for layer in self.layers for kind in kinds)

    def _checked_shares(self) -> tuple[tuple[int, int], ...]:
        try:
            pairs = tuple(sorted((reader, writer) for reader, writer in self.shares))
        except (TypeError, ValueError):
            raise ScaleNameError(
                f"AttentionBlock.shares must be pairs of layer numbers (reader, writer), got {self.shares!r}"
            ) from None
        writers = dict(pairs)
        for reader, writer in pairs:
            if not _is_layer(reader, self.layers) or not _is_layer(writer, self.layers):
                rule = f"both must be layers of the block: {list(self.layers)}"
            elif writer >= reader:
                rule = "a layer reads the cache of an earlier one"
            elif writer in writers:
                rule = f"layer {writer} has no cache either; name the layer that writes"
            elif sum(other == reader for other, _ in pairs) > 1:
                rule = f"layer {reader} stands there twice"
            else:
                continue
            raise ScaleNameError(f"AttentionBlock.shares has the pair (reader {reader!r}, writer {writer!r}): {rule}")
        return pairs


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """All attention of a model that has a KV cache.

    Attributes:
        architecture: The engine's class, for messages.
        blocks: One for most models; two where a layer has two caches (cross-attention of encoder-decoders).
    """

    architecture: str
    blocks: tuple[AttentionBlock, ...]

    def __post_init__(self) -> None:
        """Check that the blocks are there and differ.

        Raises:
            ScaleNameError: If not.
        """
        object.__setattr__(self, "blocks", tuple(self.blocks))
        names = self.names(include_q=True)
        if not names or len(set(names)) < len(names):
            raise ScaleNameError(
                f"ModelDescription.blocks must be blocks whose names differ, got {[b.pattern for b in self.blocks]}"
            )

    def owners(self) -> tuple[str, ...]:
        """Return the live modules that own scales, by block and layer."""
        return tuple(block.owner(layer) for block in self.blocks for layer in block.layers)

    def names(self, *, include_q: bool = False) -> tuple[str, ...]:
        """Return exactly the names that a refit must bring; q for all of them or for none."""
        return tuple(name for block in self.blocks for name in block.names(include_q=include_q))

    def checkpoint_names(self, *, include_q: bool = False) -> tuple[str, ...]:
        """Return the names that a checkpoint must hold; as ``names``, where the engine's loader takes them.

        Raises:
            ScaleNameError: If a block's scales can only be set: the engine would run at 1.0 without a word, or not start.
        """
        for block in self.blocks:
            if block.delivery == "set":
                raise ScaleNameError(
                    f"vLLM loads no scales into {block.pattern!r} of {self.architecture}: it would end the load, or run at "
                    f"1.0; set the buffers of its owners through the adapter, or keep this model's KV cache in bfloat16"
                )
        return self.names(include_q=include_q)

    def require(self, found: Iterable[str], *, what: str, include_q: bool = False) -> None:
        """Check a set of scale names against ``names``.

        Args:
            found: Names that are live, sent or loaded.
            what: Which of these, for the message.
            include_q: Whether q belongs to the set.

        Raises:
            ScaleNameError: If a name is missing or too many.
        """
        expected = self.names(include_q=include_q)
        found = list(found)
        missing, unknown = [n for n in expected if n not in set(found)], [n for n in found if n not in set(expected)]
        if missing or unknown:
            faults = [f"{len(missing)} missing, the first {missing[0]!r}"] if missing else []
            faults += [f"{len(unknown)} that this model does not have, the first {unknown[0]!r}"] if unknown else []
            raise ScaleNameError(
                f"the {what} scales of {self.architecture} must be exactly its {len(expected)} names "
                f"({'q, k and v' if include_q else 'k and v'}), got {len(found)}: {'; '.join(faults)}"
            )

    def to_vllm(self, results: Mapping[str, Any], *, kept_as: ScaleDtype = "float32") -> dict[str, float]:
        """Turn a calibration result into live names and the values to send.

        Args:
            results: ``layer_<number>`` to its scales; for several blocks, the block's ``pattern`` to such a mapping. k
                and v of a layer that reads another's cache may be left out: they are the writer's.
            kept_as: What the engine keeps; values are rounded up to it, so none is below the calibrated one.

        Returns:
            Name to scale, exactly ``names``, in that order.

        Raises:
            ScaleNameError: As ``convert_calibration_to_vllm_format``; and if a reader's k or v is not the writer's, k
                and v of a latent differ, or q is there for some layers only.
        """
        scales: dict[str, float] = {}
        for block, part in zip(self.blocks, self._by_block(results), strict=True):
            # Names of its own, since these two functions check everything about layers and values.
            plain = AttentionNaming(layers=block.layers)
            for name, value in convert_calibration_to_vllm_format(_with_shared(block, part), plain).items():
                key = parse_vllm_scale_name(name, plain)
                scales[f"{block.owner(key.layer)}.{key.kind}"] = round_up_scale(value, kept_as)
            _require_one_latent(block, scales)
        include_q = any(name.endswith(".q_scale") for name in scales)
        self.require(scales, what="calibrated", include_q=include_q)
        return scales

    def from_vllm(self, scales: Mapping[str, float]) -> dict[str, Any]:
        """Group live names by layer (and by block, where there are several); the inverse of ``to_vllm``.

        Raises:
            ScaleNameError: If the names are not exactly ``names``, or ``to_vllm`` would refuse the result.
        """
        if not isinstance(scales, Mapping):
            raise ScaleNameError(f"a flat set of scales must be a mapping, got {type(scales).__name__}")
        include_q = any(isinstance(name, str) and name.endswith(".q_scale") for name in scales)
        self.require(scales, what="given", include_q=include_q)
        kinds = _QKV if include_q else _KV
        parts = {
            block.pattern: {
                f"layer_{layer}": {kind: scales[f"{block.owner(layer)}.{kind}"] for kind in kinds}
                for layer in block.layers
            }
            for block in self.blocks
        }
        results: dict[str, Any] = parts if len(parts) > 1 else parts[self.blocks[0].pattern]
        self.to_vllm(results)
        return results

    def _by_block(self, results: Mapping[str, Any]) -> list[Any]:
        if len(self.blocks) == 1:
            return [results]
        patterns = [block.pattern for block in self.blocks]
        if not isinstance(results, Mapping) or set(results) != set(patterns):
            got = list(results) if isinstance(results, Mapping) else type(results).__name__
            raise ScaleNameError(
                f"{self.architecture} has {len(patterns)} attention blocks in a layer, so a calibration result has one "
                f"mapping of layers for each of {patterns}, got {got}"
            )
        return [results[pattern] for pattern in patterns]


def _is_layer(value: object, layers: tuple[int, ...]) -> bool:
    """Whether this is one of the numbers, and no float or truth value that equals one."""
    return isinstance(value, int) and not isinstance(value, bool) and value in layers


def _with_shared(block: AttentionBlock, results: Any) -> Any:
    """Give each layer that reads another's cache that one's k and v; what is malformed is left to later checks."""
    if not isinstance(results, Mapping):
        return results
    complete = dict(results)
    for reader, writer in block.shares:
        own, source = results.get(f"layer_{reader}", {}), results.get(f"layer_{writer}")
        if not isinstance(own, Mapping) or not isinstance(source, Mapping):
            continue
        shared = {kind: source[kind] for kind in _KV if kind in source}
        for kind, value in shared.items():
            if kind in own and own[kind] != value:
                raise ScaleNameError(
                    f"'layer_{reader}.{kind}' is {own[kind]!r}, but layer {reader} reads the cache that layer {writer} "
                    f"writes with {value!r}; leave k_scale and v_scale of layer {reader} out"
                )
        complete[f"layer_{reader}"] = {**own, **shared}
    return complete


def _require_one_latent(block: AttentionBlock, scales: Mapping[str, float]) -> None:
    """Refuse k and v that differ where the cache holds one tensor: they were measured on something else."""
    for layer in block.layers if block.cache == "latent" else ():
        k, v = (scales[f"{block.owner(layer)}.{kind}"] for kind in _KV)
        if k != v:
            raise ScaleNameError(
                f"layer {layer} caches one latent (MLA), so k_scale and v_scale must be equal, got {k!r} and {v!r}; "
                f"measure the latent (normalised, with the rotated part of k), not the k and v made from it"
            )
