# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies that several test files share."""

import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st


def use_reproducible_examples() -> None:
    """Make Hypothesis draw the same examples in each run, and assert no timings: the machine may be busy."""
    settings.register_profile("reproducible", derandomize=True, deadline=None)
    settings.load_profile("reproducible")


def attention_namings(*, layers: st.SearchStrategy[tuple[int, ...] | None] | None = None) -> st.SearchStrategy[Any]:
    """`AttentionNaming`s of the families in the tables, with arbitrary layer subsets or none."""
    from nemo_rl_core.fp8.scale_names import AttentionNaming

    subsets = st.lists(st.integers(0, 400), unique=True, min_size=1, max_size=12).map(tuple)
    blocks = st.sampled_from(
        [
            ("model.layers", "self_attn"),
            ("language_model.model.layers", "self_attn"),
            ("transformer.h", "self_attention"),
            ("transformer.h", "attn"),
            ("backbone.layers", "mixer"),
            ("model.decoder.layers", "encoder_attn"),
            ("h", "0.layers.1"),
        ]
    )
    return st.builds(
        lambda block, live, inner, layers: AttentionNaming(
            prefix=block[0], attention=block[1], live_names=live, inner=inner, layers=layers
        ),
        blocks,
        st.booleans(),
        st.sampled_from(["attn", "mla_attn.mla_attn"]),
        st.none() | subsets if layers is None else layers,
    )


def scale_values() -> st.SearchStrategy[float]:
    """FP8 scales as calibration gives them: positive, finite and not lost in float32."""
    return st.floats(min_value=1e-30, max_value=1e30, allow_nan=False, allow_infinity=False)


@st.composite
def calibration_results(draw: st.DrawFn, layers: tuple[int, ...] | None = None) -> dict[str, dict[str, float]]:
    """Calibration results over given or arbitrary layers, in any order; q is there or not, layer by layer."""
    numbers = list(layers) if layers is not None else draw(st.lists(st.integers(0, 10**6), unique=True, max_size=12))
    kinds = st.fixed_dictionaries(
        {"k_scale": scale_values(), "v_scale": scale_values()}, optional={"q_scale": scale_values()}
    )
    return {f"layer_{number}": draw(kinds) for number in draw(st.permutations(numbers))}


def yaml_values() -> st.SearchStrategy[Any]:
    """Plain values that a YAML file can hold, with the strings that YAML versions read as something else."""
    traps = ["5e-6", "1e5", "no", "Yes", "off", "true", "null", "~", "010", "0o7", "0x1F", "1:30", "1_0", ".inf", "<<"]
    texts = st.sampled_from(
        [*traps, "a\x85b", "\u2028", "", "=", "- a", "a: b", "#", "2026-01-01", "x\ny\n", " a ", "ü", "$x", "[", "'"]
    )
    leaves = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**18), 10**18),
        st.floats(allow_nan=False),
        texts,
        st.text(st.characters(codec="utf-8"), max_size=12),
    )
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(texts | st.text("abz_", max_size=3), inner, max_size=3)
        ),
        max_leaves=8,
    )


@st.composite
def run_config_mappings(draw: st.DrawFn) -> dict[str, Any]:
    """Valid configs as plain mappings: one node or several, one optimizer step a rollout or several."""
    num_nodes = draw(st.integers(1, 4))
    slots = draw(st.integers(2 if num_nodes == 1 else 1, 8))
    generation_nodes = draw(st.integers(1, max(1, num_nodes - 1)))
    generation_slots = draw(st.integers(1, slots - 1)) if num_nodes == 1 else slots
    train_workers = slots - generation_slots if num_nodes == 1 else (num_nodes - generation_nodes) * slots
    micro, share, optimizer_steps = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    batch = train_workers * micro * share
    group = draw(st.sampled_from([2, 4]))
    length = draw(st.integers(3, 4096))
    from_folder = draw(st.booleans())
    return {
        "policy": {
            "model_name": "/models/a" if from_folder else None,
            "hf_config": None if from_folder else {"model_type": "qwen3", "extra": draw(yaml_values())},
            "tokenizer": {}
            if from_folder
            else {"characters": draw(st.sampled_from(["0123456789", "yes", "5e-6", "[]"]))},
            "train_global_batch_size": batch * group,
            "train_micro_batch_size": micro * group,
            "max_total_sequence_length": length,
            "precision": draw(st.sampled_from(["float32", "bfloat16"])),
            "scheduler": draw(st.sampled_from([None, {"name": "torch.optim.lr_scheduler.LinearLR"}])),
            "generation": {
                "backend": draw(st.sampled_from(["torch", "vllm"])),
                "max_new_tokens": draw(st.integers(1, length - 1)),
                "temperature": draw(st.floats(0.01, 10)),
                "stop_token_ids": draw(st.none() | st.lists(st.integers(0, 99), max_size=2)),
                "stop_strings": draw(st.none() | st.lists(st.sampled_from(["no", "1e5", "\n"]), max_size=2)),
                "some_cfg": {"a": draw(yaml_values())},
                "colocated": {
                    "resources": {
                        "gpus_per_node": generation_slots if num_nodes == 1 or draw(st.booleans()) else None,
                        "num_nodes": None if num_nodes == 1 else generation_nodes,
                    }
                },
            },
        },
        "grpo": {"num_prompts_per_step": batch * optimizer_steps, "num_generations_per_prompt": group},
        "data": {"task": "addition", "task_kwargs": {"value": draw(yaml_values())}},
        "cluster": {"num_nodes": num_nodes, "gpus_per_node": slots},
        "run_dir": draw(st.sampled_from([None, "results/x", "1e5"])),
    }


def guard_policies() -> st.SearchStrategy[Any]:
    """`guard.Policy` objects that the table of forbidden roots admits."""
    from nemo_rl_core.guard.policy import ENGINE_ROOTS, ON_VIOLATION, ROLES, Policy

    def subsets(values: Any) -> st.SearchStrategy[tuple[str, ...]]:
        return st.lists(st.sampled_from(sorted(values)), unique=True, max_size=3).map(tuple)

    return st.builds(
        Policy,
        role=st.sampled_from(ROLES),
        on_violation=st.sampled_from(ON_VIOLATION),
        allow=subsets(frozenset().union(*ENGINE_ROOTS.values())),
        lifted=subsets(ENGINE_ROOTS),
        forbid=st.lists(st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True), unique=True, max_size=3).map(tuple),
    )


@st.composite
def named_tensors(draw: st.DrawFn, min_size: int = 0) -> list[tuple[str, Any]]:
    """Named tensors for a refit: any dtype, 0-d, empty, transposed or strided, NaNs included; some are tied."""
    import torch

    dtypes = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.complex64,
        torch.int64,
        torch.int8,
        torch.bool,
        torch.float8_e4m3fn,
    )
    names = draw(st.lists(st.text("ab.0é", min_size=1, max_size=6), unique=True, min_size=min_size, max_size=6))
    tensors: list[tuple[str, Any]] = []
    for name in names:
        if tensors and draw(st.integers(0, 5)) == 0:
            tensors.append((name, tensors[-1][1]))
            continue
        dtype = draw(st.sampled_from(dtypes))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        num_bytes = 2 * math.prod(shape) * dtype.itemsize
        raw = torch.tensor(list(draw(st.binary(min_size=num_bytes, max_size=num_bytes))), dtype=torch.uint8)
        flat = raw % 2 == 1 if dtype is torch.bool else raw.view(dtype)
        layout = draw(st.sampled_from(["dense", "strided", "transposed", "offset"]))
        half = flat.numel() // 2
        tensor = {"strided": flat[::2], "offset": flat[half:]}.get(layout, flat[:half]).reshape(shape)
        if layout == "strided" and len(shape) == 1:
            tensor = flat[::2]
        tensors.append((name, tensor.t() if layout == "transposed" and len(shape) == 2 else tensor))
    return tensors
