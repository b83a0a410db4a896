# SPDX-License-Identifier: Apache-2.0
"""A tiny model whose layers have whole blocks of 128 x 128, as bfloat16, as FP8 and as what FP8 leaves of it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nemo_rl_core.fp8.blockwise import cast_many, dequantise, pairs_of
from nemo_rl_core.protocols.settings import Fp8Weights, GenerationSettings, ModelSettings
from nemo_rl_core.workers.fp8_weights import matrix_shapes
from nemo_rl_vllm.config import VllmConfig
from nemo_rl_vllm.fp8 import fp8_weights, init_fp8
from tests.adapter.engine.checkpoints import CONTEXT, VOCAB, Checkpoint, write_random
from tests.adapter.engine.live import settings

#: HF config values; with two ranks each has 128 rows of k and v, and a block of o_proj's columns.
MODEL = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}
#: What stays in bfloat16 in the tests, beside heads and embeddings.
IGNORED = "layers.1.mlp.down_proj"
#: The same with experts, of which those of the second layer stay. Each token goes to all of them: a router of random weights
#: is near a tie now and then, and rounding would send the token to another one.
EXPERTS = {**MODEL, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
IGNORED_EXPERTS = "layers.1.mlp.experts"


@dataclass(frozen=True)
class Fp8Checkpoint:
    """One model in three folders.

    Attributes:
        plain: In bfloat16.
        cast: In FP8, as a refit sends it.
        rounded: In bfloat16 again, with the values that the FP8 one stands for.
    """

    plain: Checkpoint
    cast: Checkpoint
    rounded: Checkpoint


def fp8_settings(config: Mapping[str, Any] = MODEL, ignored: str = IGNORED, **options: Any) -> GenerationSettings:
    """Return what the driver tells a worker under ``precision: fp8``."""
    values = {"precision": "fp8", "quantization_ignored_layer_kws": (ignored,), "enforce_eager": True, **options}
    model = ModelSettings(hf_config=config, precision="bfloat16", max_total_sequence_length=CONTEXT)
    given = replace(settings("qwen3"), model=model, options=VllmConfig.model_validate(values).model_dump())
    return replace(given, fp8_weights=fp8_weights(given, lambda: matrix_shapes(model)))


def settled(given: GenerationSettings) -> Fp8Weights:
    """Return what of a model is cast."""
    assert given.fp8_weights is not None
    return given.fp8_weights


def make_fp8(folder: Path, seed: int, given: GenerationSettings) -> Fp8Checkpoint:
    """Write a checkpoint of which no tensor equals that of another seed."""
    weights = settled(given)
    checkpoint = write_random(folder / "plain", given.model.hf_config or {}, seed, dtype=torch.bfloat16, spread=0.1)
    plain = checkpoint.tensors
    cast = cast_tensors(plain, weights)
    pairs = pairs_of(cast)
    rounded = plain | {f"{name}.weight": dequantise(pair, torch.bfloat16) for name, pair in pairs.items()}

    def quantised(config: dict[str, Any]) -> None:
        config.update(init_fp8(weights, {})["hf_overrides"])

    return Fp8Checkpoint(
        plain=checkpoint,
        cast=_write(folder / "cast", folder / "plain", cast, quantised),
        rounded=_write(folder / "rounded", folder / "plain", rounded, lambda _: None),
    )


def cast_tensors(tensors: dict[str, torch.Tensor], weights: Fp8Weights) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors as a refit sends them."""
    modules = set(weights.cast)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        found |= cast_many({module: tensor}, power_of_two=weights.power_of_two) if module in modules else {name: tensor}
    return found


def _write(
    folder: Path, like: Path, tensors: dict[str, torch.Tensor], change: Callable[[dict[str, Any]], None]
) -> Checkpoint:
    """Write a folder with other tensors and another config."""
    folder.mkdir()
    for file in like.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return Checkpoint(folder)
