# SPDX-License-Identifier: Apache-2.0
"""Import contracts that know when an import runs. Needs neither torch, nor ray, nor nemo-rl-core.

`phases` finds the imports of a source file and says when each one runs.
"""

from nemo_rl_contracts.phases import Form, FoundImport, Phase, find_imports

__all__ = ["Form", "FoundImport", "Phase", "__version__", "find_imports"]

__version__ = "0.1.0"
