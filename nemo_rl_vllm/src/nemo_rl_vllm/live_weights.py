# SPDX-License-Identifier: Apache-2.0
"""A live vLLM model as a ``ShardedSink``: what it is made of in checkpoint names, loaded, and proven by digest.

The FP8 scales of its KV cache belong to it: they come in the same refit, under their live names.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nemo_rl_core.errors import WeightsInvalidError
from nemo_rl_core.refit.digest import digests_of, tensor_digest
from nemo_rl_core.refit.manifest import Manifest, TensorSpec
from nemo_rl_vllm.expert_weights import ExpertWeights, expert_layouts, is_expert_layer
from nemo_rl_vllm.fp8 import BLOCK
from nemo_rl_vllm.fp8_kernels import keeps_experts, keeps_weights
from nemo_rl_vllm.layouts import Layout, block_layout, fused_layouts, plain_layout, vocabulary_layout
from nemo_rl_vllm.live_scales import LiveScales

__all__ = ["LiveWeights"]

#: Last component of the scales' name, live and in a checkpoint.
_SCALES = "weight_scale_inv"


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One checkpoint tensor and where this rank's share of it lies in the live model.

    Attributes:
        spec: Name, full shape and dtype in the checkpoint.
        parameter: Name of the live parameter that holds it.
        share: Index into the full tensor: what this rank must hold.
        read: Reads that back from the live model.
        experts: The expert layer that it belongs to, or None.
        is_scale: Whether it is a scale of the KV cache, which no loader takes.
    """

    spec: TensorSpec
    parameter: str
    share: tuple[slice, ...]
    read: Callable[[], torch.Tensor]
    experts: ExpertWeights | None = None
    is_scale: bool = False


class LiveWeights:
    """Loads complete checkpoint tensors into a live vLLM model, and proves by digest that they are live there."""

    def __init__(
        self,
        model: nn.Module,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        kv_scales: Sequence[str] = (),
        fp8_weights: Sequence[str] = (),
        graphs: bool = False,
    ) -> None:
        """Work out, from the live model alone, which checkpoint tensors it is made of.

        Args:
            model: The model inside a vLLM worker, after its first load.
            rank: This rank in its engine, from 0.
            num_ranks: Ranks of the engine, each of which holds its share of the model.
            kv_scales: Live names of the FP8 scales that a refit brings; none where the KV cache is not FP8.
            fp8_weights: Modules, by their names in a checkpoint, whose weights the sender casts to FP8.
            graphs: Whether the engine replays CUDA graphs.

        Raises:
            RuntimeError: If a layer is of a kind that a refit cannot load yet, the scales are not those of the model's
                attention modules, or another layer is FP8 than the sender casts; the message names it.
        """
        self._model: Any = model
        self._rank, self._num_ranks = rank, num_ranks
        self._scales = LiveScales(model, graphs=graphs)
        self._scales.require(kv_scales)
        self._arrived_scales: dict[str, float] = {}
        self._parts = {part.spec.name: part for part in _parts_of(model)}
        _require_fp8(self._parts, fp8_weights)
        self._parts |= {name: _scale_part(self._scales, name) for name in kv_scales}
        self._caches_dropped = False
        #: Names in the order of the last refit: a set's digest depends on the sender's order.
        self._order = list(self._parts)
        self._arrived: list[str] = []
        #: Where ranks share the model: for each tensor that arrived, the digest of the whole and of this rank's share.
        self._received: dict[str, tuple[str, str]] = {}
        self.version: int | None = None

    def begin(self, *, caches_dropped: bool) -> None:
        """Note, before a refit, whether the engine's prefix cache is empty."""
        self._caches_dropped = caches_dropped
        self._arrived = []
        self._arrived_scales = {}

    @property
    def contents(self) -> Manifest:
        """What the live model is made of, in the order of the last refit."""
        return Manifest(tuple(self._parts[name].spec for name in self._order))

    def manifest(self) -> Manifest:
        """Return what a refit has to bring.

        Raises:
            RuntimeError: If the engine's prefix cache could not be emptied: what it holds comes from older weights, and was
                divided by older scales.
        """
        if not self._caches_dropped:
            raise RuntimeError(
                "the engine's prefix cache must be empty before its weights change, but vLLM could not reset it: let "
                "running requests end first"
            )
        return self.contents

    @torch.no_grad()
    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Give complete tensors to the model's own loader; scales wait for ``finish``.

        Raises:
            RuntimeError: If the loader did not take one of them.
        """
        self.version = None
        self._arrived += [name for name, _ in tensors]
        if self._num_ranks > 1:
            for name, tensor in tensors:
                share = self._parts[name].share
                self._received[name] = (tensor_digest(name, tensor), tensor_digest(name, tensor[share]))
        self._arrived_scales |= {name: tensor.item() for name, tensor in tensors if self._parts[name].is_scale}
        weights = [(name, tensor) for name, tensor in tensors if not self._parts[name].is_scale]
        if not weights:
            return
        parts = [self._parts[name] for name, _ in weights]
        for part in parts:
            if part.experts is not None:
                part.experts.open()
        loaded = self._model.load_weights(iter(weights))
        if loaded is None:
            raise RuntimeError(f"{type(self._model).__name__}.load_weights does not say what it loaded")
        left = [part.spec.name for part in parts if part.parameter not in loaded]
        if left:
            raise RuntimeError(f"vLLM's loader did not take {left[0]!r} ({len(left)} such tensors in this bucket)")

    @torch.no_grad()
    def finish(self, version: int) -> None:
        """Run the post-load step of what was loaded, set all scales, then the version."""
        for experts in {id(part.experts): part.experts for part in self._parts.values()}.values():
            if experts is not None:
                experts.close()
        self._set_scales()
        # Whatever arrived, the next refit must find a manifest that names each tensor once.
        self._order = self._arrived if sorted(self._arrived) == sorted(self._parts) else list(self._parts)
        self.version = version

    def _set_scales(self) -> None:
        """Set all scales that arrived, and see that they are live; without digests nobody else would look.

        Raises:
            RuntimeError: If one is not.
        """
        scales = dict(self._arrived_scales)
        if scales and not any(name.endswith(".q_scale") for name in scales):
            # Said and not left: vLLM's dummy weights fill in scales too.
            scales |= {f"{owner}.q_scale": 1.0 for owner in self._scales.owners}
        for name, value in scales.items():
            self._scales.set(name, value)
        wrong = [name for name, value in scales.items() if self._scales.get(name) != value]
        if wrong:
            raise RuntimeError(f"scale {wrong[0]!r} is not live as it was sent ({len(wrong)} such); refit again")

    def live_digests(self) -> dict[str, str]:
        """Return the digest of every checkpoint tensor that is live here; see ``ShardedSink``.

        One rank reads all of it back. Of several, each reads its share back and compares it with that share of what
        arrived; then the digest of the whole that arrived is true of this rank. The ranks need not talk for that, so none
        waits for another that has died.

        Raises:
            RuntimeError: If what this rank holds is not its share of what arrived.
        """
        live = digests_of((name, part.read()) for name, part in self._parts.items())
        if self._num_ranks == 1:
            return live
        me = f"rank {self._rank} of the engine's {self._num_ranks}"
        missing = [name for name in self._parts if name not in self._received]
        if missing:
            raise WeightsInvalidError(f"{me} has received no {missing[0]!r} ({len(missing)} such tensors); refit first")
        wrong = [name for name in self._parts if live[name] != self._received[name][1]]
        if wrong:
            raise RuntimeError(
                f"{me} does not hold its share of {wrong[0]!r} as it was sent ({len(wrong)} such tensors); refit again"
            )
        return {name: self._received[name][0] for name in self._parts}


def _parts_of(model: nn.Module) -> Iterator[_Part]:
    """Yield the parts of every parameter; a tied one counts once, under its first name."""
    stacked = _stacked_names(model)
    modules: dict[str, Any] = dict(model.named_modules())
    for name, parameter in model.named_parameters(remove_duplicate=True):
        prefix, _, leaf = name.rpartition(".")
        module = modules[prefix]
        _check_loadable(name, parameter, module)
        # The scales of an FP8 weight lie as it does, in blocks.
        shaped = f"{prefix}.weight" if leaf == _SCALES else name
        sources = next(((target, s) for target, s in stacked.items() if f"{target}." in f".{name}"), None)
        if is_expert_layer(module):
            is_fp8 = parameter.dtype == torch.float8_e4m3fn
            if leaf == "w13_weight":
                yield from _fp8_expert_parts(prefix, module) if is_fp8 else _expert_parts(prefix, module)
            elif leaf not in ("w2_weight", f"w13_{_SCALES}", f"w2_{_SCALES}"):
                raise RuntimeError(f"expert layer {prefix!r} has a parameter {leaf!r}, which a refit cannot load yet")
        elif sources is not None:
            yield from _stacked_parts(model, name, shaped, module, *sources)
        elif hasattr(module, "org_vocab_size"):
            yield _part(model, name, name, vocabulary_layout(parameter, module))
        else:
            layout = plain_layout(shaped, model.get_parameter(shaped), module)
            yield _part(model, name, name, layout if shaped == name else block_layout(shaped, layout, BLOCK))


def _check_loadable(name: str, parameter: torch.Tensor, module: nn.Module) -> None:
    method = getattr(module, "quant_method", None)
    kernel = getattr(method, "fp8_linear", None)
    is_plain = method is None or type(method).__name__.startswith("Unquantized")
    if not is_plain and not keeps_weights(kernel) and not keeps_experts(method):
        raise RuntimeError(
            f"no refit can load {name!r}: its kernel {type(kernel or method).__name__} keeps weights in a form of its own; "
            "set vllm_cfg.precision to auto, or keep the layer in bfloat16 with vllm_cfg.quantization_ignored_layer_kws; "
            "where it should be a kernel of nemo-rl-vllm, its vLLM plugin 'nemo_rl_keep_weights' did not run (VLLM_PLUGINS)"
        )
    if parameter.numel() == 0:
        raise RuntimeError(
            f"the engine has dropped the weights of {name!r} after packing them, so no refit can reach them; is the "
            "vLLM plugin 'nemo_rl_keep_weights' of nemo-rl-vllm switched off (VLLM_PLUGINS)?"
        )


def _require_fp8(parts: Mapping[str, _Part], modules: Sequence[str]) -> None:
    """Check, before the first refit, that the engine's FP8 layers are the modules that the sender casts."""
    live = {name.removesuffix(".weight") for name, part in parts.items() if part.spec.dtype == "float8_e4m3fn"}
    if unknown := live - set(modules):
        # Patterns are matched against the checkpoint's names, so none of them reaches a name that is vLLM's alone.
        raise RuntimeError(
            f"{min(unknown)!r} is FP8 in the engine, and the sender does not cast it ({len(unknown)} such modules): vLLM has "
            "this model under other names than its checkpoint, so it cannot be refitted with FP8 weights yet; set "
            "vllm_cfg.precision to auto"
        )
    if missing := set(modules) - live:
        raise RuntimeError(
            f"{min(missing)!r} is cast to FP8 by the sender, and not FP8 in the engine ({len(missing)} such modules); keep "
            "them in bfloat16 with vllm_cfg.quantization_ignored_layer_kws, or set vllm_cfg.precision to auto"
        )


def _scale_part(scales: LiveScales, name: str) -> _Part:
    """Return the part of one scale, which every rank holds whole."""

    def read() -> torch.Tensor:
        return torch.tensor(scales.get(name), dtype=torch.float32)

    spec = TensorSpec(name=name, shape=(), dtype="float32")
    return _Part(spec=spec, parameter=name, share=(), read=read, is_scale=True)


def _part(model: nn.Module, checkpoint_name: str, name: str, layout: Layout) -> _Part:
    def read() -> torch.Tensor:
        # Looked up each time: the engine may have put another tensor in its place.
        return model.get_parameter(name).data[layout.place]

    dtype = str(model.get_parameter(name).dtype).removeprefix("torch.")
    spec = TensorSpec(name=checkpoint_name, shape=layout.shape, dtype=dtype)
    return _Part(spec=spec, parameter=name, share=layout.share, read=read)


def _stacked_names(model: nn.Module) -> dict[str, list[tuple[str, Any]]]:
    """Return, for each piece of a live name that stands for several checkpoint tensors, their pieces and shards.

    A model may inherit the mapper of one whose checkpoints have these layers in pieces (Phi-3 does, of Llama) and say
    beside it that its own have them whole.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    packed: Any = getattr(model, "packed_modules_mapping", None) or {}
    found: dict[str, list[tuple[str, Any]]] = {}
    for source, (target, shard) in getattr(mapper, "orig_to_new_stacked", {}).items():
        layer = target.strip(".")
        if list(packed.get(layer, ())) != [layer]:
            found.setdefault(target, []).append((source, shard))
    return found


def _stacked_parts(
    model: nn.Module, name: str, shaped: str, module: Any, target: str, sources: Sequence[tuple[str, Any]]
) -> Iterator[_Part]:
    """Yield the parts of a fused linear layer, which lie below one another in its first dimension.

    ``shaped`` is the parameter whose rows say where: the layer's weight where ``name`` is its scales.
    """
    order = {"q": 0, "k": 1, "v": 2}
    ordered = sorted(sources, key=lambda source: order.get(source[1], source[1]))
    layouts = fused_layouts(shaped, model.get_parameter(shaped), module, [source for source, _ in ordered])
    if shaped != name:
        layouts = [block_layout(shaped, layout, BLOCK) for layout in layouts]
    for (source, _), layout in zip(ordered, layouts, strict=True):
        checkpoint_name = f".{name}".replace(target, source, 1).removeprefix(".")
        yield _part(model, checkpoint_name, name, layout)


def _expert_parts(prefix: str, layer: nn.Module) -> Iterator[_Part]:
    """Yield the parts of an expert layer: gate, up and down of each expert."""
    experts = ExpertWeights(prefix, layer)

    def reader(tensor: str, expert: int, place: tuple[slice, ...]) -> Callable[[], torch.Tensor]:
        return lambda: experts.read(tensor, expert)[place]

    for name, tensor, expert, layout in experts.parts():
        spec = TensorSpec(name=name, shape=layout.shape, dtype=experts.dtype)
        read = reader(tensor, expert, layout.place)
        yield _Part(spec=spec, parameter=f"{prefix}.{tensor}", share=layout.share, read=read, experts=experts)


def _fp8_expert_parts(prefix: str, layer: nn.Module) -> Iterator[_Part]:
    """Yield the parts of an expert layer whose kernel takes values and scales as they lie in a checkpoint.

    Raises:
        RuntimeError: If a tensor has another shape than its parts, as where vLLM has split blocks or padded a share.
    """
    live: Any = layer
    parts = [
        *(("weight", *part) for part in expert_layouts(prefix, layer)),
        *(
            (_SCALES, module, tensor, expert, block_layout(f"{prefix}.{tensor}_weight", layout, BLOCK))
            for module, tensor, expert, layout in expert_layouts(prefix, layer)
        ),
    ]
    for leaf, module, tensor, expert, layout in parts:
        name = f"{tensor}_{leaf}"
        parameter = getattr(live, name)
        rows, columns = layout.held
        wanted = [2 * rows if tensor == "w13" else rows, columns]
        if list(parameter.shape[1:]) != wanted:
            raise RuntimeError(
                f"{prefix}.{name} has {list(parameter.shape[1:])} for each expert, and a checkpoint's share {wanted}; take "
                "fewer ranks, or keep the experts in bfloat16 with vllm_cfg.quantization_ignored_layer_kws"
            )

        def read(name: str = name, expert: int = expert, place: tuple[slice, ...] = layout.place) -> torch.Tensor:
            return getattr(live, name).data[expert][place]

        dtype = str(parameter.dtype).removeprefix("torch.")
        spec = TensorSpec(name=f"{module}.{leaf}", shape=layout.shape, dtype=dtype)
        yield _Part(spec=spec, parameter=f"{prefix}.{name}", share=layout.share, read=read)
