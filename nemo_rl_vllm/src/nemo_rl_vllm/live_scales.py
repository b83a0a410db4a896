# SPDX-License-Identifier: Apache-2.0
"""The FP8 scales of a live model's KV cache: found, set with all their copies at once, and read back.

vLLM keeps each scale several times: a buffer that kernels on a device read, a Python float that others take, a copy on
the host, and products that a backend computes from the float once. A scale that is set in one of them alone is right for
some kernels and 1.0 for the others. The buffers are there whatever the model's quantisation is, so this road needs no
scale parameters in the model, and it reaches MLA and Jamba, whose loaders lose every scale.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["LiveScales"]

_KINDS = ("q_scale", "k_scale", "v_scale")
_FP8_CACHES = ("fp8", "fp8_e4m3")
_PLAIN_CACHES = ("auto", "float16", "bfloat16", "float32")
# Products with a scale in them that a backend fills in once and never again (FlashInfer).
_DERIVED_ON_IMPL = ("bmm1_scale", "bmm2_scale", "o_sf_scale")
# Backends whose kernels read the buffers at each call (or that have no graphs, on a CPU). Another may take the float, which
# a CUDA graph keeps for ever.
_READ_BUFFERS = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")


class LiveScales:
    """Scales by live name, such as ``model.layers.3.self_attn.attn.k_scale``."""

    def __init__(self, model: nn.Module, *, graphs: bool = False) -> None:
        """Find the attention modules whose KV cache is FP8.

        Args:
            model: The model inside a vLLM worker.
            graphs: Whether the engine replays CUDA graphs.

        Raises:
            RuntimeError: If a cache is of another quantised type, has a scale for each head, or belongs to a backend that
                would go on with old scales inside its graphs.
        """
        self._modules: dict[str, Any] = {
            name: module for name, module in model.named_modules() if _has_fp8_cache(name, module)
        }
        for name, module in self._modules.items():
            _check_settable(name, module, graphs=graphs)

    @property
    def owners(self) -> tuple[str, ...]:
        """Names of the modules, in the model's order."""
        return tuple(self._modules)

    def names(self, *, include_q: bool = True) -> tuple[str, ...]:
        """Return the name of every scale, by owner, q before k before v."""
        return tuple(f"{owner}.{kind}" for owner in self._modules for kind in _KINDS[not include_q :])

    def require(self, names: Iterable[str]) -> None:
        """Compare with the names that a refit will bring.

        Raises:
            RuntimeError: If a module with an FP8 cache would get no k or v, q comes for some of them only, or a name is of
                no such module.
        """
        given = list(names)
        include_q = any(name.endswith(".q_scale") for name in given)
        live = self.names(include_q=include_q)
        missing = [name for name in live if name not in given]
        unknown = [name for name in given if name not in live]
        if missing or unknown:
            faults = [f"no scale comes for {missing[0]!r} ({len(missing)} such)"] if missing else []
            faults += [f"{unknown[0]!r} is not in it ({len(unknown)} such)"] if unknown else []
            raise RuntimeError(
                f"the engine's model has {len(self._modules)} attention modules with an FP8 KV cache, and a refit would bring "
                f"other scales than theirs: {'; '.join(faults)}. Keep the KV cache in the model's precision "
                "(kv_cache_dtype: auto, and a model without a kv_cache_scheme of its own)"
            )

    @torch.no_grad()
    def set(self, name: str, value: float) -> None:
        """Set a scale in every place where the engine keeps it.

        The caches must be empty: what lies in them was divided by the old one.

        Args:
            name: Live name.
            value: Positive and finite in float32.

        Raises:
            KeyError: If no module has this scale.
            RuntimeError: If the value is no scale.
        """
        module, kind = self._find(name)
        in_float32 = torch.tensor(value, dtype=torch.float32)
        if not (torch.isfinite(in_float32) and in_float32 > 0):
            raise RuntimeError(f"scale {name!r} must be a positive finite number in float32, got {value!r}")
        buffer = getattr(module, f"_{kind}")
        buffer.copy_(in_float32)
        # What the buffer holds now, in float32, so that all copies are equal bit for bit.
        setattr(module, f"_{kind}_float", buffer.item())
        on_host = getattr(module, f"_{kind}_cpu", None)
        if on_host is not None:
            on_host.copy_(in_float32)
        for derived in _DERIVED_ON_IMPL:
            if getattr(getattr(module, "impl", None), derived, None) is not None:
                setattr(module.impl, derived, None)
        if getattr(module, "_o_scale_float", None) is not None:
            # Divided into one of these products when it was first seen; it has to be seen again.
            module._o_scale_float = None

    def get(self, name: str) -> float:
        """Return a scale. Products that a backend makes of it are not read: ``set`` has them made anew.

        Raises:
            KeyError: If no module has this scale.
            RuntimeError: If the places where the engine keeps it do not agree.
        """
        module, kind = self._find(name)
        copies = {f"_{kind}": getattr(module, f"_{kind}").item(), f"_{kind}_float": getattr(module, f"_{kind}_float")}
        on_host = getattr(module, f"_{kind}_cpu", None)
        if on_host is not None:
            copies[f"_{kind}_cpu"] = on_host.item()
        if len(set(copies.values())) != 1:
            raise RuntimeError(f"the engine keeps different values of scale {name!r}: {copies}; refit again")
        return copies[f"_{kind}"]

    def _find(self, name: str) -> tuple[Any, str]:
        owner, _, kind = name.rpartition(".")
        if owner not in self._modules or kind not in _KINDS:
            raise KeyError(f"no module of the engine has the scale {name!r}")
        return self._modules[owner], kind


def _has_fp8_cache(name: str, module: Any) -> bool:
    dtype = getattr(module, "kv_cache_dtype", None)
    # An encoder attends without a cache; cross-attention (``encoder_decoder``) has one.
    kind = str(getattr(module, "attn_type", "decoder")).rpartition(".")[2].lower()
    if not hasattr(module, "_k_scale") or dtype is None or kind in ("encoder", "encoder_only"):
        return False
    if dtype not in (*_FP8_CACHES, *_PLAIN_CACHES):
        raise RuntimeError(
            f"{name!r} has a KV cache of type {dtype!r}, which a refit cannot scale; set vllm_cfg.kv_cache_dtype to fp8_e4m3 "
            "or auto"
        )
    return dtype in _FP8_CACHES


def _check_settable(name: str, module: Any, *, graphs: bool) -> None:
    if module._k_scale.numel() != 1 or module._v_scale.numel() != 1:
        raise RuntimeError(
            f"{name!r} has one scale for each head ({module._k_scale.numel()}), and a refit brings one for all; take the "
            "strategy attn_head out of the model's quantization_config"
        )
    backend = module.attn_backend.get_name() if hasattr(module, "attn_backend") else "?"
    if graphs and backend not in _READ_BUFFERS:
        raise RuntimeError(
            f"{name!r} runs on {backend}, which may keep an old scale inside a CUDA graph (known not to: "
            f"{', '.join(_READ_BUFFERS)}); set vllm_cfg.enforce_eager: true"
        )
