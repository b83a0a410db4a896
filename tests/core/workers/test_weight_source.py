# SPDX-License-Identifier: Apache-2.0
"""A refit from two train ranks: a transfer that fails leaves neither of them alone in a gather."""

import threading

import pytest

from nemo_rl_core.errors import RefitError
from nemo_rl_core.protocols.settings import ModelSettings
from nemo_rl_core.refit.receiver import RefitReceiver
from nemo_rl_core.refit.settings import RefitSettings
from nemo_rl_core.testing.refit import DictSink
from nemo_rl_core.workers.dtensor import DTensorPolicyWorker
from nemo_rl_core.workers.settings import BatchingSettings, OptimizerSettings, PolicySettings
from tests.core.workers.ranks import run_on_ranks
from tests.core.workers.tiny import MODEL

#: Small buckets, so that much is left to gather when the first one fails to load.
REFIT = RefitSettings(bucket_bytes=512, rendezvous_timeout_s=40.0, transfer_timeout_s=40.0, silence_timeout_s=20.0)
SETTINGS = PolicySettings(
    model=ModelSettings(hf_config=MODEL, max_total_sequence_length=32, seed=3),
    optimizer=OptimizerSettings(name="torch.optim.SGD", kwargs={"lr": 0.1}),
    batching=BatchingSettings(train_micro_batch_size=2, logprob_batch_size=2),
    collective_timeout_s=30.0,
)


class Unloadable(DictSink):
    """A live model that takes nothing."""

    def load(self, tensors):
        raise KeyError("no such parameter")


def refit_twice(rank, world_size, store):
    """Send to a receiver beside rank 0, which fails to load the first time."""
    worker = DTensorPolicyWorker(SETTINGS, rank=rank, world_size=world_size, store=store)
    address = worker.open_refit_listener(1, REFIT, "127.0.0.1")
    receiver = RefitReceiver(rank=1, num_receivers=1, settings=REFIT, device_id="other")
    outcomes, received = [], []

    def receive(sink):
        try:
            received.append(receiver.receive(address, sink).digest)
        except RefitError as error:
            received.append(error.cause)

    for version, kind in ((1, Unloadable), (2, DictSink)):
        thread = threading.Thread(target=receive, args=(kind.poisoned(worker._source.manifest()),), daemon=True)
        if rank == 0:
            thread.start()
        try:
            outcomes.append(worker.send_weights(version)["digest"])
        except RefitError as error:
            outcomes.append(error.cause)
        if rank == 0:
            thread.join(60)
    digest = worker.weights_digest()
    worker.shutdown()
    return outcomes, received, digest


@pytest.mark.timeout(200)
def test_a_transfer_that_fails_is_one_error_on_all_ranks_and_the_next_refit_works():
    """U30, R34: rank 0 gathers to the end, since the other ranks are in those collectives too."""
    (outcomes, received, digest), (others, _, other_digest) = run_on_ranks(refit_twice, 2)
    assert "KeyError: 'no such parameter'" in outcomes[0]
    assert outcomes == others == received
    assert outcomes[1] == digest == other_digest
