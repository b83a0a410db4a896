# SPDX-License-Identifier: Apache-2.0
"""RL post-training whose train side is proven free of the inference engine.

Importing this package loads neither torch, ray nor transformers; import the part that you need.

PYTEST_DONT_REWRITE: core brings a pytest plugin, so pytest would rewrite core's assertions, and warn where the guard has
loaded core before pytest.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
