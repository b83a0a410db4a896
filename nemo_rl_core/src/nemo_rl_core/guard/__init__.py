# SPDX-License-Identifier: Apache-2.0
"""The runtime guard and its ledger: standard library only."""
