# SPDX-License-Identifier: Apache-2.0
"""The seams between the parts, as Protocols and plain dataclasses; torch is not imported at run time.

A name is imported from the module that defines it: `generation` for requests, completions and backends, `policy` for
the driver's two handles.
"""
