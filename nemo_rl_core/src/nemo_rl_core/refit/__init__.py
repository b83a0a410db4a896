# SPDX-License-Identifier: Apache-2.0
"""Moving weights into generation workers, exactly or not at all: torch and the standard library only."""
