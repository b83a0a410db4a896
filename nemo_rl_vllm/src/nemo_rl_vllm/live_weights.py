# SPDX-License-Identifier: Apache-2.0
"""A live vLLM model as a ``ShardedSink``: what it is made of in checkpoint names, loaded, and proven by digest."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nemo_rl_core.errors import WeightsInvalidError
from nemo_rl_core.refit.digest import digests_of, tensor_digest
from nemo_rl_core.refit.manifest import Manifest, TensorSpec
from nemo_rl_vllm.expert_weights import ExpertWeights, is_expert_layer
from nemo_rl_vllm.layouts import Layout, fused_layouts, plain_layout, vocabulary_layout

__all__ = ["LiveWeights"]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One checkpoint tensor and where this rank's share of it lies in the live model.

    Attributes:
        spec: Name, full shape and dtype in the checkpoint.
        parameter: Name of the live parameter that holds it.
        share: Index into the full tensor: what this rank must hold.
        read: Reads that back from the live model.
        experts: The expert layer that it belongs to, or None.
    """

    spec: TensorSpec
    parameter: str
    share: tuple[slice, ...]
    read: Callable[[], torch.Tensor]
    experts: ExpertWeights | None = None


class LiveWeights:
    """Loads complete checkpoint tensors into a live vLLM model, and proves by digest that they are live there."""

    def __init__(self, model: nn.Module, *, rank: int = 0, num_ranks: int = 1) -> None:
        """Work out, from the live model alone, which checkpoint tensors it is made of.

        Args:
            model: The model inside a vLLM worker, after its first load.
            rank: This rank in its engine, from 0.
            num_ranks: Ranks of the engine, each of which holds its share of the model.

        Raises:
            RuntimeError: If a layer is of a kind that a refit cannot load yet; the message names it.
        """
        self._model: Any = model
        self._rank, self._num_ranks = rank, num_ranks
        self._parts = {part.spec.name: part for part in _parts_of(model)}
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

    @property
    def contents(self) -> Manifest:
        """What the live model is made of, in the order of the last refit."""
        return Manifest(tuple(self._parts[name].spec for name in self._order))

    def manifest(self) -> Manifest:
        """Return what a refit has to bring.

        Raises:
            RuntimeError: If the engine's prefix cache could not be emptied: what it holds comes from older weights.
        """
        if not self._caches_dropped:
            raise RuntimeError(
                "the engine's prefix cache must be empty before its weights change, but vLLM could not reset it: let "
                "running requests end first"
            )
        return self.contents

    @torch.no_grad()
    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Give complete tensors to the model's own loader.

        Raises:
            RuntimeError: If the loader did not take one of them.
        """
        self.version = None
        parts = [self._parts[name] for name, _ in tensors]
        if self._num_ranks > 1:
            for part, (name, tensor) in zip(parts, tensors, strict=True):
                self._received[name] = (tensor_digest(name, tensor), tensor_digest(name, tensor[part.share]))
        for part in parts:
            if part.experts is not None:
                part.experts.open()
        loaded = self._model.load_weights(iter(tensors))
        self._arrived += [name for name, _ in tensors]
        if loaded is None:
            raise RuntimeError(f"{type(self._model).__name__}.load_weights does not say what it loaded")
        left = [part.spec.name for part in parts if part.parameter not in loaded]
        if left:
            raise RuntimeError(f"vLLM's loader did not take {left[0]!r} ({len(left)} such tensors in this bucket)")

    @torch.no_grad()
    def finish(self, version: int) -> None:
        """Run the post-load step of what was loaded, then set the version."""
        for experts in {id(part.experts): part.experts for part in self._parts.values()}.values():
            if experts is not None:
                experts.close()
        # Whatever arrived, the next refit must find a manifest that names each tensor once.
        self._order = self._arrived if sorted(self._arrived) == sorted(self._parts) else list(self._parts)
        self.version = version

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
        sources = next(((target, s) for target, s in stacked.items() if f"{target}." in f".{name}"), None)
        if is_expert_layer(module):
            if leaf == "w13_weight":
                yield from _expert_parts(prefix, module)
            elif leaf != "w2_weight":
                raise RuntimeError(f"expert layer {prefix!r} has a parameter {leaf!r}, which a refit cannot load yet")
        elif sources is not None:
            yield from _stacked_parts(model, name, module, *sources)
        elif hasattr(module, "org_vocab_size"):
            yield _part(model, name, name, vocabulary_layout(parameter, module))
        else:
            yield _part(model, name, name, plain_layout(name, parameter, module))


def _check_loadable(name: str, parameter: torch.Tensor, module: nn.Module) -> None:
    method = getattr(module, "quant_method", None)
    if method is not None and not type(method).__name__.startswith("Unquantized"):
        raise RuntimeError(
            f"a refit into a quantised layer is not there yet, but {name!r} is one ({type(method).__name__}); set "
            "vllm_cfg.precision to auto"
        )
    if parameter.numel() == 0:
        raise RuntimeError(
            f"the engine has dropped the weights of {name!r} after packing them, so no refit can reach them; is the "
            "vLLM plugin 'nemo_rl_keep_weights' of nemo-rl-vllm switched off (VLLM_PLUGINS)?"
        )


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
    model: nn.Module, name: str, module: Any, target: str, sources: Sequence[tuple[str, Any]]
) -> Iterator[_Part]:
    """Yield the parts of a fused linear layer, which lie below one another in its first dimension."""
    order = {"q": 0, "k": 1, "v": 2}
    ordered = sorted(sources, key=lambda source: order.get(source[1], source[1]))
    layouts = fused_layouts(name, model.get_parameter(name), module, [source for source, _ in ordered])
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
