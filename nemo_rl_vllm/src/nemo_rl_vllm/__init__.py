# SPDX-License-Identifier: Apache-2.0
"""The vLLM backend of nemo-rl-core.

Importing this package, `plugin` or `config` loads neither vLLM nor torch; only the worker modules do, inside a
generation worker.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
