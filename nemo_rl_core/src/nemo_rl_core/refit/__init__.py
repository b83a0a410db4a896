# SPDX-License-Identifier: Apache-2.0
"""Moving weights into generation workers, exactly or not at all: torch and the standard library only.

Two classes do it: ``sender.RefitSender`` in train rank 0 and ``receiver.RefitReceiver`` in every generation rank.
Neither needs Ray, ``init_process_group`` or an engine; an address ``host:port`` is all that has to travel between
them beforehand. ``docs/design/refit.md`` says how and why.
"""

__all__: list[str] = []
