# SPDX-License-Identifier: Apache-2.0
"""Names and metadata of distributions. The reader of metadata takes long to import, so it waits for its first use."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

__all__ = ["files_of", "normalized", "owners", "requirements_of"]


def normalized(distribution: str) -> str:
    """Return the name of a distribution as PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def owners() -> Mapping[str, list[str]]:
    """Return top-level modules to the distributions that bring them."""
    import importlib.metadata

    return importlib.metadata.packages_distributions()


def requirements_of(distribution: str) -> Sequence[str]:
    """Return what an installed distribution asks for, as its metadata writes it."""
    import importlib.metadata

    return importlib.metadata.requires(distribution) or []


def files_of(distribution: str) -> Sequence[PurePath]:
    """Return the files that an installed distribution lists; none where it was installed without a list."""
    import importlib.metadata

    return importlib.metadata.files(distribution) or ()
