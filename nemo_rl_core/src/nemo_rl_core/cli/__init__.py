# SPDX-License-Identifier: Apache-2.0
"""The command line: parse, then import, then call.

`app.main` is what ``nemo-rl`` and ``python -m nemo_rl_core`` run; each command has a module of its own.
"""
