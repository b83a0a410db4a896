# SPDX-License-Identifier: Apache-2.0
"""FP8 weights as vLLM wants them: which modules are cast, and the engine's arguments for it; needs neither vLLM nor torch.

vLLM and the sender decide for each module whether it is FP8. Both follow the one list that `fp8_weights` settles in the
driver: the sender casts what is on it, and `init_fp8` tells the engine to leave the rest alone.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.fp8.ignored_layers import FUSED, IgnoreRules, resolve_ignored_layers
from nemo_rl_core.protocols.settings import Fp8Weights, GenerationSettings
from nemo_rl_vllm.checks import check_quantization_config, model_value
from nemo_rl_vllm.config import VllmConfig

__all__ = ["BLOCK", "fp8_weights", "init_fp8"]

#: Rows and columns of a block; that of ``nemo_rl_core.fp8.blockwise``, which needs torch.
BLOCK = 128

_EXPERTS = re.compile(r"(.+\.experts)\..+")
#: Layers whose input is what vLLM shares out over ranks; of all others it is the output.
_ROW_PARALLEL = frozenset({"o_proj", "down_proj", "w2"})
_COLUMN_PARALLEL = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", *FUSED})
_KV = frozenset({"k_proj", "v_proj"})
#: Members that lie last in a fused layer, whose end no other member has to follow.
_LAST_MEMBERS = frozenset({"v_proj", "up_proj"})


def fp8_weights(settings: GenerationSettings, shapes: Callable[[], Mapping[str, tuple[int, int]]]) -> Fp8Weights | None:
    """Settle which weights travel in FP8; what ``BackendSpec.fp8_weights`` names.

    Args:
        settings: What every worker is told; ``options`` is the section ``vllm_cfg``.
        shapes: Returns the shape [N, K] of every matrix of the model by module name; called under ``precision: fp8`` only.

    Returns:
        None unless ``vllm_cfg.precision`` is ``fp8``.

    Raises:
        ConfigError: If an ignore pattern hits nothing, or a rank's share of a module would cut through a block.
    """
    options = VllmConfig.model_validate(dict(settings.options))
    if options.precision != "fp8":
        return None
    found = shapes()
    rules = IgnoreRules(
        quantization_ignored_layer_kws=options.quantization_ignored_layer_kws,
        num_first_layers_in_bf16=options.num_first_layers_in_bf16,
        num_last_layers_in_bf16=options.num_last_layers_in_bf16,
    )
    try:
        resolved = resolve_ignored_layers(found, rules)
    except ConfigError as error:
        raise ConfigError(f"policy.generation.vllm_cfg: {error}") from None
    kv_heads = model_value(settings.model, "num_key_value_heads")
    for name in resolved.cast:
        _check_blocks(name, found[name], options.tensor_parallel_size, kv_heads)
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


def _check_blocks(name: str, shape: tuple[int, int], num_ranks: int, kv_heads: int | None) -> None:
    """Ask that no rank's share, and no member of a fused layer, ends inside a block: its scale would belong to two."""
    last = name.rpartition(".")[2]
    if last in _ROW_PARALLEL:
        size, what, shares = shape[1], "columns", num_ranks
    elif last in _COLUMN_PARALLEL:
        # With fewer KV heads than ranks, neighbours hold the same one.
        size, what, shares = shape[0], "rows", min(num_ranks, kv_heads or num_ranks) if last in _KV else num_ranks
    else:
        return  # the engine's own layer says whether it can be shared out
    experts = _EXPERTS.fullmatch(name)
    # The inner width of experts has whole blocks on every rank, since gate and up of all of them lie in one tensor.
    may_be_ragged = last in _ROW_PARALLEL or last in _LAST_MEMBERS or last in FUSED
    if num_ranks == 1 and may_be_ragged and not experts:
        return
    if size % shares == 0 and (size // shares) % BLOCK == 0:
        return
    stays = ".".join(experts[1].split(".")[-2:]) if experts else _group_of(last)
    share = f"{size / shares:g} {what} of it" if shares > 1 else f"its {size} {what}, where another part begins,"
    raise ConfigError(
        f"FP8 weights have blocks of {BLOCK} x {BLOCK}, and with policy.generation.vllm_cfg.tensor_parallel_size={num_ranks} "
        f"{share} end inside a block: {name!r} is {list(shape)}; {'take fewer ranks, or ' if num_ranks > 1 else ''}keep it in "
        f"bfloat16 with quantization_ignored_layer_kws: [{stays}]"
    )


def _group_of(last: str) -> str:
    """Return what to ignore for a module: its fused layer, whose members have one precision."""
    return next((whole for whole, members in FUSED.items() if last in members), last)
