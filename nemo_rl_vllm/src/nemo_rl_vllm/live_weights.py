# SPDX-License-Identifier: Apache-2.0
"""A live vLLM model as a ``WeightSink``: what it is made of in checkpoint names, loaded and read back."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nemo_rl_core.refit.manifest import Manifest, TensorSpec
from nemo_rl_vllm.expert_weights import ExpertWeights, is_expert_layer

__all__ = ["LiveWeights"]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One checkpoint tensor and where it lies in the live model.

    Attributes:
        spec: Name, full shape and dtype in the checkpoint.
        parameter: Name of the live parameter that holds it.
        read: Reads it back from the live model.
        experts: The expert layer that it belongs to, or None.
    """

    spec: TensorSpec
    parameter: str
    read: Callable[[], torch.Tensor]
    experts: ExpertWeights | None = None


class LiveWeights:
    """Loads complete checkpoint tensors into a live vLLM model, and reads them back for the digest."""

    def __init__(self, model: nn.Module) -> None:
        """Work out, from the live model alone, which checkpoint tensors it is made of.

        Args:
            model: The model inside a vLLM worker, after its first load.

        Raises:
            RuntimeError: If a layer is of a kind that a refit cannot load yet; the message names it.
        """
        self._model: Any = model
        self._parts = {part.spec.name: part for part in _parts_of(model)}
        self._caches_dropped = False
        #: Names in the order of the last refit: a set's digest depends on the sender's order.
        self._order = list(self._parts)
        self._arrived: list[str] = []
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

    def live_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every checkpoint tensor as the live model holds it now."""
        for name, part in self._parts.items():
            yield name, part.read()


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
            # vLLM pads the vocabulary; the rows behind it belong to no checkpoint.
            yield _part(model, name, name, slice(0, int(module.org_vocab_size)))
        else:
            yield _part(model, name, name, slice(None))


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


def _part(model: nn.Module, checkpoint_name: str, name: str, rows: slice) -> _Part:
    def read() -> torch.Tensor:
        # Looked up each time: the engine may have put another tensor in its place.
        return model.get_parameter(name).data[rows]

    return _Part(spec=TensorSpec.of(checkpoint_name, read()), parameter=name, read=read)


def _stacked_names(model: nn.Module) -> dict[str, list[tuple[str, Any]]]:
    """Return, for each piece of a live name that stands for several checkpoint tensors, their pieces and shards."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    found: dict[str, list[tuple[str, Any]]] = {}
    for source, (target, shard) in getattr(mapper, "orig_to_new_stacked", {}).items():
        found.setdefault(target, []).append((source, shard))
    return found


def _stacked_parts(
    model: nn.Module, name: str, module: Any, target: str, sources: Sequence[tuple[str, Any]]
) -> Iterator[_Part]:
    """Yield the parts of a fused linear layer, which lie below one another in its first dimension."""
    sizes = getattr(module, "output_sizes", None)
    order = {"q": 0, "k": 1, "v": 2}
    ordered = sorted(sources, key=lambda source: order.get(source[1], source[1]))
    num_rows = model.get_parameter(name).shape[0]
    if sizes is None or len(sizes) != len(ordered) or sum(sizes) != num_rows:
        raise RuntimeError(
            f"fused layer {name!r} has {num_rows} rows, which are not those of its parts "
            f"{[source for source, _ in ordered]} with {sizes}"
        )
    start = 0
    for (source, _), size in zip(ordered, sizes, strict=True):
        checkpoint_name = f".{name}".replace(target, source, 1).removeprefix(".")
        yield _part(model, checkpoint_name, name, slice(start, start + size))
        start += size


def _expert_parts(prefix: str, layer: nn.Module) -> Iterator[_Part]:
    """Yield the parts of an expert layer: gate, up and down of each expert."""
    experts = ExpertWeights(prefix, layer)

    def reader(tensor: str, expert: int, rows: slice) -> Callable[[], torch.Tensor]:
        return lambda: experts.read(tensor, expert)[rows]

    for name, tensor, expert, rows in experts.parts():
        read = reader(tensor, expert, rows)
        yield _Part(spec=TensorSpec.of(name, read()), parameter=f"{prefix}.{tensor}", read=read, experts=experts)
