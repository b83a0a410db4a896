# SPDX-License-Identifier: Apache-2.0
"""Refits between real processes over gloo: whole, and with every rank failing in every way."""

import signal

import pytest
import torch

from .ranks import SETTINGS, Trio, wait_for_hello, weights

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def trio():
    ranks = Trio()
    yield ranks
    ranks.close()


def test_every_kind_of_tensor_arrives_bit_for_bit_three_times_in_a_row(trio):
    """U34, U37, U40, U33, R33: values differ each time, models start poisoned, digests agree."""
    digests = set()
    for _ in range(3):
        trio.begin()
        sent, *received = trio.answers()
        report = sent["report"]
        assert [ack.rank for ack in report.acks] == [1, 2]
        assert report.num_tensors == len(weights(0))
        assert report.num_bytes == sum(t.numel() * t.element_size() for t in weights(0).values())
        assert report.num_buckets > 5
        for answer in received:
            assert answer["wrong"] == []
            assert answer["report"].digest == report.digest
            assert answer["events"][-1] == ("finish", trio.version)
            assert answer["valid"] == trio.version == report.version
        digests.add(report.digest)
    assert len(digests) == 3


def same_cause(*answers) -> dict:
    """All of them failed, and tell the same story."""
    assert all("cause" in answer for answer in answers), answers
    first = answers[0]
    for answer in answers[1:]:
        assert (answer["cause"], answer["type"], answer["phase"]) == (first["cause"], first["type"], first["phase"])
    assert first["cause"] in first["message"]
    return first


def check_invalid(*answers, cause: str) -> None:
    for answer in answers:
        assert answer["state"] == "INVALID"
        assert cause in answer["invalid"]


@pytest.mark.parametrize(
    ("where", "text", "phase"),
    [
        ("load", "KeyError: 'no such parameter'", "transfer"),
        ("finish", "RuntimeError: repacking failed", "finish"),
    ],
)
def test_an_exception_of_one_live_model_is_reported_by_all_ranks(trio, where, text, phase):
    """U30, U31, R34, R36: typed, with rank, host and pid, and nobody hangs in a broadcast."""
    trio.begin(two={"raise_in": where})
    failed = same_cause(*(answers := trio.answers()))
    assert text in failed["cause"]
    assert f"generation rank 2 (host {failed['culprit'].split('host ')[1].split(',')[0]}" in failed["cause"]
    assert failed["phase"] == phase
    check_invalid(*answers[1:], cause=failed["cause"])
    trio.refit_works()


def test_an_exception_of_the_source_is_reported_by_all_ranks(trio):
    """R34: the receivers say what the trainer's own iterator raised."""
    trio.begin(sender={"raise_at": 9})
    failed = same_cause(*(answers := trio.answers()))
    assert "train rank 0" in failed["cause"]
    assert "LookupError: shard 3 is missing" in failed["cause"]
    check_invalid(*answers[1:], cause=failed["cause"])
    trio.refit_works()


def test_a_model_that_never_copies_is_caught_by_the_digest(trio):
    """R33, U40: the acknowledgement alone would have been a lie; the first differing tensor is named."""
    trio.begin(one={"forgets_to_load": True})
    failed = same_cause(*trio.answers())
    assert "first differing tensor: 'fp32'" in failed["cause"]
    assert "generation rank 1" in failed["culprit"]
    trio.refit_works()


def test_a_receiver_killed_in_mid_load_ends_the_refit_on_both_sides(trio):
    """R59, R43."""
    pid = trio.receivers[1].pid
    trio.begin(one={"pause_in_load": True})
    assert trio.receivers[1].answer() == "loading"
    trio.receivers[1].kill()
    sent, other = trio.sender.answer(), trio.receivers[2].answer()
    failed = same_cause(sent, other)
    assert failed["type"] == "RefitPeerLostError"
    assert f"pid {pid})" in failed["cause"]
    assert "generation rank 1" in failed["cause"]
    check_invalid(other, cause=failed["cause"])
    trio.refit_works()


def test_a_receiver_stopped_in_mid_load_is_named_and_agrees_when_it_wakes(trio):
    """R43: silence is told apart from slowness, and the sleeper learns why the refit is over."""
    trio.begin(one={"pause_in_load": True})
    assert trio.receivers[1].answer() == "loading"
    trio.receivers[1].signal(signal.SIGSTOP)
    sent, other = trio.sender.answer(), trio.receivers[2].answer()
    trio.receivers[1].signal(signal.SIGCONT)
    trio.receivers[1].pipe.send("go")
    failed = same_cause(sent, other, sleeper := trio.receivers[1].answer())
    assert failed["type"] == "RefitPeerLostError"
    assert f"pid {trio.receivers[1].pid}) has been silent for {SETTINGS.silence_timeout_s} s" in failed["cause"]
    check_invalid(other, sleeper, cause=failed["cause"])
    trio.refit_works()


def in_the_handshake(trio) -> None:
    """Bring a refit to where rank 1 has said hello and rank 2 has not: nobody can have gone on."""
    trio.begin(two={"pause_in_manifest": True})
    assert trio.receivers[2].answer() == "asked for the manifest"
    wait_for_hello(trio.address, 1)


def test_a_receiver_killed_in_the_handshake_is_named_on_both_sides_and_no_weights_are_lost(trio):
    trio.refit_works()
    before = trio.version
    in_the_handshake(trio)
    pid = trio.receivers[1].pid
    trio.receivers[1].kill()
    sent = trio.sender.answer()
    trio.receivers[2].pipe.send("go")
    failed = same_cause(sent, other := trio.receivers[2].answer())
    assert failed["type"] == "RefitPeerLostError"
    assert f"pid {pid})" in failed["cause"]
    assert "generation rank 1" in failed["cause"]
    assert other["valid"] == before, "no byte was moved, so the old weights stay"
    trio.refit_works()


def test_a_receiver_stopped_in_the_handshake_is_named_and_agrees_when_it_wakes(trio):
    trio.refit_works()
    in_the_handshake(trio)
    trio.receivers[1].signal(signal.SIGSTOP)
    sent = trio.sender.answer()
    trio.receivers[1].signal(signal.SIGCONT)
    trio.receivers[2].pipe.send("go")
    failed = same_cause(sent, trio.receivers[1].answer(), trio.receivers[2].answer())
    assert failed["type"] == "RefitPeerLostError"
    assert f"pid {trio.receivers[1].pid}) has been silent" in failed["cause"]
    trio.refit_works()


def test_a_sender_killed_in_the_handshake_is_named_by_every_receiver_that_was_there(trio):
    trio.refit_works()
    in_the_handshake(trio)
    pid = trio.sender.pid
    trio.sender.kill()
    first = trio.receivers[1].answer()
    trio.receivers[2].pipe.send("go")
    failed = same_cause(first, trio.receivers[2].answer())
    assert failed["type"] == "RefitPeerLostError"
    assert f"pid {pid}) is gone" in failed["cause"]
    trio.refit_works()


def test_a_sender_stopped_in_the_handshake_is_named_and_agrees_when_it_wakes(trio):
    trio.refit_works()
    in_the_handshake(trio)
    trio.sender.signal(signal.SIGSTOP)
    first = trio.receivers[1].answer()
    trio.sender.signal(signal.SIGCONT)
    trio.receivers[2].pipe.send("go")
    failed = same_cause(first, trio.sender.answer(), trio.receivers[2].answer())
    assert failed["type"] == "RefitPeerLostError"
    assert "train rank 0" in failed["cause"]
    assert f"pid {trio.sender.pid}) has been silent" in failed["cause"]
    trio.refit_works()


def test_a_sender_killed_in_mid_bucket_is_named_by_every_receiver(trio):
    """U30: the store dies with it, and the handshake's identity still names it."""
    trio.begin(sender={"pause_at": 12})
    assert trio.sender.answer() == "packing"
    pid = trio.sender.pid
    trio.sender.kill()
    failed = same_cause(*(answers := (trio.receivers[1].answer(), trio.receivers[2].answer())))
    assert failed["type"] == "RefitPeerLostError"
    assert "train rank 0" in failed["cause"]
    assert f"pid {pid}) is gone" in failed["cause"]
    check_invalid(*answers, cause=failed["cause"])
    trio.refit_works()


def test_a_sender_stopped_in_mid_bucket_is_named_and_agrees_when_it_wakes(trio):
    trio.begin(sender={"pause_at": 12})
    assert trio.sender.answer() == "packing"
    trio.sender.signal(signal.SIGSTOP)
    received = trio.receivers[1].answer(), trio.receivers[2].answer()
    trio.sender.signal(signal.SIGCONT)
    trio.sender.pipe.send("go")
    failed = same_cause(trio.sender.answer(), *received)
    assert f"train rank 0 (host {failed['culprit'].split('host ')[1].split(',')[0]}" in failed["cause"]
    assert f"pid {trio.sender.pid}) has been silent for {SETTINGS.silence_timeout_s} s" in failed["cause"]
    check_invalid(*received, cause=failed["cause"])
    trio.refit_works()


DIFFERENT_MODELS = {
    "missing": ({"new_name": torch.zeros(2)}, "'new_name' is expected and not sent"),
    "unexpected": ({"fp16": None}, "'fp16' is sent and not expected"),
    "shape": ({"fp32": torch.zeros(3, 7)}, "'fp32' has shape [3, 7] and is sent with [7, 3]"),
    "dtype": ({"fp32": torch.zeros(7, 3).half()}, "'fp32' has dtype float16 and is sent as float32"),
    "renamed": ({"heads": torch.zeros(16, 5), "head": None}, "(nearest: 'head')"),
}


def refused(trio, **plans) -> dict:
    """A refit refused before a byte moved: same words everywhere, and the old weights stay valid."""
    trio.refit_works()
    before = trio.version
    trio.begin(**plans)
    failed = same_cause(*(answers := trio.answers()))
    assert failed["type"] == "RefitRefusedError"
    assert failed["phase"] == "handshake"
    for answer, plan in zip(answers[1:], (plans.get("one"), plans.get("two")), strict=True):
        if not plan or not {"rank", "device_id"} & set(plan):  # those two are receivers of their own
            assert answer["valid"] == before
    trio.refit_works()
    return failed


@pytest.mark.parametrize("kind", DIFFERENT_MODELS)
def test_a_model_that_differs_is_refused_before_a_byte_moves(trio, kind):
    """U40, U42, R36, R46, R47: compared both ways."""
    replace, text = DIFFERENT_MODELS[kind]
    assert text in refused(trio, two={"replace": replace})["cause"]


def test_another_version_than_the_expected_is_refused(trio):
    """R42."""
    cause = refused(trio, one={"expected_version": 999})["cause"]
    assert f"sends version {trio.version - 1} and" in cause
    assert "expects version 999" in cause


def test_another_protocol_number_is_refused(trio):
    """U42."""
    cause = refused(trio, two={"protocol": 7})["cause"]
    assert "speaks refit protocol 1" in cause
    assert "protocol 7" in cause


def test_two_ranks_on_one_device_are_refused(trio):
    """R26."""
    cause = refused(trio, two={"device_id": "gpu-0"})["cause"]
    assert "are both on device 'gpu-0'" in cause


def test_two_receivers_that_claim_one_rank_are_refused(trio):
    """R32."""
    assert "receiving rank 1 is claimed twice" in refused(trio, two={"rank": 1})["cause"]
