# SPDX-License-Identifier: Apache-2.0
"""The conformance suite: core's own backend passes it, a sound one of another kind does, and each broken one is named."""

import json
import multiprocessing
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from nemo_rl_core.errors import DataError, RefitError
from nemo_rl_core.protocols.generation import SamplingParams
from nemo_rl_core.protocols.settings import GenerationSettings, ModelSettings, TokenizerSettings
from nemo_rl_core.refit.sender import RefitSender
from nemo_rl_core.testing.conformance import HfTeacher, Subject, check_names, installed_worker, run
from nemo_rl_core.testing.conformance.__main__ import main
from nemo_rl_core.testing.conformance.teachers import logprob_gaps
from tests.adapter.third_backend.bigram_backend.worker import BigramTeacher, BigramWorker
from tests.core.testing.broken_workers import FAULTS, SLOW_TIER
from tests.core.workers.tiny import CHARACTERS, MODEL

SETTINGS = GenerationSettings(
    model=ModelSettings(max_total_sequence_length=64),
    tokenizer=TokenizerSettings(characters="0123456789?abcdef"),
)
VOCAB = 20


def subject(make_worker, **fields):
    teachers = (BigramTeacher(VOCAB, seed=1), BigramTeacher(VOCAB, seed=2))
    defaults = {"settings": SETTINGS, "teachers": teachers, "limit_s": 60.0}
    return Subject(make_worker=make_worker, **{**defaults, **fields})


@pytest.fixture(scope="module")
def report_of_torch():
    """One worker of the torch backend, found by its entry point; a context that is longer than the KV cache's steps."""
    torch.set_num_threads(1)
    model = ModelSettings(hf_config=MODEL, max_total_sequence_length=64, seed=3)
    settings = GenerationSettings(model=model, tokenizer=TokenizerSettings(characters=CHARACTERS))
    teachers = (HfTeacher(model, seed=1), HfTeacher(model, seed=2))
    return run(
        Subject(settings=settings, make_worker=installed_worker("torch", settings), teachers=teachers, limit_s=60.0)
    )


@pytest.mark.parametrize("name", check_names())
def test_the_torch_backend_conforms(report_of_torch, name):
    """R33: refits change what is sampled, and weights that are not whole are never used."""
    report_of_torch.require(name)


def test_the_report_says_what_was_tested_and_what_was_measured(report_of_torch):
    assert report_of_torch.described["backend"] == "torch"
    assert [result.name for result in report_of_torch.results] == list(check_names())
    assert all(result.words for result in report_of_torch.results)
    lines = report_of_torch.table().splitlines()
    assert len(lines) == len(check_names())
    assert "nats of a teacher-forced pass" in lines[check_names().index("logprobs equal a teacher-forced pass")]
    report_of_torch.require_all()


def test_another_kind_of_backend_conforms():
    """Control for the next test: what the broken ones are made from is sound."""
    run(subject(lambda: BigramWorker(SETTINGS))).require_all()


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.full if kind in SLOW_TIER else (), id=kind.__name__) for kind in FAULTS],
)
def test_a_broken_backend_fails_the_checks_that_are_about_its_fault_and_no_other(kind):
    report = run(subject(lambda: kind(SETTINGS)))
    print(report.table())
    assert report.failed == FAULTS[kind]


def test_every_check_can_fail():
    """In the fast tier already, and each in a worker of which most other checks are green."""
    fast = [found for kind, found in FAULTS.items() if kind not in SLOW_TIER]
    assert set().union(*fast) == set(check_names())
    assert {name for found in FAULTS.values() if len(found) <= 8 for name in found} == set(check_names())


def test_a_failed_check_says_rule_and_value():
    report = run(subject(lambda: FAULT_BY_NAME["NoContext"](SETTINGS)))
    with pytest.raises(AssertionError, match=r"the context cuts off: a prompt of 61 tokens.* room for 3.*; got 12"):
        report.require("the context cuts off")
    with pytest.raises(AssertionError, match=rf"1 of {len(check_names())} checks did not pass\n(.*\n)*FAILED"):
        report.require_all()
    with pytest.raises(KeyError):
        report.require("no such check")


FAULT_BY_NAME = {kind.__name__: kind for kind in FAULTS}
HANGS_S = 15.0


class HangsInGenerate(BigramWorker):
    def generate(self, requests):
        super().generate(requests)  # a refusal comes at once
        time.sleep(HANGS_S)


class HangsInTheRefit(BigramWorker):
    def receive_weights(self, address):
        time.sleep(HANGS_S)


class HangsAfterItsEnd(BigramWorker):
    closed = False

    def shutdown(self):
        super().shutdown()
        self.closed = True

    def generate(self, requests):
        if self.closed:
            time.sleep(HANGS_S)
        return super().generate(requests)


class HangsInShutdown(BigramWorker):
    def shutdown(self):
        time.sleep(HANGS_S)


@pytest.mark.parametrize(
    ("kind", "call", "first"),
    [
        (HangsInGenerate, "generate", "results are in the order of the requests"),
        (HangsInTheRefit, "receive_weights", "a refit is reported by both sides"),
        (HangsAfterItsEnd, "generate", "it closes twice and generates no more"),
        (HangsInShutdown, "shutdown", "it closes twice and generates no more"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_call_that_hangs_ends_the_run_with_a_result_for_every_check(kind, call, first):
    """U49: nothing waits for ever; the hanging call is named."""
    # Only where no refit can succeed: a reverse DNS that times out costs a connection 5 s.
    refit = {"rendezvous_timeout_s": 1.0} if kind is HangsInTheRefit else {}
    settings = replace(SETTINGS, refit=refit)
    report = run(subject(lambda: kind(settings), settings=settings, limit_s=2.0))
    assert [result.name for result in report.results] == list(check_names())
    hung, *rest = report.results[check_names().index(first) :]
    assert f"{call} did not return within 2 s" in hung.words
    assert [result for result in rest if result.passed or not result.words.startswith("not run: in ")] == []
    assert not report.failed & set(check_names()[: check_names().index(first)])


def test_a_worker_that_cannot_be_built_fails_every_check():
    def make():
        raise OSError("no device")

    report = run(subject(make))
    assert report.failed == set(check_names())
    assert {result.words for result in report.results} == {"not run: the worker could not be built: OSError: no device"}
    hangs = run(subject(lambda: time.sleep(HANGS_S), limit_s=0.5))
    assert hangs.failed == set(check_names())
    assert "building the worker did not return within 0.5 s" in hangs.results[0].words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"settings": replace(SETTINGS, model=ModelSettings(max_total_sequence_length=31))},
            "at least 32 tokens, got 31",
        ),
        ({"tolerance": 0.0}, "tolerance .* above 0, got 0.0"),
        ({"limit_s": float("nan")}, "limit_s .* above 0, got nan"),
        ({"teachers": (BigramTeacher(VOCAB, 1), BigramTeacher(VOCAB, 1))}, r"'table' is \(2 in all\)"),
        ({"teachers": (BigramTeacher(VOCAB, 1), BigramTeacher(VOCAB + 1, 2))}, "same names, shapes and types"),
    ],
)
def test_a_subject_that_would_prove_nothing_is_refused(fields, words):
    with pytest.raises(DataError, match=words):
        subject(lambda: BigramWorker(SETTINGS), **fields)


def test_no_tensor_of_one_teacher_is_that_of_another():
    """R33: norms and heads too; a refit that skips a tensor shows."""
    settings = ModelSettings(hf_config=dict(MODEL) | {"attention_bias": True}, max_total_sequence_length=32)
    first, second = (dict(HfTeacher(settings, seed=seed).tensors()) for seed in (1, 2))
    assert first.keys() == second.keys()
    assert [name for name in first if torch.equal(first[name], second[name])] == []
    again = dict(HfTeacher(settings, seed=1).tensors())
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_logprob_is_compared_with_what_can_be_drawn():
    logits_NV = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    right = logits_NV.log_softmax(1)[0].tolist()
    request = {"max_new_tokens": 1}
    assert logprob_gaps(logits_NV, SamplingParams(**request), [1], [right[1]]) == pytest.approx([0.0], abs=1e-6)
    assert logprob_gaps(logits_NV, SamplingParams(**request), [1], [right[1] - 0.5]) == pytest.approx([0.5])
    assert logprob_gaps(logits_NV, SamplingParams(**request, top_k=2), [2], [right[2]]) == [float("inf")]
    assert logprob_gaps(logits_NV, SamplingParams(**request), [1], [float("nan")]) == [float("inf")]


class ProxySender:
    """A `RefitSender` in another process: the process gets the tensors, and fails where the source fails."""

    def __init__(self, num_receivers, settings):
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=send_side, args=(there, num_receivers, settings), daemon=True)
        self.process.start()
        there.close()  # or the process would never hear that this end is closed
        self.address = self.answer()

    def answer(self):
        assert self.pipe.poll(60)
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def send(self, manifest, tensors, version):
        taken, failure, source = [], None, iter(tensors)
        while True:
            try:
                taken.append(next(source))
            except StopIteration:
                break
            except RuntimeError as error:
                failure = error
                break
        # Tensors travel as lists: handing torch's storages to a process that ends is a matter of its own.
        self.pipe.send((manifest, [(name, tensor.tolist()) for name, tensor in taken], failure, version))
        return self.answer()

    def close(self):
        self.pipe.close()
        self.process.join(30)
        assert self.process.exitcode == 0


def send_side(pipe, num_receivers, settings):
    """Do a refit whenever it is asked to, until the pipe is closed."""

    def source(lists, failure):
        for name, values in lists:
            yield name, torch.tensor(values)
        if failure is not None:
            raise failure

    with RefitSender(num_receivers=num_receivers, settings=settings, host="127.0.0.1") as sender:
        pipe.send(sender.address)
        while True:
            try:
                manifest, lists, failure, version = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send(sender.send(manifest, source(lists, failure), version))
            except RefitError as error:
                pipe.send(error)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "usage: python -m nemo_rl_core.testing.conformance module:function"),
        (("tests.core.testing.broken_workers",), "usage: "),
        (("tests.core.testing.broken_workers:subject",), "must be a function that returns a Subject, got None"),
        (("tests.core.testing.broken_workers:FAULTS",), "must be a function that returns a Subject, got {"),
        (("no_such_module:subject",), "No module named 'no_such_module'"),
    ],
)
def test_the_command_says_what_it_needs(arguments, words, capsys):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.full
def test_the_sender_may_be_in_another_process():
    """As a trainer's is: the suite needs its address and its word alone."""
    run(subject(lambda: BigramWorker(SETTINGS), make_sender=ProxySender)).require_all()


def test_the_suite_needs_neither_pytest_nor_ray():
    """It runs in an engine's interpreter, which has neither."""
    code = (
        "import sys, json\n"
        "sys.modules.update(dict.fromkeys(('pytest', 'ray', '_pytest', 'hypothesis')))\n"
        "import nemo_rl_core.testing.conformance.__main__\n"
        "print(json.dumps(sorted(n for n in ('vllm', 'nemo_rl_vllm', 'pydantic') if sys.modules.get(n))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
