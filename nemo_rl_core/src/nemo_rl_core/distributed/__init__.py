# SPDX-License-Identifier: Apache-2.0
"""Where Ray lives: clusters, worker groups, shardings and environments."""
