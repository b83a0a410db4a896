# SPDX-License-Identifier: Apache-2.0
"""What a completed refit says about itself."""

from dataclasses import dataclass

__all__ = ["Ack", "RefitReport"]


@dataclass(frozen=True, kw_only=True)
class Ack:
    """One receiving rank's word that it holds the weights.

    Attributes:
        rank: Receiving rank, counted from 1.
        num_bytes: Bytes of tensors that it loaded.
        num_tensors: Tensors that it loaded.
        version: Version that it finished.
        digest: Digest of its live tensors, or None where none was asked for.
    """

    rank: int
    num_bytes: int
    num_tensors: int
    version: int
    digest: str | None


@dataclass(frozen=True, kw_only=True)
class RefitReport:
    """A refit that completed on every rank.

    Attributes:
        version: Version that the weights now have.
        num_bytes: Bytes of tensors moved to each receiver.
        num_tensors: Tensors moved to each receiver.
        num_buckets: Buckets that they were packed into.
        seconds: Seconds from the call to the agreed end; the sum of the phases.
        rendezvous_s: Seconds until every rank had accepted and was connected.
        transfer_s: Seconds from the first byte to the agreed end.
        digest: Digest of the whole set, equal on all ranks, or None where none was asked for.
        acks: One acknowledgement per receiving rank in rank order; a receiver holds only its own.
    """

    version: int
    num_bytes: int
    num_tensors: int
    num_buckets: int
    seconds: float
    rendezvous_s: float
    transfer_s: float
    digest: str | None
    acks: tuple[Ack, ...]
