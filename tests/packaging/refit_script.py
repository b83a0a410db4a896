# SPDX-License-Identifier: Apache-2.0
"""One side of a refit as a plain program, for an environment that holds core alone.

python refit_script.py send              prints the address, then its report
python refit_script.py receive ADDRESS   prints its report
"""

import json
import sys

import torch

from nemo_rl_core.refit.manifest import Manifest
from nemo_rl_core.refit.receiver import RefitReceiver
from nemo_rl_core.refit.sender import RefitSender
from nemo_rl_core.refit.settings import RefitSettings
from nemo_rl_core.testing.refit import DictSink

VERSION = 7
SETTINGS = RefitSettings(bucket_bytes=4096, rendezvous_timeout_s=60.0, transfer_timeout_s=60.0)


def weights() -> dict[str, torch.Tensor]:
    """Return weights that both sides can compute: larger than a bucket, of several types, one a scalar."""
    generator = torch.Generator().manual_seed(11)
    floats = torch.randn(64, 129, generator=generator)
    return {"proj": floats, "norm": floats[0, :7].bfloat16(), "scale": floats[0, 0].clone()}


def send() -> None:
    with RefitSender(num_receivers=1, settings=SETTINGS, host="127.0.0.1") as sender:
        print(sender.address, flush=True)
        report = sender.send(Manifest.from_tensors(weights().items()), weights().items(), VERSION)
        print(json.dumps({"digest": report.digest, "version": report.version}))


def receive(address: str) -> None:
    sink = DictSink.poisoned(Manifest.from_tensors(weights().items()))
    receiver = RefitReceiver(rank=1, num_receivers=1, settings=SETTINGS)
    report = receiver.receive(address, sink)
    wrong = [name for name, tensor in weights().items() if not torch.equal(tensor, sink.tensors[name])]
    print(json.dumps({"digest": report.digest, "version": receiver.require_valid(), "wrong": wrong}))


if __name__ == "__main__":
    send() if sys.argv[1] == "send" else receive(sys.argv[2])
