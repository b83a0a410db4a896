# SPDX-License-Identifier: Apache-2.0
"""The driver's half of a refit: what it makes of the two sides' results and errors."""

import pytest

from nemo_rl_core.errors import RefitError, WorkerError
from nemo_rl_core.policy.refit import Refitter
from nemo_rl_core.refit.settings import RefitSettings

SENT = {"num_bytes": 12, "digest": "d"}
RECEIVED = {"version": 0, "bytes": 12, "digest": "d"}


class Side:
    """One side's future: gives its results, or raises its error; counts who waited for it."""

    def __init__(self, results=None, error=None):
        self.results, self.error, self.waited = results, error, 0

    def get_results(self, timeout_s=None):
        self.waited += 1
        if self.error is not None:
            raise self.error
        return self.results


class Policy:
    def __init__(self, side):
        self.side, self.versions = side, []

    def open_refit_listener(self, num_receivers, settings):
        return f"host:{num_receivers}"

    def start_sending(self, version, kv_scales=None):
        self.versions.append(version)
        self.kv_scales = kv_scales
        return self.side


class Generation:
    def __init__(self, side):
        self.side, self.addresses = side, []

    def num_receiving_ranks(self):
        return 2

    def start_receiving(self, address):
        self.addresses.append(address)
        return self.side


def refitter(sending, receiving):
    policy, generation = Policy(sending), Generation(receiving)
    return Refitter(policy, generation, RefitSettings()), policy, generation


def test_a_refit_that_all_replicas_confirm_gives_its_version_and_the_next_one_a_new_one():
    refit, policy, generation = refitter(Side([SENT]), Side([RECEIVED, RECEIVED]))
    outcome = refit.refit()
    assert (outcome.version, outcome.num_bytes, outcome.digest) == (0, 12, "d")
    assert generation.addresses == ["host:2"]
    assert refit.next_version == 1
    assert policy.versions == [0]


@pytest.mark.parametrize(("key", "value"), [("version", 3), ("bytes", 11), ("digest", "other")])
def test_a_replica_that_reports_something_else_than_was_sent_is_an_error(key, value):
    """U49: an answer is not yet a success."""
    refit, _, _ = refitter(Side([SENT]), Side([RECEIVED, RECEIVED | {key: value}]))
    with pytest.raises(RefitError, match=f"replica 1 reports {key}"):
        refit.refit()


def test_the_receivers_story_is_told_before_the_senders_and_a_version_is_never_given_twice():
    """R34: the first real error, not the one that it caused."""
    first = WorkerError("generation-0 failed: the loader raised", cause_type="RefitError")
    refit, policy, _ = refitter(
        Side(error=WorkerError("policy-0 lost a peer", cause_type="RefitError")), Side(error=first)
    )
    for _ in range(2):
        with pytest.raises(WorkerError, match="the loader raised"):
            refit.refit()
    assert policy.versions == [0, 1]


def test_a_dead_receiver_ends_it_at_once_and_nobody_waits_for_the_sender():
    """R43."""
    sending = Side([SENT])
    refit, _, _ = refitter(sending, Side(error=WorkerError("generation-0 died", cause_type="ActorDiedError")))
    with pytest.raises(WorkerError, match="generation-0 died"):
        refit.refit()
    assert sending.waited == 0


def test_a_dead_sender_is_named_before_the_receivers_that_lost_it():
    death = WorkerError("policy-0 died", cause_type="ActorDiedError")
    lost = WorkerError("generation-0: the sender is gone", cause_type="RefitPeerLostError")
    refit, _, _ = refitter(Side(error=death), Side(error=lost))
    with pytest.raises(WorkerError, match="policy-0 died"):
        refit.refit()
