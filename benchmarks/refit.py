# SPDX-License-Identifier: Apache-2.0
"""What a refit costs beside the bytes it moves: ratios to a raw gloo broadcast of the same bytes in the same run.

    python benchmarks/refit.py [--megabytes 256] [--repeats 5]

One sender and one receiver, two processes on this machine, one thread each. Prints one JSON line a figure: the median of
the repeats, first refit left out.
"""

import argparse
import datetime
import json
import multiprocessing
import statistics
import time

import torch
import torch.distributed as dist

from nemo_rl_core.refit.manifest import Manifest
from nemo_rl_core.refit.receiver import RefitReceiver
from nemo_rl_core.refit.sender import RefitSender
from nemo_rl_core.refit.settings import RefitSettings
from nemo_rl_core.testing.refit import DictSink

DEADLINE_S = 300
ROW = 1024


def tensors_of(num_bytes):
    """A model-like set: matrices of 4 MB and a small vector beside each."""
    rows = 4 * 2**20 // (4 * ROW)
    count = max(1, num_bytes // (4 * 2**20))
    g = torch.Generator().manual_seed(0)
    return [
        (f"layers.{i}.{kind}", torch.randn(shape, generator=g))
        for i in range(count)
        for kind, shape in (("weight", (rows, ROW)), ("norm", (ROW,)))
    ]


def receive(address, settings, repeats, num_bytes, port, pipe):
    """The receiving process: the refits, then the raw broadcasts."""
    torch.set_num_threads(1)
    tensors = tensors_of(num_bytes)
    sink = DictSink({name: torch.zeros_like(tensor) for name, tensor in tensors})
    receiver = RefitReceiver(rank=1, num_receivers=1, settings=settings)
    for _ in range(repeats):
        receiver.receive(address, sink)
    receiver.close()
    raw_broadcasts(port, 1, num_bytes, repeats)
    pipe.send("done")


def raw_broadcasts(port, rank, num_bytes, repeats):
    """Seconds of each broadcast of one flat buffer."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=DEADLINE_S))
    group = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=DEADLINE_S))
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    seconds = []
    for _ in range(repeats):
        group.barrier().wait()
        start = time.perf_counter()
        group.broadcast(buffer, 0).wait()
        group.barrier().wait()
        seconds.append(time.perf_counter() - start)
    return seconds


def measure(digest, num_bytes, repeats):
    """Median seconds of a refit, of its transfer phase and of a raw broadcast."""
    settings = RefitSettings(digest=digest)
    tensors = tensors_of(num_bytes)
    manifest = Manifest.from_tensors(tensors)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with RefitSender(num_receivers=1, settings=settings) as sender:
        arguments = (sender.address, settings, repeats, num_bytes, store.port, theirs)
        child = context.Process(target=receive, args=arguments, daemon=True)
        child.start()
        reports = [sender.send(manifest, tensors, version) for version in range(repeats)]
    raw = raw_broadcasts(store.port, 0, num_bytes, repeats)
    if not ours.poll(DEADLINE_S):
        raise SystemExit("the receiving process did not finish")
    child.join(10)
    return [
        statistics.median(values)
        for values in ([r.seconds for r in reports[1:]], [r.transfer_s for r in reports[1:]], raw[1:])
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    num_bytes = options.megabytes * 2**20
    for digest in (False, True):
        total_s, transfer_s, raw_s = measure(digest, num_bytes, options.repeats)
        common = {"megabytes": options.megabytes, "digest": digest, "raw_broadcast_s": round(raw_s, 4)}
        for name, seconds in (("refit", total_s), ("transfer phase", transfer_s)):
            figure = {
                "figure": f"{name} / raw broadcast",
                "ratio": round(seconds / raw_s, 2),
                "seconds": round(seconds, 4),
            }
            print(json.dumps({**figure, **common}), flush=True)


if __name__ == "__main__":
    main()
