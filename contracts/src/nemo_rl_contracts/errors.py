# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a contract besides being broken."""

__all__ = ["MisconfiguredError", "NotCoveredError"]


class MisconfiguredError(ValueError):
    """An option that names nothing, or contradicts another: the contract would prove nothing. Exit code 2."""


class NotCoveredError(ValueError):
    """A source file that could not be read or parsed, so nothing can be said about it. Exit code 3."""
