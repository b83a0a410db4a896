# SPDX-License-Identifier: Apache-2.0
"""FP8 weights as vLLM wants them: which modules are cast, and the engine's arguments for it; needs neither vLLM nor torch.

vLLM and the sender decide for each module whether it is FP8. Both follow the one list that `fp8_weights` settles in the
driver: the sender casts what is on it, and `init_fp8` tells the engine to leave the rest alone.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.fp8.ignored_layers import IgnoreRules, resolve_ignored_layers
from nemo_rl_core.protocols.settings import Fp8Weights, GenerationSettings
from nemo_rl_vllm.checks import check_quantization_config
from nemo_rl_vllm.config import VllmConfig
from nemo_rl_vllm.fp8_blocks import BLOCK, check_blocks

__all__ = ["BLOCK", "fp8_weights", "init_fp8"]

_EXPERTS = re.compile(r"(.+\.experts)\..+")


def fp8_weights(settings: GenerationSettings, shapes: Callable[[], Mapping[str, tuple[int, ...]]]) -> Fp8Weights | None:
    """Settle which weights travel in FP8; what ``BackendSpec.fp8_weights`` names.

    Args:
        settings: What every worker is told; ``options`` is the section ``vllm_cfg``.
        shapes: Returns the shape of every matrix of the model by module name, [N, K], or [E, N, K] where a checkpoint has
            experts in one tensor; called under ``precision: fp8`` only.

    Returns:
        None unless ``vllm_cfg.precision`` is ``fp8``.

    Raises:
        ConfigError: If an ignore pattern hits nothing, a rank's share of a module would cut through a block, or experts are
            in one tensor.
    """
    options = VllmConfig.model_validate(dict(settings.options))
    if options.precision != "fp8":
        return None
    found = shapes()
    if stacks := [name for name, shape in found.items() if len(shape) == 3]:
        raise ConfigError(
            f"policy.generation.vllm_cfg.precision=fp8 cannot be had for this model yet: its checkpoint has experts in one "
            f"tensor ({stacks[0]!r}, {list(found[stacks[0]])}), which no refit casts; set it to auto"
        )
    try:
        rules = IgnoreRules(
            quantization_ignored_layer_kws=options.quantization_ignored_layer_kws,
            num_first_layers_in_bf16=options.num_first_layers_in_bf16,
            num_last_layers_in_bf16=options.num_last_layers_in_bf16,
        )
        resolved = resolve_ignored_layers(found, rules)
    except ConfigError as error:
        raise ConfigError(f"policy.generation.vllm_cfg: {error}") from None
    check_blocks(found, resolved, settings.model, options)
    return Fp8Weights(
        cast=resolved.cast,
        ignored=dict(resolved.ignored),
        power_of_two=options.pow2_weight_scaling_factors,
        report=resolved.report(),
    )


def init_fp8(weights: Fp8Weights, hf_overrides: Mapping[str, Any], *, device: str = "cpu") -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` by which it computes with FP8 weights.

    Args:
        weights: Which modules are cast, and which are not.
        hf_overrides: The user's own overrides of the model's config, which stay.
        device: ``cpu`` or ``cuda``.

    Returns:
        ``hf_overrides`` with the user's keys and the ``quantization_config`` of a block-quantised checkpoint, whose ignore
        list holds full module names: vLLM compares whole names. On CUDA, for FP8 experts, the ``moe_backend`` that takes
        them as they lie in a checkpoint.

    Raises:
        ConfigError: If the user overrides ``quantization_config`` too.
    """
    check_quantization_config(hf_overrides)
    quantization = {
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
        "ignored_layers": _ignore_list(weights),
    }
    arguments: dict[str, Any] = {"hf_overrides": {**hf_overrides, "quantization_config": quantization}}
    if device == "cuda" and any(_EXPERTS.fullmatch(name) for name in weights.cast):
        arguments["moe_backend"] = "triton"
    return arguments


def _ignore_list(weights: Fp8Weights) -> list[str]:
    """Return the modules that stay; the experts of a layer, which vLLM keeps as one module, under its name."""
    names = (match[1] if (match := _EXPERTS.fullmatch(name)) else name for name in weights.ignored)
    return list(dict.fromkeys(names))
