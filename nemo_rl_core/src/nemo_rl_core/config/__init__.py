# SPDX-License-Identifier: Apache-2.0
"""Config schemas, YAML with inheritance and key=value overrides.

`load.load_config` reads a file, `run.RunConfig` is what it returns, `load.dump_yaml` writes it back. A name is imported
from the module that defines it.
"""
