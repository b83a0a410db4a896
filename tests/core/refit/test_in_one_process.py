# SPDX-License-Identifier: Apache-2.0
"""What needs no second process: deadlines, refusals of arguments, states, addresses, facts."""

import socket
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.errors import RefitError, RefitPeerLostError, RefitTimeoutError, StateError, WeightsInvalidError
from nemo_rl_core.refit.handshake import Identity, equal_differences, nccl_facts, shared_devices
from nemo_rl_core.refit.manifest import Manifest
from nemo_rl_core.refit.receiver import RefitReceiver
from nemo_rl_core.refit.rendezvous import join_address, split_address
from nemo_rl_core.refit.sender import RefitSender
from nemo_rl_core.refit.settings import RefitSettings
from nemo_rl_core.refit.transaction import Outcome, OutcomeKind, WeightState, WeightStatus
from nemo_rl_core.testing.refit import DictSink

QUICK = RefitSettings(rendezvous_timeout_s=8.0, transfer_timeout_s=8.0, silence_timeout_s=5.0)
MANIFEST = Manifest.from_tensors([("w", torch.zeros(3))])


def in_thread(function, *args):
    """Run a receiver beside the sender; returns a function that gives its result or its error."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(function(*args))
        except RefitError as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(30)
        assert results, "the receiver did not end in time"
        return results[0]

    return result


def test_a_rank_that_never_comes_is_named_on_both_sides_when_the_deadline_passes():
    """R21, R23: nobody waits for ever, and those who came hear who did not."""
    settings = RefitSettings(rendezvous_timeout_s=6.0, transfer_timeout_s=6.0, silence_timeout_s=5.5)
    receiver = RefitReceiver(rank=1, num_receivers=2, settings=settings, device_id="other")
    with RefitSender(num_receivers=2, settings=settings, host="127.0.0.1") as sender:
        result = in_thread(receiver.receive, sender.address, DictSink({"w": torch.zeros(3)}))
        with pytest.raises(RefitTimeoutError, match=r"generation rank 2 did not arrive within 6\.0 s") as caught:
            sender.send(MANIFEST, [("w", torch.zeros(3))], 1)
        assert caught.value.culprit == "generation rank 2"
        assert "arrived: generation rank 1 (host" in caught.value.cause
        error = result()
        assert isinstance(error, RefitTimeoutError)
        assert error.cause == caught.value.cause


def test_nobody_to_send_to_and_nothing_to_send_are_no_success():
    """U30: an empty list of acknowledgements never counts."""
    with pytest.raises(ValueError, match="at least 1 receiver"):
        RefitSender(num_receivers=0)
    with RefitSender(num_receivers=1, host="127.0.0.1") as sender:
        with pytest.raises(ValueError, match="empty manifest"):
            sender.open(Manifest(()), 1)
        with pytest.raises(StateError, match="call open"):
            sender.transfer([])


def test_each_of_many_senders_keeps_a_port_of_its_own():
    """R24, R25: the owner binds and keeps; nobody probes and releases."""
    senders = [RefitSender(num_receivers=1, host="127.0.0.1") for _ in range(20)]
    assert len({sender.address for sender in senders}) == len(senders)
    for sender in senders:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(split_address(sender.address))
        sender.close()


def test_a_closed_sender_is_told_apart_from_a_slow_one():
    """R24: the error says that TCP does not reach it."""
    sender = RefitSender(num_receivers=1, settings=QUICK, host="127.0.0.1")
    address = sender.address
    sender.close()
    receiver = RefitReceiver(rank=1, num_receivers=1, settings=QUICK)
    with pytest.raises(RefitPeerLostError, match="TCP reachable: no"):
        receiver.receive(address, DictSink({"w": torch.zeros(3)}))
    assert receiver.state is WeightState.EMPTY
    with pytest.raises(StateError, match="make a new one"):
        sender.open(MANIFEST, 1)


def test_weights_are_refused_until_a_refit_completes_and_after_they_were_discarded():
    """R37: sleep level 2 makes them invalid."""
    status = WeightStatus()
    with pytest.raises(WeightsInvalidError, match="no refit has completed yet"):
        status.require_valid()
    with pytest.raises(StateError, match="empty can become"):
        status.commit(1)
    status.begin()
    with pytest.raises(WeightsInvalidError, match="under way"):
        status.require_valid()
    with pytest.raises(StateError, match="one refit at a time"):
        status.begin()
    status.commit(3)
    assert status.require_valid() == 3
    status.invalidate("sleep level 2")
    status.invalidate("something later")
    with pytest.raises(WeightsInvalidError, match=r"sleep level 2\. A full refit is needed"):
        status.require_valid()


@given(
    kind=st.sampled_from([k for k in OutcomeKind if k is not OutcomeKind.COMMITTED]),
    cause=st.text(min_size=1),
    phase=st.text(),
    culprit=st.text(),
)
def test_a_failure_crosses_the_store_unchanged(kind, cause, phase, culprit):
    outcome = Outcome(kind=kind, cause=cause, phase=phase, culprit=culprit)
    again = Outcome.from_json(outcome.to_json())
    assert again == outcome
    error = again.error(5)
    assert isinstance(error, RefitError)
    assert (error.cause, error.phase, error.culprit) == (cause, phase, culprit)
    assert cause in str(error)


def test_nccl_variables_have_to_be_equal_whatever_their_value():
    """R9, R27, R28: equality is the invariant; a variable on one side only is a difference."""
    train = nccl_facts((2, 29, 7), {"NCCL_CUMEM_ENABLE": "0", "PATH": "/a"})
    engine = nccl_facts((2, 29, 7), {"PATH": "/b"})
    assert equal_differences(train, train, me="x", them="y") == []
    assert equal_differences(train, engine, me="train", them="engine") == [
        "NCCL_CUMEM_ENABLE is unset on engine and 0 on train"
    ]
    older = nccl_facts((2, 21, 5), {})
    assert equal_differences(older, engine, me="a", them="b") == ["NCCL version is 2.29.7 on b and 2.21.5 on a"]


def test_device_ids_are_opaque_and_no_two_ranks_share_one():
    """R26, R54, R57."""
    ranks = [Identity.here(role="generation", rank=r, device_id=f"MIG-{r % 2}/1/0") for r in range(3)]
    (found,) = shared_devices(ranks)
    assert "rank 0" in found
    assert "rank 2" in found
    assert "'MIG-0/1/0'" in found


@pytest.mark.parametrize("address", ["host", "host:", ":80", "host:0", "host:65536", "host:٣", ""])
def test_a_malformed_address_is_refused(address):
    with pytest.raises(ValueError, match="host:port"):
        split_address(address)


@pytest.mark.parametrize("host", ["10.0.0.1", "node-7", "fe80::1"])
def test_an_address_survives_the_control_plane(host):
    assert split_address(join_address(host, 1234)) == (host, 1234)


@pytest.mark.parametrize("bad", [{"bucket_bytes": 0}, {"silence_timeout_s": 0.0}, {"transfer_timeout_s": float("inf")}])
def test_settings_without_an_end_are_refused(bad):
    """R34: there is no way to wait for ever."""
    with pytest.raises(ValueError, match=next(iter(bad))):
        RefitSettings(**bad)


def test_a_rank_out_of_range_is_refused():
    with pytest.raises(ValueError, match="from 1 to num_receivers=2, got rank=0"):
        RefitReceiver(rank=0, num_receivers=2)


def test_an_open_refit_that_is_aborted_moves_no_byte_and_the_next_one_works():
    """R31: open and transfer are two steps, so that all train ranks can agree on "begin version N" in between."""
    live = DictSink({"w": torch.full((3,), 7.0)})
    receiver = RefitReceiver(rank=1, num_receivers=1, settings=QUICK, device_id="other")
    with RefitSender(num_receivers=1, settings=QUICK, host="127.0.0.1") as sender:
        result = in_thread(receiver.receive, sender.address, live)
        sender.open(MANIFEST, 1)
        assert live.events == []
        with pytest.raises(StateError, match="one refit at a time"):
            sender.open(MANIFEST, 2)
        sender.abort("another train rank failed")
        error = result()
        assert isinstance(error, RefitError)
        assert error.cause.endswith("aborted the refit: another train rank failed")
        assert live.events == []
        assert receiver.state is WeightState.EMPTY

        result = in_thread(receiver.receive, sender.address, live)
        report = sender.send(MANIFEST, [("w", torch.ones(3))], 2)
        assert result().digest == report.digest
        assert live.tensors["w"].tolist() == [1.0, 1.0, 1.0]
        assert receiver.version == 2
    receiver.close()
    with pytest.raises(WeightsInvalidError, match="closed"):
        receiver.require_valid()


def test_without_digests_a_refit_still_counts_every_tensor():
    settings = RefitSettings(rendezvous_timeout_s=20.0, transfer_timeout_s=20.0, silence_timeout_s=5.0, digest=False)
    live = DictSink.poisoned(MANIFEST)
    receiver = RefitReceiver(rank=1, num_receivers=1, settings=settings, device_id="other")
    with RefitSender(num_receivers=1, settings=settings, host="127.0.0.1") as sender:
        result = in_thread(receiver.receive, sender.address, live)
        report = sender.send(MANIFEST, [("w", torch.ones(3))], 1)
    assert (report.digest, result().digest) == (None, None)
    assert [(ack.num_tensors, ack.num_bytes, ack.version) for ack in report.acks] == [(1, 12, 1)]


def test_a_trainer_without_our_other_parts_can_use_it_alone():
    """R1, R7: torch and the standard library; no ray, pydantic, transformers or engine is loaded."""
    code = (
        "import sys, nemo_rl_core.refit.sender, nemo_rl_core.refit.receiver, nemo_rl_core.testing.refit;"
        "print(sorted({'ray', 'pydantic', 'transformers', 'vllm', 'grimp', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


class UnprintableError(Exception):
    """What an engine may raise: an exception whose own text raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class RaisingSink(DictSink):
    def load(self, tensors):
        raise UnprintableError


def raising_source():
    raise UnprintableError
    yield


@pytest.mark.parametrize("side", ["receiver", "sender"])
def test_an_exception_without_a_text_is_named_on_both_sides_and_the_next_refit_works(side):
    receiver = RefitReceiver(rank=1, num_receivers=1, settings=QUICK, device_id="other")
    weights = [("w", torch.arange(3.0))]
    with RefitSender(num_receivers=1, settings=QUICK, host="127.0.0.1") as sender:
        sink = RaisingSink({"w": torch.zeros(3)}) if side == "receiver" else DictSink({"w": torch.zeros(3)})
        result = in_thread(receiver.receive, sender.address, sink)
        with pytest.raises(RefitError, match="UnprintableError") as caught:
            sender.send(MANIFEST, weights if side == "receiver" else raising_source(), 1)
        error = result()
        assert isinstance(error, RefitError)
        assert error.cause == caught.value.cause
        assert receiver.state is WeightState.INVALID

        good = DictSink({"w": torch.zeros(3)})
        result = in_thread(receiver.receive, sender.address, good)
        sender.send(MANIFEST, weights, 2)
        result()
        assert receiver.require_valid() == 2
        assert good.tensors["w"].tolist() == [0.0, 1.0, 2.0]


def test_manifest_and_digests_of_any_size_pass_through_the_store():
    """A value in torch's store ends at 8 MiB; a large mixture of experts has more names than that."""
    names = [f"{'layers.' * 140}{index}" for index in range(9_000)]
    tensors = {name: torch.tensor([float(index)]) for index, name in enumerate(names)}
    manifest = Manifest.from_tensors(tensors.items())
    assert len(manifest.to_json()) > 8 * 2**20
    # Another order than the sender's, so that the manifest itself has to be fetched.
    sink = DictSink({name: torch.zeros(1) for name in reversed(names)})
    receiver = RefitReceiver(rank=1, num_receivers=1, settings=RefitSettings(), device_id="other")
    with RefitSender(num_receivers=1, settings=RefitSettings(), host="127.0.0.1") as sender:
        result = in_thread(receiver.receive, sender.address, sink)
        report = sender.send(manifest, tensors.items(), 1)
        assert report.digest is not None
        assert result().digest == report.digest
    assert all(torch.equal(sink.tensors[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("version", [None, "7", 1.5, True, -1])
def test_a_version_that_is_no_integer_from_zero_on_is_refused_before_anything_starts(version):
    with (
        RefitSender(num_receivers=1, settings=QUICK, host="127.0.0.1") as sender,
        pytest.raises(ValueError, match=f"integer from 0 on, got {version!r}"),
    ):
        sender.open(MANIFEST, version)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e10, float("inf"), float("nan")])
@pytest.mark.parametrize("field", ["rendezvous_timeout_s", "transfer_timeout_s", "silence_timeout_s"])
def test_a_time_limit_is_above_zero_and_at_most_a_week(field, seconds):
    with pytest.raises(ValueError, match=f"{field} must be above 0 s"):
        RefitSettings(**{field: seconds})


def test_a_sender_that_cannot_reach_its_own_store_in_time_says_so_as_a_refit_error():
    hasty = RefitSettings(rendezvous_timeout_s=1e-6)
    with (
        RefitSender(num_receivers=1, settings=hasty, host="127.0.0.1") as sender,
        pytest.raises(RefitPeerLostError, match="could not connect to its own store"),
    ):
        sender.send(MANIFEST, [("w", torch.zeros(3))], 1)


def test_an_abort_between_open_and_transfer_is_what_transfer_reports():
    receiver = RefitReceiver(rank=1, num_receivers=1, settings=QUICK, device_id="other")
    with RefitSender(num_receivers=1, settings=QUICK, host="127.0.0.1") as sender:
        result = in_thread(receiver.receive, sender.address, DictSink({"w": torch.zeros(3)}))
        sender.open(MANIFEST, 1)
        sender.abort("the scheduler wants the node back")
        with pytest.raises(RefitError, match="the scheduler wants the node back") as caught:
            sender.transfer([("w", torch.zeros(3))])
        assert result().cause == caught.value.cause


def test_an_engine_that_discards_its_weights_during_a_refit_is_told_so_and_stays_invalid():
    """The refit completes on all ranks; this rank's own invalidation must not be lost over it."""
    receiver = RefitReceiver(rank=1, num_receivers=1, settings=QUICK, device_id="other")

    class SleepySink(DictSink):
        def finish(self, version):
            super().finish(version)
            receiver.invalidate("the engine went to sleep")

    with RefitSender(num_receivers=1, settings=QUICK, host="127.0.0.1") as sender:
        result = in_thread(receiver.receive, sender.address, SleepySink({"w": torch.zeros(3)}))
        sender.send(MANIFEST, [("w", torch.zeros(3))], 1)
        assert isinstance(result(), RefitError)
        with pytest.raises(WeightsInvalidError, match="went to sleep"):
            receiver.require_valid()


def test_a_cause_of_any_length_is_the_same_on_both_sides():
    class Verbose(DictSink):
        def load(self, tensors):
            raise RuntimeError("x" * 9_000_000)

    receiver = RefitReceiver(rank=1, num_receivers=1, settings=QUICK, device_id="other")
    with RefitSender(num_receivers=1, settings=QUICK, host="127.0.0.1") as sender:
        result = in_thread(receiver.receive, sender.address, Verbose({"w": torch.zeros(3)}))
        with pytest.raises(RefitError, match="RuntimeError: xxx") as caught:
            sender.send(MANIFEST, [("w", torch.zeros(3))], 1)
        assert result().cause == caught.value.cause


def test_a_receiver_that_is_too_slow_is_named_with_how_far_it_came():
    settings = RefitSettings(bucket_bytes=4, rendezvous_timeout_s=8.0, transfer_timeout_s=1.0, silence_timeout_s=8.0)
    gate = threading.Event()

    class SlowSink(DictSink):
        def load(self, tensors):
            super().load(tensors)
            if tensors[0][0] == "w2":
                gate.wait(20)

    tensors = [(f"w{i}", torch.full((1,), float(i))) for i in range(6)]
    receivers = [RefitReceiver(rank=r, num_receivers=2, settings=settings, device_id=f"device {r}") for r in (1, 2)]
    sinks = [DictSink({n: torch.zeros(1) for n, _ in tensors}), SlowSink({n: torch.zeros(1) for n, _ in tensors})]
    with RefitSender(num_receivers=2, settings=settings, host="127.0.0.1") as sender:
        results = [in_thread(r.receive, sender.address, s) for r, s in zip(receivers, sinks, strict=True)]
        with pytest.raises(RefitTimeoutError, match=r"generation rank 2 .* had loaded 2 of 6 buckets") as caught:
            sender.send(Manifest.from_tensors(tensors), tensors, 1)
        assert caught.value.culprit.startswith("generation rank 2")
        gate.set()
        assert {result().cause for result in results} == {caught.value.cause}
