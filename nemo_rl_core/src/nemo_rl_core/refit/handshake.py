# SPDX-License-Identifier: Apache-2.0
"""What both sides tell each other before any byte moves, and what has to be equal or different.

``protocol``, ``session``, ``version`` and ``sender`` of an offer keep their place in every protocol number, so that
a receiver of another number can still refuse in words.
"""

import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

import nemo_rl_core
from nemo_rl_core.refit.manifest import Manifest
from nemo_rl_core.refit.settings import RefitSettings

__all__ = [
    "PROTOCOL_NUMBER",
    "Hello",
    "Identity",
    "Offer",
    "equal_differences",
    "equal_facts",
    "nccl_facts",
    "offer_differences",
    "shared_devices",
]

#: Rises with every change of keys, records or the cut rule.
PROTOCOL_NUMBER = 1

_NUM_NAMED_DIFFERENCES = 20
_UNSET = "unset"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who a process is, as its peers name it.

    Attributes:
        role: ``train`` or ``generation``.
        rank: 0 for the sender, from 1 for receivers.
        host: Host name.
        pid: Process id there.
        torch: Version of its torch; may differ between the sides.
        device_id: An opaque name of the device that it uses (a GPU or MIG UUID); no two ranks share one.
    """

    role: str
    rank: int
    host: str
    pid: int
    torch: str
    device_id: str

    @classmethod
    def here(cls, *, role: str, rank: int, device_id: str | None) -> "Identity":
        """Describe this process; without a device id it is ``cpu:<host>:<pid>``."""
        host, pid = socket.gethostname(), os.getpid()
        return cls(
            role=role,
            rank=rank,
            host=host,
            pid=pid,
            torch=str(torch.__version__),
            device_id=device_id or f"cpu:{host}:{pid}",
        )

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A receiver's acceptance of an offer.

    Attributes:
        identity: Who accepts.
        nonce: Random text by which two receivers that claim one rank are told apart.
    """

    identity: Identity
    nonce: str

    def to_json(self) -> str:
        """Write it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Hello":
        """Read what ``to_json`` wrote."""
        fields = json.loads(text)
        return cls(identity=Identity(**fields["identity"]), nonce=fields["nonce"])


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What the sender announces when it opens a refit.

    Attributes:
        protocol: Its ``PROTOCOL_NUMBER``.
        session: Random id of this refit; no two share one.
        version: Version that the weights will get.
        sender: Who it is.
        facts: Values that have to be equal on all ranks, by name.
        num_receivers: Number of receiving ranks that it waits for.
        manifest_digest: Digest of the manifest that it will send.
        settings: Sizes and deadlines that rule on both sides.
    """

    protocol: int
    session: str
    version: int
    sender: Identity
    facts: Mapping[str, str]
    num_receivers: int
    manifest_digest: str
    settings: RefitSettings

    def to_json(self) -> str:
        """Write it."""
        return json.dumps(asdict(self))

    @staticmethod
    def head_from_json(text: str) -> tuple[int, str, int, Identity]:
        """Read protocol, session, version and sender, which every protocol number has."""
        fields = json.loads(text)
        return fields["protocol"], fields["session"], fields["version"], Identity(**fields["sender"])

    @classmethod
    def from_json(cls, text: str) -> "Offer":
        """Read a whole offer of this protocol number."""
        fields = json.loads(text)
        fields["sender"] = Identity(**fields["sender"])
        fields["settings"] = RefitSettings(**fields["settings"])
        return cls(**fields)


def equal_facts(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the values that have to be equal on all ranks: the core version, and a transport's own ``extra``."""
    return {"core version": nemo_rl_core.__version__, **(extra or {})}


def nccl_facts(version: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """Return what has to be equal for NCCL: its version and every ``NCCL_*`` variable in force.

    Args:
        version: As ``torch.cuda.nccl.version()`` gives it.
        environment: The process's variables, read *after* the engine's import, which may set some.
    """
    variables = {name: value for name, value in environment.items() if name.startswith("NCCL_")}
    return {"NCCL version": ".".join(map(str, version)), **variables}


def equal_differences(mine: Mapping[str, str], theirs: Mapping[str, str], *, me: str, them: str) -> list[str]:
    """Name every value that should be equal and is not; a name on one side only counts as ``unset`` on the other."""
    return [
        f"{name} is {theirs.get(name, _UNSET)} on {them} and {mine.get(name, _UNSET)} on {me}"
        for name in sorted({*mine, *theirs})
        if mine.get(name, _UNSET) != theirs.get(name, _UNSET)
    ]


def offer_differences(
    offer: Offer, sent: Manifest, *, me: Identity, expected: Manifest, expected_version: int | None, num_receivers: int
) -> list[str]:
    """Name everything for which a receiver has to refuse an offer of its own protocol number.

    Args:
        offer: What the sender announces.
        sent: Its manifest.
        me: This receiver.
        expected: What the live model expects.
        expected_version: Version that this receiver was told to expect, or None.
        num_receivers: Number of receiving ranks that it was told of.

    Returns:
        One clause per difference, naming both values; empty where the offer is accepted.
    """
    found = equal_differences(equal_facts(), offer.facts, me=str(me), them=str(offer.sender))
    if num_receivers != offer.num_receivers:
        found.append(f"{offer.sender} waits for {offer.num_receivers} receivers and {me} was told of {num_receivers}")
    if expected_version is not None and expected_version != offer.version:
        found.append(f"{offer.sender} sends version {offer.version} and {me} expects version {expected_version}")
    tensors = list(sent.differences(expected))
    if tensors:
        found.append(f"the manifest of {offer.sender} is not the one of {me}: {_shorten(tensors)}")
    return found


def shared_devices(ranks: Iterable[Identity]) -> list[str]:
    """Name every pair of ranks on one device; NCCL would freeze on it, and CPU ranks would be one process."""
    first: dict[str, Identity] = {}
    found = []
    for identity in ranks:
        other = first.setdefault(identity.device_id, identity)
        if other is not identity:
            found.append(
                f"{other} and {identity} are both on device {identity.device_id!r}: ranks of one refit need devices of "
                "their own (sharing one is the colocated set-up)"
            )
    return found


def _shorten(differences: list[str]) -> str:
    shown = "; ".join(differences[:_NUM_NAMED_DIFFERENCES])
    rest = len(differences) - _NUM_NAMED_DIFFERENCES
    return f"{shown}; and {rest} more" if rest > 0 else shown
