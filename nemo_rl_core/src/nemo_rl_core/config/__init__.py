# SPDX-License-Identifier: Apache-2.0
"""Config schemas, YAML with inheritance and key=value overrides."""
