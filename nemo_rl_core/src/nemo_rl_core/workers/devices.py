# SPDX-License-Identifier: Apache-2.0
"""Who a worker is and where it computes, in words that mean the same in every process."""

import os
import socket
import sys

import torch

__all__ = ["describe_worker", "device_identity"]


def device_identity(device: torch.device, owner: str) -> str:
    """Return a device's name for the refit handshake.

    Args:
        device: With CUDA the UUID counts, which ``CUDA_VISIBLE_DEVICES`` cannot permute (R54); it is an opaque string.
        owner: Who computes there. A CPU can be shared, so host, process and owner make its name.
    """
    if device.type == "cuda":
        return f"cuda:{torch.cuda.get_device_properties(device).uuid}"
    return f"cpu:{socket.gethostname()}:{os.getpid()}:{owner}"


def describe_worker(backend: str, device: torch.device) -> dict[str, str]:
    """Return what ``summary.json`` says of a worker of this process, whose engine is torch."""
    return {
        "backend": backend,
        "engine_version": f"torch {torch.__version__}",
        "interpreter": sys.executable,
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "device": str(device),
    }
