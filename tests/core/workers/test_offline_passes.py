# SPDX-License-Identifier: Apache-2.0
"""Calibration passes over a tiny model of each family whose scale names are known."""

import json
import random
from collections.abc import Mapping

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl_core.errors import ModelError
from nemo_rl_core.fp8.calibration_result import CalibrationRequest, describe_hf_model
from nemo_rl_core.protocols.settings import ModelSettings
from nemo_rl_core.workers.offline_passes import observe_sequences, with_observable_attention
from tests.adapter.engine.scale_models import TINY
from tests.core.fp8.families import CONFIGS, config_of

#: transformers has no causal LM for these configurations, so no policy of them either.
NO_CAUSAL_LM = {
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "LlavaForConditionalGeneration",
}
REFUSED = {
    "FalconForCausalLM": "does not take its attention from transformers' interface",
    "BloomForCausalLM": "does not take its attention from transformers' interface",
    "WhisperForConditionalGeneration": "2 attention modules with a cache in a layer",
    "DeepseekV3ForCausalLM": "caches one latent",
}
CALIBRATED = sorted(set(CONFIGS) - NO_CAUSAL_LM - set(REFUSED))


def tiny_config(architecture, **changes):
    usual = CONFIGS[architecture][1]
    tiny = {
        name: {**usual.get(name, {}), **value} if isinstance(value, Mapping) else value
        for name, value in TINY[architecture].items()
    }
    return config_of(architecture, **tiny, **changes)


def result_of(architecture):
    config = tiny_config(architecture)
    request = CalibrationRequest(model=describe_hf_model(config, "not needed"), include_q=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    stream = random.Random(0)
    rows = [[stream.randint(3, 100) for _ in range(length)] for length in (20, 7, 33)]
    return request, request.result(observe_sequences(model, rows, batch_tokens=64, tell=str))


@pytest.mark.parametrize("architecture", CALIBRATED)
def test_every_module_of_the_family_gets_its_scales_and_no_other(architecture):
    """Q2, Q3: hybrids in their attention layers alone. Whichever layers transformers calls, the description has them."""
    request, result = result_of(architecture)
    assert tuple(result["layers"]) == request.model.names(include_q=True)
    assert all(rates["saturated"] == 0 for kinds in result["rates"].values() for rates in kinds.values())


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_the_attention_interface_does_not_show_is_refused(architecture):
    """Q7."""
    with pytest.raises(ModelError, match=REFUSED[architecture]):
        result_of(architecture)


def tried(folder, architecture, **changes):
    """What is settled from a folder with a configuration alone."""
    tiny_config(architecture, **changes).save_pretrained(folder)
    return with_observable_attention(ModelSettings(folder=str(folder), max_total_sequence_length=1))


@pytest.mark.parametrize("architecture", CALIBRATED)
def test_what_can_be_observed_is_known_without_weights(architecture, tmp_path):
    assert tried(tmp_path, architecture).attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize("architecture", sorted(NO_CAUSAL_LM))
def test_a_family_without_a_causal_lm_is_refused_without_weights(architecture, tmp_path):
    with pytest.raises(ModelError, match="transformers has no causal LM for model_type") as caught:
        tried(tmp_path, architecture)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("architecture", ["BloomForCausalLM", "FalconForCausalLM"])
def test_attention_beside_the_interface_is_refused_without_weights(architecture, tmp_path):
    with pytest.raises(ModelError, match=r"does not take its attention .* keep this model's KV cache in bfloat16"):
        tried(tmp_path, architecture)


@pytest.mark.parametrize("asked", ["flash_attention_2", "flex_attention", "eager"])
def test_the_attention_that_a_configuration_asks_for_does_not_matter(asked, tmp_path):
    """It may be one that this machine lacks, or one that cannot be observed."""
    tiny_config("Qwen3ForCausalLM").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "_attn_implementation": asked}))
    settings = with_observable_attention(ModelSettings(folder=str(tmp_path), max_total_sequence_length=1))
    assert settings.attn_implementation == "sdpa"
