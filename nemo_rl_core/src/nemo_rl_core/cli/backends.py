# SPDX-License-Identifier: Apache-2.0
"""``nemo-rl backends``: which generation backends there are, and in what state."""

import argparse
import json

from nemo_rl_core import plugins
from nemo_rl_core.protocols.generation import PROTOCOL_NUMBER

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Print one line for each backend."""
    found = plugins.discover()
    if options.check:
        found = {name: plugins.check(name, expected_protocol=PROTOCOL_NUMBER) for name in found}
    if options.json:
        rows = [
            {
                "name": plugin.name,
                "state": plugin.state.value,
                "distribution": plugin.distribution,
                "version": plugin.version,
                "reason": plugin.reason,
            }
            for plugin in found.values()
        ]
        print(json.dumps(rows, indent=2))
        return 0
    for plugin in found.values():
        source = f"{plugin.distribution} {plugin.version}".strip()
        print(f"{plugin.name:12} {plugin.state.value:13} {source or '-':24} {plugin.reason or ''}".rstrip())
    return 0
