# SPDX-License-Identifier: Apache-2.0
"""What a receiver acknowledges is compared with what was sent, and the first record of an outcome is the only one."""

import threading

import pytest
import torch

from nemo_rl_core.errors import RefitError
from nemo_rl_core.refit import receiver as receiver_module
from nemo_rl_core.refit.handshake import Identity
from nemo_rl_core.refit.manifest import Manifest
from nemo_rl_core.refit.receiver import RefitReceiver
from nemo_rl_core.refit.rendezvous import StoreLinks, StoreListener
from nemo_rl_core.refit.report import Ack
from nemo_rl_core.refit.sender import RefitSender
from nemo_rl_core.refit.session import Session
from nemo_rl_core.refit.settings import RefitSettings
from nemo_rl_core.refit.transaction import Outcome, OutcomeKind, WeightState
from nemo_rl_core.testing.refit import DictSink

#: Without digests the counts are the only net.
SETTINGS = RefitSettings(rendezvous_timeout_s=20.0, transfer_timeout_s=20.0, silence_timeout_s=5.0, digest=False)
TENSORS = [("a", torch.ones(3)), ("b", torch.ones(2))]
MANIFEST = Manifest.from_tensors(TENSORS)


@pytest.mark.parametrize(
    ("field", "wrong", "words"),
    [
        ("num_tensors", 1, "acknowledged tensors 1, sent was 2"),
        ("num_bytes", 12, "acknowledged bytes 12, sent was 20"),
        ("version", 4, "acknowledged version 4, sent was 5"),
    ],
)
def test_an_acknowledgement_of_something_else_than_was_sent_fails_the_refit(monkeypatch, field, wrong, words):
    """U30: a receiver that lost a tensor, or finished another version, is no success on either side."""
    monkeypatch.setattr(receiver_module, "Ack", lambda **fields: Ack(**fields | {field: wrong}))
    receiver = RefitReceiver(rank=1, num_receivers=1, settings=SETTINGS, device_id="other")
    errors: list[RefitError] = []

    def receive(address: str) -> None:
        try:
            receiver.receive(address, DictSink.poisoned(MANIFEST))
        except RefitError as error:
            errors.append(error)

    with RefitSender(num_receivers=1, settings=SETTINGS, host="127.0.0.1") as sender:
        thread = threading.Thread(target=receive, args=(sender.address,), daemon=True)
        thread.start()
        with pytest.raises(RefitError) as caught:
            sender.send(MANIFEST, TENSORS, 5)
        thread.join(30)
    assert words in caught.value.cause
    assert "generation rank 1" in caught.value.culprit
    assert [error.cause for error in errors] == [caught.value.cause]
    assert receiver.state is WeightState.INVALID


def test_an_outcome_is_written_once_and_every_rank_reads_the_first():
    """Two ranks that fail at the same moment tell one story, and a late failure does not undo a commit."""
    listener = StoreListener("127.0.0.1")
    owner = Identity.here(role="train", rank=0, device_id="0")
    other = Identity.here(role="generation", rank=1, device_id="1")
    links = [
        StoreLinks((listener.host, listener.port), connect_timeout_s=10.0, answer_timeout_s=10.0) for _ in range(2)
    ]
    try:
        for name, first in (("failed", OutcomeKind.FAILED), ("done", OutcomeKind.COMMITTED)):
            sessions = [
                Session(link, session=name, version=1, me=me, owner=owner, silence_s=60.0)
                for link, me in zip(links, (owner, other), strict=True)
            ]
            mine = sessions[0].decide(Outcome(kind=first, cause="the first"))
            theirs = sessions[1].decide(Outcome(kind=OutcomeKind.TIMEOUT, cause="the second"))
            assert mine == theirs == Outcome(kind=first, cause="the first")
            for session in sessions:
                session.close()
    finally:
        for link in links:
            link.close()
        listener.close()
