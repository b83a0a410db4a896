# SPDX-License-Identifier: Apache-2.0
"""What all sections of the config share."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["IntList", "RawMapping", "Section", "StrList"]


class Section(BaseModel):
    """A part of the config: strict types, no unknown keys, frozen.

    Strict means that ``"3"`` is no number and ``1`` is no truth value; an integer may stand for a float.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


#: A YAML list of integers, kept as a tuple; the elements stay strict.
IntList = Annotated[tuple[int, ...], Field(strict=False)]
#: A YAML list of strings, kept as a tuple; the elements stay strict.
StrList = Annotated[tuple[str, ...], Field(strict=False)]
#: A mapping that is handed on as it stands.
RawMapping = dict[str, Any]
