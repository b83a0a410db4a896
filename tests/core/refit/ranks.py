# SPDX-License-Identifier: Apache-2.0
"""Train and generation ranks as real processes, driven over pipes: no Ray, and nothing waits without a limit."""

import math
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from nemo_rl_core.errors import RefitError, WeightsInvalidError
from nemo_rl_core.refit import handshake
from nemo_rl_core.refit.deadline import Deadline
from nemo_rl_core.refit.handshake import Offer
from nemo_rl_core.refit.manifest import Manifest
from nemo_rl_core.refit.receiver import RefitReceiver
from nemo_rl_core.refit.rendezvous import StoreClient, split_address
from nemo_rl_core.refit.sender import RefitSender
from nemo_rl_core.refit.session import OPEN_KEY
from nemo_rl_core.refit.settings import RefitSettings
from nemo_rl_core.testing.refit import DictSink

BUCKET_BYTES = 1024
SETTINGS = RefitSettings(
    bucket_bytes=BUCKET_BYTES, silence_timeout_s=2.0, rendezvous_timeout_s=40.0, transfer_timeout_s=40.0
)
ANSWER_S = 60.0


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of every awkward kind, whose values depend on the seed."""
    g = torch.Generator().manual_seed(seed)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(math.prod(shape), generator=g).reshape(shape)

    tied = floats(16, 5)
    return {
        "fp32": floats(7, 3),
        "bool": torch.tensor([True, False, seed % 2 == 0]),
        "bf16_odd": floats(9).bfloat16(),
        "fp16": floats(5, 5).half(),
        "int64": torch.arange(11) * (seed + 1),
        "fp8": floats(13).to(torch.float8_e4m3fn),
        "fp8_scale": floats(),
        "empty": torch.zeros(0, 4),
        "transposed": floats(4, 6).t(),
        "strided": floats(40)[1::3],
        "exactly_a_bucket": floats(BUCKET_BYTES // 4),
        "larger_than_a_bucket": floats(3, 401),
        "embed": tied,
        "head": tied,
    }


def outcome_of(error: RefitError) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "cause": error.cause,
        "phase": error.phase,
        "culprit": error.culprit,
        "message": str(error),
    }


class PipedSink(DictSink):
    """A live model that tells the test where it is and fails where it is told to."""

    def __init__(self, tensors: dict[str, torch.Tensor], pipe: Connection, plan: dict[str, Any]) -> None:
        super().__init__(tensors)
        self.pipe = pipe
        self.plan = plan

    def manifest(self):
        if self.plan.pop("pause_in_manifest", None):
            self.pipe.send("asked for the manifest")
            assert self.pipe.poll(ANSWER_S)
            self.pipe.recv()
        return super().manifest()

    def load(self, tensors):
        if self.plan.pop("pause_in_load", None):
            self.pipe.send("loading")
            assert self.pipe.poll(ANSWER_S)
            self.pipe.recv()
        if self.plan.get("raise_in") == "load":
            raise KeyError("no such parameter")
        if not self.plan.get("forgets_to_load"):
            super().load(tensors)

    def finish(self, version):
        if self.plan.get("raise_in") == "finish":
            raise RuntimeError("repacking failed")
        super().finish(version)


def receiver_main(pipe: Connection, rank: int, num_receivers: int) -> None:
    torch.set_num_threads(1)
    receivers: dict[tuple, RefitReceiver] = {}
    while True:
        command, plan = pipe.recv()
        if command == "exit":
            return
        own_protocol = handshake.PROTOCOL_NUMBER
        handshake.PROTOCOL_NUMBER = plan.get("protocol", own_protocol)
        who = plan.get("rank", rank)
        device = plan.get("device_id")
        if (who, device) not in receivers:
            receivers[who, device] = RefitReceiver(
                rank=who, num_receivers=num_receivers, settings=SETTINGS, device_id=device
            )
        receiver = receivers[who, device]
        sink = PipedSink(DictSink.poisoned(Manifest.from_tensors(weights(0).items())).tensors, pipe, plan)
        for name, tensor in plan.get("replace", {}).items():
            if tensor is None:
                del sink.tensors[name]
            else:
                sink.tensors[name] = tensor
        try:
            report = receiver.receive(plan["address"], sink, expected_version=plan.get("expected_version"))
            expected = weights(plan["seed"])
            answer = {
                "report": report,
                "wrong": [n for n, t in expected.items() if not torch.equal(_bits(t), _bits(sink.tensors[n]))],
                "events": sink.events,
            }
        except RefitError as error:
            answer = outcome_of(error)
        handshake.PROTOCOL_NUMBER = own_protocol
        answer["state"] = receiver.state.name
        try:
            answer["valid"] = receiver.require_valid()
        except WeightsInvalidError as error:
            answer["invalid"] = str(error)
        pipe.send(answer)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def sender_main(pipe: Connection, num_receivers: int) -> None:
    torch.set_num_threads(1)
    with RefitSender(num_receivers=num_receivers, settings=SETTINGS, host="127.0.0.1", device_id="gpu-0") as sender:
        pipe.send(sender.address)
        while True:
            command, plan = pipe.recv()
            if command == "exit":
                return
            try:
                manifest = Manifest.from_tensors(weights(0).items())
                answer = {"report": sender.send(manifest, source(plan, pipe), plan["version"])}
            except RefitError as error:
                answer = outcome_of(error)
            pipe.send(answer)


def source(plan: dict[str, Any], pipe: Connection):
    for index, item in enumerate(weights(plan["seed"]).items()):
        if index == plan.get("pause_at"):
            pipe.send("packing")
            assert pipe.poll(ANSWER_S)
            pipe.recv()
        if index == plan.get("raise_at"):
            raise LookupError("shard 3 is missing")
        yield item


def wait_for_hello(address: str, rank: int) -> None:
    """Wait until a receiving rank has said hello in the refit that is open: it is past its own checks by then."""
    client = StoreClient(*split_address(address), connect_timeout_s=20.0, answer_timeout_s=10.0)
    deadline = Deadline(ANSWER_S)
    while not deadline.expired:
        offer = client.read(OPEN_KEY)
        if offer is not None and client.read(f"refit/{Offer.head_from_json(offer)[1]}/hello/{rank}") is not None:
            client.close()
            return
        time.sleep(0.01)
    raise AssertionError(f"generation rank {rank} said no hello in time")


class Rank:
    """One process and the pipe to it."""

    def __init__(self, target, *args) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, command: str, **plan: Any) -> None:
        self.pipe.send((command, plan))

    def answer(self) -> Any:
        assert self.pipe.poll(ANSWER_S), "the process did not answer in time"
        return self.pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    @property
    def pid(self) -> int | None:
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)


class Trio:
    """One sender and two receivers that live on from test to test; the dead are replaced."""

    def __init__(self) -> None:
        self.version = 0
        self.receivers = {rank: Rank(receiver_main, rank, 2) for rank in (1, 2)}
        self.sender = Rank(sender_main, 2)
        self.address = self.sender.answer()

    def replace_dead(self) -> None:
        for rank, process in self.receivers.items():
            if not process.process.is_alive():
                self.receivers[rank] = Rank(receiver_main, rank, 2)
        if not self.sender.process.is_alive():
            self.sender = Rank(sender_main, 2)
            self.address = self.sender.answer()

    def begin(self, *, sender: dict | None = None, one: dict | None = None, two: dict | None = None) -> None:
        """Start a refit on all three; the plans say what goes wrong."""
        self.version += 1
        self.sender.ask("send", **{"version": self.version, "seed": self.version, **(sender or {})})
        for rank, plan in ((1, one), (2, two)):
            self.receivers[rank].ask("receive", **{"address": self.address, "seed": self.version, **(plan or {})})

    def answers(self) -> tuple[Any, Any, Any]:
        return self.sender.answer(), self.receivers[1].answer(), self.receivers[2].answer()

    def refit_works(self) -> None:
        self.replace_dead()
        self.begin()
        sent, *received = self.answers()
        assert "report" in sent, sent
        for answer in received:
            assert answer.get("wrong") == [], answer
            assert answer["valid"] == self.version
            assert answer["report"].digest == sent["report"].digest

    def close(self) -> None:
        for process in (self.sender, *self.receivers.values()):
            process.kill()
