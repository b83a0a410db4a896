# SPDX-License-Identifier: Apache-2.0
"""Losses, advantages and KL estimators: pure functions of tensors."""
