# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints in which every tensor is random, and transformers' own word on what they should generate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl_core.data.tokenizers import character_tokenizer
from nemo_rl_core.protocols.generation import Completion

CHARACTERS = "0123456789?abcdefghijklmnopqrstuvwxyz"
VOCAB = len(CHARACTERS) + 3
CONTEXT = 256

_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}
# vLLM's Qwen2 takes no head_dim of its own, and its kernel for CPUs none below 32.
_QWEN2 = {**_BASE, "model_type": "qwen2", "num_attention_heads": 2, "num_key_value_heads": 1}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

#: HF config values of each family that refits are proven for.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {**_BASE, "model_type": "qwen3"},
    "qwen3_tied": {**_BASE, "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": {**_BASE, **_EXPERTS, "model_type": "qwen3_moe"},
    "qwen2": _QWEN2,
    "qwen2_tied": {**_QWEN2, "tie_word_embeddings": True},
    "llama": {**_BASE, "model_type": "llama"},
    "llama_tied": {**_BASE, "model_type": "llama", "tie_word_embeddings": True},
    # Its checkpoint has q, k and v in one tensor, and gate and up in another.
    "phi3": {**_QWEN2, "model_type": "phi3", "pad_token_id": 0},
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    folder: Path

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors under the names that they have in the file."""
        return load_file(self.folder / "model.safetensors")

    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Return what transformers gives to each token after the prompt, in one teacher-forced pass."""
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def make(folder: Path, family: str, seed: int) -> Checkpoint:
    """Write a checkpoint of a family."""
    return write_random(folder, FAMILIES[family], seed)


def write_random(
    folder: Path, hf_config: Mapping[str, Any], seed: int, *, dtype: torch.dtype = torch.float32, spread: float = 0.25
) -> Checkpoint:
    """Write a checkpoint of which no tensor equals that of another seed; weights have a standard deviation of ``spread``."""
    values = dict(hf_config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=stream)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else spread * noise)
    model.save_pretrained(folder)
    character_tokenizer(CHARACTERS).save_pretrained(folder)
    return Checkpoint(folder)


def gap(checkpoint: Checkpoint, prompt: Sequence[int], completion: Completion) -> float:
    """Return the largest distance of a completion's logprobs from transformers' own."""
    expected = checkpoint.logprobs(prompt, completion.token_ids)
    return max(abs(a - b) for a, b in zip(expected, completion.logprobs, strict=True))
