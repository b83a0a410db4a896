# SPDX-License-Identifier: Apache-2.0
"""`python -m nemo_rl_contracts`."""

import sys

from nemo_rl_contracts.cli.app import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
