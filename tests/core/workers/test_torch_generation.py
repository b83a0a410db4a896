# SPDX-License-Identifier: Apache-2.0
"""The torch generation worker against a HF model's own teacher-forced forward pass."""

import threading

import pytest
import torch

from nemo_rl_core.errors import DataError, ModelError, RefitError, WeightsInvalidError
from nemo_rl_core.protocols.generation import GenerationRequest, GenerationWorker, SamplingParams
from nemo_rl_core.protocols.settings import GenerationSettings, ModelSettings
from nemo_rl_core.refit.manifest import Manifest
from nemo_rl_core.refit.sender import RefitSender
from nemo_rl_core.refit.settings import RefitSettings
from nemo_rl_core.workers.checkpoint_names import wire_tensors
from nemo_rl_core.workers.models import random_model
from nemo_rl_core.workers.sampling import sampling_logprobs
from nemo_rl_core.workers.torch_generation import TorchGenerationWorker
from tests.core.workers.tiny import CHARACTERS, MODEL, VOCAB


def refit_from(model, worker, version=0):
    """Send a model's weights to a worker, as a train rank would."""
    tensors = list(wire_tensors(model))
    with RefitSender(num_receivers=1, settings=RefitSettings(), device_id="sender") as sender:
        reports = []
        thread = threading.Thread(target=lambda: reports.append(worker.receive_weights(sender.address)), daemon=True)
        thread.start()
        sender.send(Manifest.from_tensors(tensors), tensors, version)
        thread.join(60)
    return reports[0]


@pytest.fixture
def make_worker(model_settings, tokenizer_settings):
    workers = []

    def make(**options):
        settings = GenerationSettings(model=model_settings, tokenizer=tokenizer_settings, options=options)
        workers.append(TorchGenerationWorker(settings))
        return workers[-1]

    yield make
    for worker in workers:
        worker.shutdown()


@pytest.fixture
def model(model_settings):
    return random_model(model_settings, torch.float32).eval()


@pytest.fixture
def worker(make_worker, model):
    worker = make_worker()
    refit_from(model, worker, version=7)
    return worker


def prompts(count, longest=9):
    g = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, longest + 1, (count,), generator=g).tolist()
    return [tuple(torch.randint(3, VOCAB, (n,), generator=g).tolist()) for n in lengths]


def teacher_forced(model, request, completion):
    """Logprobs of the completion under the sampled distribution, from one plain forward pass."""
    ids = torch.tensor([request.prompt_ids + completion.token_ids])
    logits = model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1]
    s, rows = request.sampling, len(completion.token_ids)
    dist = sampling_logprobs(
        logits, torch.full((rows,), s.temperature), torch.full((rows,), s.top_k), torch.full((rows,), s.top_p)
    )
    return dist.gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1).detach()


MIXED = [
    SamplingParams(max_new_tokens=12),
    SamplingParams(max_new_tokens=5, temperature=0.5),
    SamplingParams(max_new_tokens=12, temperature=1.7, top_k=5, seed=3),
    SamplingParams(max_new_tokens=12, top_p=0.8),
    SamplingParams(max_new_tokens=12, temperature=0.0),
    SamplingParams(max_new_tokens=12, stop_token_ids=(4, 5, 6)),
    SamplingParams(max_new_tokens=20, temperature=2.0, top_p=0.9, top_k=7),
]


def test_a_batch_of_mixed_requests_agrees_with_the_teacher_forced_model(worker, model):
    requests = [GenerationRequest(prompt_ids=p, sampling=s) for p, s in zip(prompts(14), MIXED * 2, strict=True)]
    for request, completion in zip(requests, worker.generate(requests), strict=True):
        assert torch.allclose(
            torch.tensor(completion.logprobs), teacher_forced(model, request, completion), atol=1e-4
        ), request.sampling
        assert completion.weight_version == 7
        stops = request.sampling.stop_token_ids
        ended = completion.token_ids[-1] in stops
        assert not set(completion.token_ids[:-1]) & set(stops)
        assert completion.finish_reason == ("stop" if ended else "length")
        assert ended or len(completion.token_ids) == request.sampling.max_new_tokens


def test_greedy_decoding_is_the_models_own_argmax_step_by_step(worker, model):
    for prompt in prompts(4):
        request = GenerationRequest(prompt_ids=prompt, sampling=SamplingParams(max_new_tokens=6, temperature=0.0))
        ids = list(prompt)
        for _ in range(6):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        assert worker.generate([request])[0].token_ids == tuple(ids[len(prompt) :])


def test_a_seeded_request_gives_the_same_tokens_alone_and_in_any_batch(worker):
    seeded = GenerationRequest(prompt_ids=(3, 4, 5), sampling=SamplingParams(max_new_tokens=10, seed=42))
    # Some of them leave the batch before the seeded one does.
    others = [GenerationRequest(prompt_ids=p, sampling=MIXED[i % 2]) for i, p in enumerate(prompts(5))]
    alone = worker.generate([seeded])[0].token_ids
    assert worker.generate([*others, seeded])[-1].token_ids == alone
    assert worker.generate([seeded, *others])[0].token_ids == alone


def test_batches_beyond_the_limit_are_decoded_in_turn_with_the_same_result(make_worker, model):
    requests = [
        GenerationRequest(prompt_ids=p, sampling=SamplingParams(max_new_tokens=6, seed=i))
        for i, p in enumerate(prompts(7))
    ]
    results = []
    for limit in (2, 100):
        worker = make_worker(max_batch_size=limit)
        refit_from(model, worker)
        results.append([c.token_ids for c in worker.generate(requests)])
    assert results[0] == results[1]


def test_a_stop_string_ends_the_request_that_asked_for_it_and_no_other(worker):
    """The string may span tokens; the completion ends with the token that completes it."""
    free = SamplingParams(max_new_tokens=20, seed=5)
    prompt = (3, 4, 5)
    whole = worker.generate([GenerationRequest(prompt_ids=prompt, sampling=free)])[0]
    text = "".join((CHARACTERS[t - 3] if t >= 3 else "<") for t in whole.token_ids)
    stop = next(text[i : i + 2] for i in range(4, 18) if "<" not in text[i : i + 2])
    first_end = text.index(stop) + 2
    stopped = SamplingParams(max_new_tokens=20, seed=5, stop_strings=(stop,))
    requests = [GenerationRequest(prompt_ids=prompt, sampling=s) for s in (free, stopped)]
    unstopped_result, result = worker.generate(requests)
    assert result.token_ids == whole.token_ids[:first_end]
    assert result.finish_reason == "stop"
    assert unstopped_result.token_ids == whole.token_ids


def test_the_context_cuts_a_completion_off_and_a_prompt_without_room_is_refused(worker):
    request = GenerationRequest(prompt_ids=(3,) * 30, sampling=SamplingParams(max_new_tokens=9))
    completion = worker.generate([request])[0]
    assert (len(completion.token_ids), completion.finish_reason) == (2, "length")
    too_long = GenerationRequest(prompt_ids=(3,) * 32, sampling=SamplingParams(max_new_tokens=9))
    with pytest.raises(DataError, match=r"request 1 has a prompt of 32 tokens.*context of 32"):
        worker.generate([request, too_long])
    with pytest.raises(DataError, match="empty prompt"):
        worker.generate([GenerationRequest(prompt_ids=(), sampling=SamplingParams(max_new_tokens=9))])


def test_a_greedy_request_does_not_move_the_stream_of_those_without_a_seed(make_worker, model):
    """A validation between two rollouts changes nothing about the second one."""
    sampled = GenerationRequest(prompt_ids=(3, 4), sampling=SamplingParams(max_new_tokens=8))
    greedy = GenerationRequest(prompt_ids=(3, 4), sampling=SamplingParams(max_new_tokens=8, temperature=0.0))
    results = []
    for between in ([], [greedy] * 3):
        worker = make_worker()
        refit_from(model, worker)
        worker.generate([sampled])
        if between:
            worker.generate(between)
        results.append(worker.generate([sampled])[0].token_ids)
    assert results[0] == results[1]


def test_a_model_whose_cache_cannot_be_shrunk_is_refused_when_it_is_built(tokenizer_settings):
    config = dict(MODEL) | {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    }
    settings = GenerationSettings(
        model=ModelSettings(hf_config=config, max_total_sequence_length=32), tokenizer=tokenizer_settings
    )
    with pytest.raises(ModelError, match="cannot decode Qwen3NextForCausalLM"):
        TorchGenerationWorker(settings)


def test_no_token_is_sampled_before_the_first_refit(make_worker):
    request = GenerationRequest(prompt_ids=(3,), sampling=SamplingParams(max_new_tokens=1))
    with pytest.raises(WeightsInvalidError):
        make_worker().generate([request])


def test_random_weights_of_a_worker_are_not_those_of_the_policy(make_worker, model):
    """R33: an update that copies nothing must not pass for a refit."""
    worker = make_worker()
    before = worker.weights_digest()
    report = refit_from(model, worker)
    assert worker.weights_digest() == report["digest"] != before


def test_a_model_of_another_shape_is_refused_and_the_old_weights_stay_usable(worker, model_settings):
    other = dict(model_settings.hf_config) | {"intermediate_size": 48}
    wrong = random_model(type(model_settings)(hf_config=other, max_total_sequence_length=32), torch.float32)
    digest = worker.weights_digest()
    failures = []

    def receive(address):
        try:
            worker.receive_weights(address)
        except RefitError as error:
            failures.append(error)

    tensors = list(wire_tensors(wrong))
    with RefitSender(num_receivers=1, settings=RefitSettings(), device_id="sender") as sender:
        thread = threading.Thread(target=receive, args=(sender.address,), daemon=True)
        thread.start()
        with pytest.raises(RefitError, match="mlp"):
            sender.send(Manifest.from_tensors(tensors), tensors, 8)
        thread.join(60)
    assert "mlp" in str(failures[0])
    assert worker.weights_digest() == digest
    request = GenerationRequest(prompt_ids=(3,), sampling=SamplingParams(max_new_tokens=1))
    assert worker.generate([request])[0].weight_version == 7


def test_the_worker_is_a_generation_worker_and_says_what_it_is(worker):
    assert isinstance(worker, GenerationWorker)
    assert worker.describe()["backend"] == "torch"
    assert worker.num_receiving_ranks() == 1
