# SPDX-License-Identifier: Apache-2.0
"""Fakes and strategies for tests of this project and of adapters by others."""
