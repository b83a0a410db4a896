# SPDX-License-Identifier: Apache-2.0
"""Prompts, tasks and rewards, and sampling through the Generation protocol."""
