# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from tests.core.workers.tiny import CHARACTERS, MODEL


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def model_settings():
    from nemo_rl_core.protocols.settings import ModelSettings

    return ModelSettings(hf_config=MODEL, max_total_sequence_length=32, seed=3)


@pytest.fixture
def tokenizer_settings():
    from nemo_rl_core.protocols.settings import TokenizerSettings

    return TokenizerSettings(characters=CHARACTERS)
