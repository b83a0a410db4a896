# SPDX-License-Identifier: Apache-2.0
"""Console, metrics files and timers."""
