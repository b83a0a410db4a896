# SPDX-License-Identifier: Apache-2.0
"""A generation backend whose model is one table: the next token depends on the last one alone."""
