# SPDX-License-Identifier: Apache-2.0
"""How large the buckets are and how long anyone waits."""

import math
from dataclasses import dataclass

__all__ = ["DEFAULT_SETTINGS", "RefitSettings"]


#: A week. Gloo counts milliseconds and overflows on absurd times, which would end a refit at once.
LONGEST_S = 7 * 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class RefitSettings:
    """Sizes and deadlines of a refit. The sender's travel in the handshake and rule, so both sides agree.

    Only ``rendezvous_timeout_s`` and, until the handshake, ``silence_timeout_s`` of a receiver are its own.

    Attributes:
        bucket_bytes: Size of one bucket in bytes; each side holds two of them.
        rendezvous_timeout_s: Seconds until every rank must have said hello.
        transfer_timeout_s: Seconds from the first byte to the last acknowledgement.
        silence_timeout_s: A rank whose heartbeat stops for so many seconds is lost.
        digest: Whether each acknowledgement carries the digest of the live tensors, read back after the load.
    """

    bucket_bytes: int = 64 * 2**20
    rendezvous_timeout_s: float = 60.0
    transfer_timeout_s: float = 120.0
    silence_timeout_s: float = 10.0
    digest: bool = True

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ValueError: If a size is below 1 or a time is not above 0 and at most a week; the message names the field.
        """
        if self.bucket_bytes < 1:
            raise ValueError(f"refit setting bucket_bytes must be at least 1, got {self.bucket_bytes}")
        for field in ("rendezvous_timeout_s", "transfer_timeout_s", "silence_timeout_s"):
            value = getattr(self, field)
            if not (math.isfinite(value) and 0 < value <= LONGEST_S):
                raise ValueError(
                    f"refit setting {field} must be above 0 s and at most {LONGEST_S:.0f} s, got {value!r}"
                )


#: What holds where nothing is given.
DEFAULT_SETTINGS = RefitSettings()
