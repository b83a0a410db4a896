# SPDX-License-Identifier: Apache-2.0
"""Kernels for block-quantised FP8 linear layers whose weights a refit can load, in vLLM's own registry of kernels.

What vLLM does with FP8 weights after a load is up to the kernel: one for CPUs packs them, DeepGEMM rounds and repacks them,
and all put bare parameters in their place, which vLLM's own loader can no longer load. The kernels here leave values and
scales as they were loaded, so there is nothing to undo. vLLM chooses among them as it does among its own.
"""

from typing import Any

import torch

from nemo_rl_core.fp8.blockwise import BLOCK, BlockwiseWeight, dequantise

__all__ = ["keeping", "keeps_experts", "keeps_weights", "register_kernels"]

#: Attribute of a kernel that leaves the parameters as they were loaded.
_KEEPS = "nemo_rl_keeps_weights"


def keeps_weights(kernel: object) -> bool:
    """Say whether a layer's kernel leaves the parameters as they were loaded."""
    return bool(getattr(kernel, _KEEPS, False))


def register_kernels() -> None:
    """Leave vLLM, on this platform, no other kernels for block-quantised linear layers than those that keep weights.

    On a CPU that is one that needs no AMX, and one for experts; they multiply values by scales for each forward pass, so
    they are for tests and for debugging. On CUDA it is each of vLLM's own that computes with values and scales as they lie
    in a checkpoint; for experts `init_fp8` asks for such a one.

    Raises:
        RuntimeError: If this vLLM keeps its kernels elsewhere.
    """
    try:
        from vllm.model_executor.kernels import (  # pyrefly: ignore[missing-import] - only in the engine's environment
            linear,
        )
        from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (  # pyrefly: ignore[missing-import]
            Fp8BlockScaledMMLinearKernel,
        )
        from vllm.platforms import (  # pyrefly: ignore[missing-import] - only in the engine's environment
            PlatformEnum,
            current_platform,
        )

        kernels = linear._POSSIBLE_FP8_BLOCK_KERNELS
        if current_platform.is_cpu():
            from vllm.model_executor.layers.fused_moe.experts import (  # pyrefly: ignore[missing-import]
                cpu_moe,
            )

            _keep_experts(cpu_moe)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"this vLLM does not keep its FP8 kernels where this adapter looks for them ({error}), so no refit could load "
            "them; use a version of the adapter's range, or set vllm_cfg.precision to auto"
        ) from error
    if current_platform.is_cpu():
        kernels[PlatformEnum.CPU] = [_cpu_kernel(Fp8BlockScaledMMLinearKernel)]
    elif current_platform.is_cuda():
        kernels[PlatformEnum.CUDA] = keeping(kernels[PlatformEnum.CUDA], Fp8BlockScaledMMLinearKernel)


def keeping(kernels: list[type], base: type) -> list[type]:
    """Return those kernels that need nothing done to weights after a load, each made to do nothing.

    Args:
        kernels: Kernels of vLLM, in its order of preference.
        base: Their base class, whose own step after a load changes values on ROCm alone; a kernel with a step of its own
            is left out.
    """
    step = "process_weights_after_loading"
    found = []
    for kernel in kernels:
        if keeps_weights(kernel):
            found.append(kernel)  # of an earlier call
            continue
        if not issubclass(kernel, base) or getattr(kernel, step) is not getattr(base, step):
            continue
        body = {step: _leave, _KEEPS: True, "__module__": __name__, "__doc__": kernel.__doc__}
        found.append(type(f"Keeping{kernel.__name__}", (kernel,), body))
    return found


def keeps_experts(method: Any) -> bool:
    """Say whether a layer's FP8 method leaves its experts as they were loaded.

    On CUDA vLLM's Triton kernel takes them as they lie in a checkpoint, with the blocks that they have there.
    """
    kernel = getattr(method, "moe_kernel", None)
    experts = getattr(getattr(kernel, "impl", kernel), "fused_experts", None)
    triton = getattr(getattr(method, "fp8_backend", None), "name", "") == "TRITON"
    return keeps_weights(experts) or (triton and list(getattr(method, "moe_block_shape", ())) == [BLOCK, BLOCK])


def _leave(_kernel: object, _layer: object) -> None:
    """Leave values and scales as they were loaded."""


def _keep_experts(cpu_moe: Any) -> None:
    """Put a kernel of plain torch in the place of vLLM's for FP8 experts on CPUs: for experts there is no registry."""
    if keeps_weights(cpu_moe.CPUExpertsFp8):
        return
    cpu_moe.CPUExpertsFp8 = _cpu_experts(cpu_moe.CPUExpertsFp8)
    cpu_moe.CPUExpertsFp8W8A8 = _never(cpu_moe.CPUExpertsFp8W8A8)  # it packs them, and is preferred where it runs
    if not callable(getattr(cpu_moe, "prepare_fp8_moe_layer_for_cpu", None)):
        raise AttributeError(f"{cpu_moe.__name__} has no prepare_fp8_moe_layer_for_cpu")
    cpu_moe.prepare_fp8_moe_layer_for_cpu = lambda w13, w2: (w13, w2)


def _never(base: Any) -> type:
    """Return a kernel that runs nowhere."""
    return type(f"No{base.__name__}", (base,), {"_supports_current_device": staticmethod(lambda: False)})


def _cpu_experts(base: Any) -> type:
    """Return a kernel of plain torch for the experts of a layer."""

    class KeepingCpuExperts(base):
        """Each expert's values times scales in float32, then its layers in the activations' type."""

        @staticmethod
        def _supports_current_device() -> bool:
            return True

        def apply(
            self,
            output: torch.Tensor,
            hidden_states: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            **others: Any,
        ) -> None:
            if others.get("apply_router_weight_on_input") or others.get("expert_map") is not None:
                raise NotImplementedError("weights of the router on the input, or experts shared out over ranks")
            total = torch.zeros(hidden_states.shape, dtype=torch.float32)
            for expert in range(w1.shape[0]):
                tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
                x = hidden_states[tokens]
                w13_pair = BlockwiseWeight(weight=w1.data[expert], weight_scale_inv=self.w1_scale.data[expert])
                w2_pair = BlockwiseWeight(weight=w2.data[expert], weight_scale_inv=self.w2_scale.data[expert])
                gate, up = torch.nn.functional.linear(x, dequantise(w13_pair, x.dtype)).chunk(2, -1)
                down = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, dequantise(w2_pair, x.dtype))
                total.index_add_(0, tokens, down.float() * topk_weights[tokens, choices, None].float())
            output.copy_(total)

    setattr(KeepingCpuExperts, _KEEPS, True)
    return KeepingCpuExperts


def _cpu_kernel(base: Any) -> type:
    """Return a kernel of plain torch."""

    class KeepingCpuKernel(base):
        """Values times scales in float32, then a linear layer in the activations' type."""

        apply_input_quant = False

        @classmethod
        def is_supported(cls, _capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            shape = config.weight_quant_key.scale.group_shape
            if (shape.row, shape.col) != (BLOCK, BLOCK):
                return False, f"takes blocks of {BLOCK} x {BLOCK}, got {shape.row} x {shape.col}."
            return True, None

        process_weights_after_loading = _leave

        def apply_weights(
            self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **_: Any
        ) -> torch.Tensor:
            cast = BlockwiseWeight(weight=layer.weight.data, weight_scale_inv=layer.weight_scale_inv.data)
            return torch.nn.functional.linear(x, dequantise(cast, x.dtype), bias)

        def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> torch.Tensor:
            raise NotImplementedError("apply_weights does all of it")

    setattr(KeepingCpuKernel, _KEEPS, True)
    return KeepingCpuKernel
