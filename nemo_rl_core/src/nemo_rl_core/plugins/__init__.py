# SPDX-License-Identifier: Apache-2.0
"""Plugins found by entry point, and the state of each. Nothing is imported before `load` is asked for one of them.

`discovery` lists and tells states apart, `loading` brings one plugin or says why not.
"""

from nemo_rl_core.plugins.discovery import GENERATION_GROUP, Plugin, PluginState, discover
from nemo_rl_core.plugins.loading import CollectedItems, check, collect_mappings, load

__all__ = [
    "GENERATION_GROUP",
    "CollectedItems",
    "Plugin",
    "PluginState",
    "check",
    "collect_mappings",
    "discover",
    "load",
]
