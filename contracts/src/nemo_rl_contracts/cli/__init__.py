# SPDX-License-Identifier: Apache-2.0
"""The command `nemo-rl-contracts`: parse, then call."""
