# SPDX-License-Identifier: Apache-2.0
"""Names of devices that are the same in every process, so that two ranks on one device are found out."""

import os
import socket

import torch

__all__ = ["device_identity"]


def device_identity(device: torch.device, owner: str) -> str:
    """Return a device's name for the refit handshake.

    Args:
        device: With CUDA the UUID counts, which ``CUDA_VISIBLE_DEVICES`` cannot permute (R54); it is an opaque string.
        owner: Who computes there. A CPU can be shared, so host, process and owner make its name.
    """
    if device.type == "cuda":
        return f"cuda:{torch.cuda.get_device_properties(device).uuid}"
    return f"cpu:{socket.gethostname()}:{os.getpid()}:{owner}"
