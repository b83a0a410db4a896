# SPDX-License-Identifier: Apache-2.0
"""Train and generation workers: plain classes that know torch and transformers, and nothing of Ray."""
