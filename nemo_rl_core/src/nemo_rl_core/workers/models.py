# SPDX-License-Identifier: Apache-2.0
"""HF causal language models: loading, and logprobs without whole logits."""

from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from nemo_rl_core.errors import ModelError
from nemo_rl_core.protocols.settings import ModelSettings
from nemo_rl_core.workers.checkpoint_names import CheckpointNames
from nemo_rl_core.workers.output_head import compute_head_in_float32

__all__ = [
    "LogprobModel",
    "build_model",
    "build_with_unexpected",
    "check_logprobs",
    "check_model",
    "empty_model",
    "load_config",
    "random_model",
]


#: Files that hold weights in a HF folder.
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def load_config(settings: ModelSettings) -> PretrainedConfig:
    """Return the HF config that the settings describe.

    Raises:
        ModelError: If neither or both of folder and config are given, the folder is missing, the model type is
            unknown, or the context is shorter than ``max_total_sequence_length``.
    """
    if (settings.folder is None) == (settings.hf_config is None):
        raise ModelError("a model needs exactly one of policy.model_name (a local folder) and policy.hf_config")
    if settings.folder is not None:
        if not Path(settings.folder).is_dir():
            raise ModelError(
                f"policy.model_name must be a local HF folder, got {settings.folder!r}, which does not exist; nothing is "
                "downloaded at run time"
            )
        try:
            config = AutoConfig.from_pretrained(settings.folder, local_files_only=True, **settings.overrides)
        except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
            raise ModelError(f"the folder {settings.folder!r} holds no HF config that can be read: {error}") from error
    else:
        values = {**(settings.hf_config or {}), **settings.overrides}
        try:
            config = AutoConfig.for_model(values.pop("model_type"), **values)
        except (KeyError, ValueError, TypeError, StrictDataclassError) as error:
            raise ModelError(
                f"policy.hf_config needs a model_type that transformers knows, and values that fit it: {error}"
            ) from error
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and settings.max_total_sequence_length > context:
        raise ModelError(
            f"policy.max_total_sequence_length is {settings.max_total_sequence_length}, but the model's context has "
            f"{context} positions; lower the one or raise max_position_embeddings through policy.hf_config_overrides"
        )
    return config


def check_model(settings: ModelSettings, tokenizer_size: int) -> None:
    """Find what can be found wrong with a model before any worker starts; loads no weights.

    Args:
        settings: Which model.
        tokenizer_size: Number of token ids that the tokenizer may give.

    Raises:
        ModelError: If the config cannot be read, the folder has no weights, the vocabulary is too small, or the weights
            could not be sent under a checkpoint's names, the head cannot compute as asked, or the checkpoint is quantised.
    """
    whole = load_config(settings)
    config = whole.get_text_config()
    if getattr(whole, "quantization_config", None) is not None:
        raise ModelError(
            "the model's config has a quantization_config, and only plain weights are trained; take the folder that this one "
            "was made from (nemo-rl calibrate writes such configs for serving)"
        )
    try:
        model = empty_model(settings)
    except Exception as error:  # transformers raises whatever a config's values happen to break
        raise ModelError(
            f"no causal LM can be built from this config: {type(error).__name__}: {error}; see policy.hf_config, "
            "policy.model_name and policy.hf_config_overrides"
        ) from error
    CheckpointNames(model)
    heads, kv_heads = (getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads and heads % kv_heads:
        # transformers builds such a model, and fails in its first forward pass.
        raise ModelError(
            f"num_attention_heads must be a multiple of num_key_value_heads, got {heads} and {kv_heads}; see "
            "policy.hf_config, policy.model_name and policy.hf_config_overrides"
        )
    if settings.float32_head:
        compute_head_in_float32(model)
    if config.vocab_size < tokenizer_size:
        raise ModelError(
            f"the tokenizer has {tokenizer_size} token ids, but the model's vocabulary only {config.vocab_size}; raise "
            "vocab_size, or take the tokenizer that belongs to the model"
        )
    if settings.folder is not None and not any(next(Path(settings.folder).glob(p), None) for p in WEIGHT_FILES):
        raise ModelError(
            f"policy.model_name {settings.folder!r} holds no weights ({' or '.join(WEIGHT_FILES)}); for random weights "
            "use policy.hf_config"
        )


def build_model(settings: ModelSettings, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model on the CPU with the weights of its folder, or random ones where there is none.

    Args:
        settings: Which model.
        dtype: Type of the parameters.

    Raises:
        ModelError: If the folder has no weights or they do not fit the config.
    """
    return build_with_unexpected(settings, dtype)[0]


def build_with_unexpected(settings: ModelSettings, dtype: torch.dtype) -> tuple[PreTrainedModel, list[str]]:
    """Build as ``build_model``; also return the names of those tensors of the folder that the model has no place for."""
    if settings.folder is None:
        return random_model(settings, dtype), []
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            settings.folder,
            config=load_config(settings),
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            **_attention(settings),
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"no weights could be loaded from {settings.folder!r}: {error}") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ModelError(
            f"the weights in {settings.folder!r} lack {len(missing)} of the model's parameters, which would stay random: "
            f"{missing[:5]}"
        )
    return model, sorted(info["unexpected_keys"])


def random_model(settings: ModelSettings, dtype: torch.dtype, *, seed_offset: int = 0) -> PreTrainedModel:
    """Build the model on the CPU from its config alone, with random weights.

    Args:
        settings: Which model; a folder gives only the config.
        dtype: Type of the parameters.
        seed_offset: Added to the seed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed + seed_offset)
        # Built in `dtype` rather than cast to it: a cast would take the rotary tables along, which stay float32.
        return AutoModelForCausalLM.from_config(load_config(settings), dtype=dtype, **_attention(settings))


def empty_model(settings: ModelSettings) -> PreTrainedModel:
    """Build the model's modules on the meta device: shapes without storage."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(load_config(settings), dtype=torch.float32, **_attention(settings))


def _attention(settings: ModelSettings) -> dict[str, str]:
    return {"attn_implementation": settings.attn_implementation} if settings.attn_implementation else {}


class LogprobModel(nn.Module):
    """A causal LM whose forward pass gives logprobs of given tokens, never all logits at once.

    The head runs on ``chunk`` positions at a time and is recomputed in the backward pass, so the largest float32
    tensor with a V axis is chunk x V. This module is the root that FSDP2 wraps, so that the head's weights are
    gathered once for all chunks.
    """

    def __init__(self, model: PreTrainedModel, *, chunk: int, temperature: float) -> None:
        """Wrap ``model``.

        Args:
            model: The HF model.
            chunk: Positions of one chunk.
            temperature: Logits are divided by it; must be positive.

        Raises:
            ModelError: If the model has no separate decoder and head, or the temperature is not positive.
        """
        super().__init__()
        if temperature <= 0:
            raise ModelError(f"logprobs need a positive temperature, got {temperature}")
        if model.get_output_embeddings() is None:
            raise ModelError(f"{type(model).__name__} has no output head; policies need a causal LM")
        self.model = model
        self.chunk = chunk
        self.temperature = temperature

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logprobs of each token given those before it.

        Rows are right-padded: with causal attention padding cannot reach a real token, so no mask is needed.

        Args:
            input_ids: int64 [B, S].

        Returns:
            float32 [B, S]; column 0 is 0.
        """
        hidden_BSD = self.model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
        hidden_TD = hidden_BSD[:, :-1].reshape(-1, hidden_BSD.shape[-1])
        targets_T = input_ids[:, 1:].reshape(-1)
        parts = [
            checkpoint(self._chunk_logprobs, hidden, targets, use_reentrant=False)
            for hidden, targets in zip(hidden_TD.split(self.chunk), targets_T.split(self.chunk), strict=True)
        ]
        logprobs = torch.cat(parts).view(input_ids.shape[0], -1) if parts else hidden_BSD.new_zeros(len(input_ids), 0)
        return nn.functional.pad(logprobs.float(), (1, 0))

    def _chunk_logprobs(self, hidden_TD: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        """Return float32 [T] logprobs of ``targets_T``."""
        head = self.model.get_output_embeddings()
        assert head is not None
        logits_TV = self._scale(head(hidden_TD)).float() / self.temperature
        return torch.log_softmax(logits_TV, dim=-1).gather(1, targets_T[:, None]).squeeze(1)

    def _scale(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply what a HF forward pass does to logits after the head (Granite, Cohere, Gemma 2)."""
        config = self.model.config.get_text_config()
        if getattr(config, "logits_scaling", None):
            logits = logits / config.logits_scaling
        if getattr(config, "logit_scale", None):
            logits = logits * config.logit_scale
        cap = getattr(config, "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits


@torch.no_grad()
def check_logprobs(wrapped: LogprobModel) -> None:
    """Compare chunked logprobs with the model's own forward pass on four tokens.

    A family that treats its logits in a way unknown to ``LogprobModel`` is caught here, before it trains wrongly.

    Raises:
        ModelError: If they differ.
    """
    model = wrapped.model
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    ids_BS = torch.arange(4, device=device)[None] % model.config.get_text_config().vocab_size
    logits = model(input_ids=ids_BS, use_cache=False).logits[:, :-1].float() / wrapped.temperature
    expected = torch.log_softmax(logits, -1).gather(2, ids_BS[:, 1:, None]).squeeze(2)
    difference = (wrapped(ids_BS)[:, 1:] - expected).abs().max().item()
    model.train(was_training)
    if not difference < 1e-2:
        raise ModelError(
            f"{type(model).__name__} computes its logits in a way that is not supported yet: logprobs of its head "
            f"alone differ from its forward pass by {difference:.3g}"
        )
