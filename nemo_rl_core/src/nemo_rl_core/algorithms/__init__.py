# SPDX-License-Identifier: Apache-2.0
"""The training loops, as prose."""
