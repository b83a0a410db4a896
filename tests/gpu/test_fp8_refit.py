# SPDX-License-Identifier: Apache-2.0
"""A refit that casts on an NVIDIA GPU: the bits that the CPU sends, to a receiver on the GPU."""

import threading
from dataclasses import replace

import pytest
import torch

from nemo_rl_core.protocols.settings import Fp8Weights, ModelSettings
from nemo_rl_core.refit.receiver import RefitReceiver
from nemo_rl_core.refit.settings import RefitSettings
from nemo_rl_core.testing.refit import DictSink
from nemo_rl_core.workers.dtensor import DTensorPolicyWorker
from nemo_rl_core.workers.fp8_weights import matrix_shapes
from tests.core.workers.test_dtensor import settings_of
from tests.core.workers.tiny import MODEL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and this machine has none"),
]

#: Blocks that are whole and blocks that are cut.
WIDE = ModelSettings(
    hf_config={**MODEL, "hidden_size": 320, "intermediate_size": 384},
    precision="bfloat16",
    max_total_sequence_length=32,
    seed=3,
)
CAST = tuple(name for name in matrix_shapes(WIDE) if "_proj" in name)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_pairs_that_are_cast_on_cuda_arrive_on_cuda_with_the_bits_of_the_cpu(power_of_two):
    weights = Fp8Weights(cast=CAST, power_of_two=power_of_two)
    settings = replace(settings_of(model=WIDE), fp8_weights=weights)
    on_cpu = DTensorPolicyWorker(settings, device="cpu")
    digest = on_cpu.weights_digest()
    on_cpu.shutdown()
    worker = DTensorPolicyWorker(settings, device="cuda")
    try:
        assert worker.weights_digest() == digest
        refit = RefitSettings(bucket_bytes=100_000)
        # One GPU for both, under another name; the sink's tensors lie on it.
        address = worker.open_refit_listener(1, refit, "127.0.0.1")
        sink = DictSink({name: tensor.cuda() for name, tensor in empty_pairs(worker)})
        receiver = RefitReceiver(rank=1, num_receivers=1, settings=refit, device_id="another device")
        reports = []
        thread = threading.Thread(target=lambda: reports.append(receiver.receive(address, sink)), daemon=True)
        thread.start()
        sent = worker.send_weights(1)
        thread.join(60)
        assert sent["digest"] == reports[0].digest == digest
        live = dict(sink.live_tensors())
        assert {live[f"{name}.weight"].dtype for name in CAST} == {torch.float8_e4m3fn}
        assert live[f"{CAST[0]}.weight_scale_inv"].device.type == "cuda"
    finally:
        worker.shutdown()


def empty_pairs(worker):
    for spec in worker._weights().manifest().specs:
        yield spec.name, torch.zeros(spec.shape, dtype=spec.torch_dtype)
