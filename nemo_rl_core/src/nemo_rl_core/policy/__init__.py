# SPDX-License-Identifier: Apache-2.0
"""The driver's handles on train and generation workers."""
