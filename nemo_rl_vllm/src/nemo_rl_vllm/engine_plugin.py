# SPDX-License-Identifier: Apache-2.0
"""What vLLM runs in each of its processes before it builds a model, by its entry point group ``vllm.general_plugins``.

The worker extension cannot do this: vLLM calls it only once the model has been built. ``docs/design/vllm-worker.md``
says why the switches below are the least that is needed.
"""

import os

__all__ = ["FP8_WEIGHTS", "KEEP_WEIGHTS", "keep_weights_loadable"]

#: Set to 1 by the generation worker; every other vLLM in the same environment stays as it is.
KEEP_WEIGHTS = "NEMO_RL_VLLM_KEEP_WEIGHTS"
#: Set to 1 by it where the weights come in FP8.
FP8_WEIGHTS = "NEMO_RL_VLLM_FP8_WEIGHTS"


def keep_weights_loadable() -> None:
    """Switch off, on a CPU, the packing of linear weights that drops the originals, so that a refit finds them.

    Both are constants of vLLM that choose a kernel; no function is replaced. ``torch.nn.functional.linear`` is what is
    left then, which reads the parameter itself. For FP8 weights, on any device, the kernels that keep them are what vLLM
    chooses from.

    Raises:
        RuntimeError: If this vLLM has no such switch.
    """
    if os.environ.get(KEEP_WEIGHTS) != "1":
        return
    if os.environ.get(FP8_WEIGHTS) == "1":
        from nemo_rl_vllm.fp8_kernels import register_kernels

        register_kernels()
    from vllm.platforms import current_platform  # pyrefly: ignore[missing-import] - only in the engine's environment

    if not current_platform.is_cpu():
        return
    from vllm import _custom_ops  # pyrefly: ignore[missing-import] - only in the engine's environment
    from vllm.model_executor.layers import utils  # pyrefly: ignore[missing-import] - only in the engine's environment

    for module, name, value in (
        (_custom_ops, "_supports_onednn", False),
        (utils, "_CPU_SGL_GEMM_MAX_WEIGHT_BYTES", -1),
    ):
        if not hasattr(module, name):
            raise RuntimeError(
                f"this vLLM has no {module.__name__}.{name}, by which linear weights are kept loadable on a CPU; use a "
                "version of the adapter's range"
            )
        setattr(module, name, value)
