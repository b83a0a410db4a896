# SPDX-License-Identifier: Apache-2.0
"""Entry points and their states."""
