# SPDX-License-Identifier: Apache-2.0
"""Whether blocks of FP8 weights stay whole where vLLM fuses layers and shares them out over ranks; needs no torch."""

from collections.abc import Mapping
from itertools import accumulate

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.fp8.ignored_layers import FUSED, ResolvedLayers, narrow_patterns
from nemo_rl_core.protocols.settings import ModelSettings
from nemo_rl_vllm.checks import model_value
from nemo_rl_vllm.config import VllmConfig

__all__ = ["BLOCK", "check_blocks"]

#: Rows and columns of a block; that of ``nemo_rl_core.fp8.blockwise``, which needs torch.
BLOCK = 128

#: Layers whose input is what vLLM shares out over ranks, by its own models.
_ROW_PARALLEL = frozenset({"o_proj", "down_proj", "w2", "fc2", "c_proj", "out_proj", "dense_4h_to_h"})
#: Layers that every rank holds whole.
_REPLICATED = frozenset(FUSED["fused_qkv_a_proj"])
#: Layers whose output is what it shares out.
_COLUMN_PARALLEL = (
    frozenset({"w1", "w3", "fc1", "c_fc", "q_b_proj", "kv_b_proj", "dense_h_to_4h", *FUSED})
    | {member for members in FUSED.values() for member in members}
) - _REPLICATED
_KV = frozenset({"k_proj", "v_proj"})
#: Members of a fused layer after which another one begins.
_FIRST_MEMBERS = frozenset({"w1"}) | {member for members in FUSED.values() for member in members[:-1]}


def check_blocks(
    shapes: Mapping[str, tuple[int, ...]], resolved: ResolvedLayers, model: ModelSettings, options: VllmConfig
) -> None:
    """Ask that no rank's share, and no part of a fused layer, ends inside a block: its scale would belong to two.

    Args:
        shapes: Shape [N, K] of every matrix by module name.
        resolved: Which of them are cast.
        model: Whose config says into how many heads a fused layer of attention is cut.
        options: The section ``vllm_cfg``.

    Raises:
        ConfigError: Naming the first such module, and the ignore list with which all of them stay in bfloat16.
    """
    ranks = options.tensor_parallel_size
    cut = {name: why for name in resolved.cast if (why := _cut(name, (shapes[name][0], shapes[name][1]), ranks, model))}
    if not cut:
        return
    name, why = next(iter(cut.items()))
    patterns = narrow_patterns(cut, shapes, resolved.ignored)
    fewer = ranks > 1 and not any(_cut(each, (shapes[each][0], shapes[each][1]), 1, model) for each in cut)
    raise ConfigError(
        f"FP8 weights have blocks of {BLOCK} x {BLOCK}, and with policy.generation.vllm_cfg.tensor_parallel_size={ranks} "
        f"{why}: {name!r} is {list(shapes[name])}; {'take fewer ranks, or ' if fewer else ''}keep it in bfloat16 with "
        f"quantization_ignored_layer_kws: [{', '.join([*options.quantization_ignored_layer_kws, *patterns])}]"
    )


def _cut(name: str, shape: tuple[int, int], ranks: int, model: ModelSettings) -> str | None:
    """Return how a module's blocks are cut, or None."""
    last = name.rpartition(".")[2]
    rows, columns = shape
    is_expert = ".experts." in name
    if last in FUSED:
        return _cut_parts(_parts(last, rows, model), ranks, model_value(model, "num_key_value_heads"))
    if last in _ROW_PARALLEL:
        # The inner width of experts has whole blocks on every rank, since gate and up of all of them lie in one tensor.
        return _cut_share(columns, "columns", ranks, may_be_ragged=not is_expert)
    if last in _COLUMN_PARALLEL | _REPLICATED:
        shares = 1 if last in _REPLICATED else ranks
        if last in _KV:
            # With fewer KV heads than ranks, neighbours hold the same one.
            shares = min(ranks, model_value(model, "num_key_value_heads") or ranks)
        # Of the last member only where the layer is shared out.
        is_free = last not in _FIRST_MEMBERS and (ranks == 1 or last in _REPLICATED)
        return _cut_share(rows, "rows", shares, may_be_ragged=is_free and not is_expert)
    if ranks > 1 and (rows % (ranks * BLOCK) or columns % (ranks * BLOCK)):
        return (
            "a rank's share of it may end inside a block, since it is not known whether rows or columns are shared out"
        )
    return None


def _cut_share(size: int, what: str, shares: int, *, may_be_ragged: bool) -> str | None:
    if (shares == 1 and may_be_ragged) or (size % shares == 0 and (size // shares) % BLOCK == 0):
        return None
    if shares > 1:
        return f"{size / shares:g} {what} of it end inside a block"
    return f"its {size} {what}, where another part begins, end inside a block"


def _parts(last: str, rows: int, model: ModelSettings) -> list[int]:
    """Return the rows of each part of a layer that a checkpoint has fused; one part where the config does not say."""
    heads, kv_heads = model_value(model, "num_attention_heads"), model_value(model, "num_key_value_heads")
    if last == "gate_up_proj" and rows % 2 == 0:
        return [rows // 2] * 2
    if last == "qkv_proj" and heads:
        kv_heads = kv_heads or heads
        if rows % (heads + 2 * kv_heads) == 0:
            head = rows // (heads + 2 * kv_heads)
            return [heads * head, kv_heads * head, kv_heads * head]
    return [rows]


def _cut_parts(parts: list[int], ranks: int, kv_heads: int | None) -> str | None:
    """Say how the parts of a layer that comes fused are cut.

    vLLM takes the scales of each part from the block in which, or at which, it begins, as many as the part alone would
    have. They are those of the whole layer only where that comes out one after another.
    """
    if ranks == 1:
        blocks = [-(-part // BLOCK) for part in parts]
        edges = [-(-end // BLOCK) for end in accumulate(parts)]
        if list(accumulate(blocks)) == edges:
            return None
        return f"its parts of {', '.join(map(str, parts))} rows end inside a block"
    for index, part in enumerate(parts):
        shares = min(ranks, kv_heads or ranks) if len(parts) == 3 and index else ranks
        if why := _cut_share(part, "rows", shares, may_be_ragged=False):
            return why
    return None
