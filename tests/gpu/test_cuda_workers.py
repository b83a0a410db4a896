# SPDX-License-Identifier: Apache-2.0
"""The workers on one NVIDIA GPU, against the same workers on the CPU. Needs neither Ray nor pydantic."""

import threading

import pytest
import torch

from nemo_rl_core.objectives.losses import LossSettings
from nemo_rl_core.protocols.generation import GenerationRequest, SamplingParams
from nemo_rl_core.protocols.settings import GenerationSettings, ModelSettings, TokenizerSettings
from nemo_rl_core.refit.manifest import Manifest
from nemo_rl_core.refit.sender import RefitSender
from nemo_rl_core.refit.settings import RefitSettings
from nemo_rl_core.workers.checkpoint_names import live_tensors
from nemo_rl_core.workers.dtensor import DTensorPolicyWorker
from nemo_rl_core.workers.models import random_model
from nemo_rl_core.workers.output_head import compute_head_in_float32
from nemo_rl_core.workers.sharding import full_tensors
from nemo_rl_core.workers.torch_generation import TorchGenerationWorker
from tests.core.workers.test_dtensor import batch_of, settings_of
from tests.core.workers.tiny import CHARACTERS, MODEL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and this machine has none"),
]

BOUNDS = {"float32": 1.01, "bfloat16": 1.05}


def model_of(precision):
    return ModelSettings(hf_config=MODEL, max_total_sequence_length=32, seed=3, precision=precision)


def on(device, precision="float32", steps=0):
    """Logprobs before, metrics of each step, and logprobs after, on one device."""
    worker = DTensorPolicyWorker(settings_of(model=model_of(precision)), device=device)
    try:
        before = worker.get_logprobs(batch_of())
        metrics = [worker.train(batch_of(), LossSettings()) for _ in range(steps)]
        return before, metrics, worker.get_logprobs(batch_of()), worker.get_reference_policy_logprobs(batch_of())
    finally:
        worker.shutdown()


def test_logprobs_and_steps_on_cuda_are_those_of_the_cpu():
    cpu, cuda = on("cpu", steps=3), on("cuda", steps=3)
    assert torch.allclose(cpu[0], cuda[0], atol=1e-4)
    for a, b in zip(cpu[1], cuda[1], strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-4)
    assert torch.allclose(cpu[2], cuda[2], atol=1e-3)
    assert torch.equal(cuda[3], cuda[0])


def test_fp8_scales_of_cuda_are_those_of_the_cpu():
    results = []
    for device in ("cpu", "cuda"):
        worker = DTensorPolicyWorker(settings_of(model=model_of("float32")), device=device)
        try:
            results.append(worker.calibrate_qkv_fp8_scales(batch_of(), include_q=True))
        finally:
            worker.shutdown()
    assert len(results[0]["layers"]) == 6
    assert results[1]["layers"] == pytest.approx(results[0]["layers"], rel=1e-4)


@pytest.mark.parametrize("precision", BOUNDS)
def test_a_refit_from_cuda_to_cuda_makes_both_sides_agree(precision):
    policy = DTensorPolicyWorker(settings_of(model=model_of(precision)), device="cuda")
    settings = GenerationSettings(model=model_of(precision), tokenizer=TokenizerSettings(characters=CHARACTERS))
    generation = TorchGenerationWorker(settings, device="cuda")
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    try:
        policy.train(batch_of(), LossSettings())
        tensors = list(full_tensors(live_tensors(policy._model.model), dtype))
        # One GPU for both: the handshake would refuse it by its UUID, so the sender goes by another name here.
        with RefitSender(num_receivers=1, settings=RefitSettings(), device_id="another device") as sender:
            receiver = threading.Thread(target=generation.receive_weights, args=(sender.address,), daemon=True)
            receiver.start()
            report = sender.send(Manifest.from_tensors(tensors), tensors, 1)
            receiver.join(60)
        assert generation.weights_digest() == report.digest == policy.weights_digest()
        mismatch = mismatch_of(policy, generation)
        assert mismatch < BOUNDS[precision]
        for _ in range(20):  # one step is too small to show in bfloat16; digests tell it at once
            policy.train(batch_of(), LossSettings())
        assert generation.weights_digest() != policy.weights_digest()
        assert mismatch_of(policy, generation) > BOUNDS[precision]
    finally:
        generation.shutdown()
        policy.shutdown()


def mismatch_of(policy, generation):
    """token_mult_prob_error of a fresh rollout."""
    from nemo_rl_core.data.batched_data_dict import BatchedDataDict

    prompts = [(3 + i, 4, 5 + i) for i in range(8)]
    sampling = SamplingParams(max_new_tokens=20, seed=7)
    completions = generation.generate([GenerationRequest(prompt_ids=p, sampling=sampling) for p in prompts])
    rows = [torch.tensor(p + c.token_ids) for p, c in zip(prompts, completions, strict=True)]
    batch = BatchedDataDict(
        input_ids=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        input_lengths=torch.tensor([len(row) for row in rows]),
    )
    logprobs = policy.get_logprobs(batch)
    sampled = torch.cat([logprobs[i, 3 : len(row)] for i, row in enumerate(rows)])
    told = torch.tensor([lp for c in completions for lp in c.logprobs])
    return float((sampled - told).abs().exp().mean())


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_the_output_head_on_cuda_gives_float32_logits_and_the_gradients_of_the_cpu(rows):
    """The product stays on the tensor cores; only its sums are in float32."""
    torch.manual_seed(0)
    hidden = torch.randn(rows, 256, dtype=torch.bfloat16) * 4
    weight = torch.randn(1003, 256, dtype=torch.bfloat16)
    found = {}
    for device in ("cpu", "cuda"):
        model = random_model(model_of("bfloat16"), torch.bfloat16)
        head = torch.nn.Linear(256, 1003, bias=False, dtype=torch.bfloat16, device=device)
        head.load_state_dict({"weight": weight})
        model.set_output_embeddings(head)
        compute_head_in_float32(model)
        inputs = hidden.to(device).detach().clone().requires_grad_()
        logits = head(inputs)
        logits.log_softmax(-1)[:, 7].sum().backward()
        found[device] = [tensor.detach().float().cpu() for tensor in (logits, inputs.grad, head.weight.grad)]
        assert logits.dtype == torch.float32
    exact = hidden.double() @ weight.double().t()
    for logits, *_ in found.values():
        assert torch.allclose(logits.double(), exact, atol=1e-3)
    for ours, theirs in zip(found["cuda"][1:], found["cpu"][1:], strict=True):
        assert (ours - theirs).abs().max() <= 0.02 * theirs.abs().max()
