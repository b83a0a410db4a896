# SPDX-License-Identifier: Apache-2.0
"""``python -m nemo_rl_core``: the same as ``nemo-rl``."""

import sys

from nemo_rl_core.cli.app import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
