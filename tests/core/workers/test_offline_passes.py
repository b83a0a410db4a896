# SPDX-License-Identifier: Apache-2.0
"""Calibration passes over a tiny model of each family whose scale names are known."""

import random
from collections.abc import Mapping

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl_core.errors import ModelError
from nemo_rl_core.fp8.calibration_result import CalibrationRequest, describe_hf_model
from nemo_rl_core.workers.offline_passes import observe_sequences
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


def result_of(architecture):
    usual = CONFIGS[architecture][1]
    tiny = {
        name: {**usual.get(name, {}), **value} if isinstance(value, Mapping) else value
        for name, value in TINY[architecture].items()
    }
    config = config_of(architecture, **tiny)
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
