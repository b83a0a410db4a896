# SPDX-License-Identifier: Apache-2.0
import os
import signal

# A shell starts its background jobs with Ctrl-C ignored, which every child would inherit; the tests that send one would
# then wait for nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported anywhere: several test processes share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.strategies import use_reproducible_examples

use_reproducible_examples()


def pytest_configure(config):
    """`-m full` means everything: the fast tier and the slow proofs."""
    if config.option.markexpr == "full":
        config.option.markexpr = ""
