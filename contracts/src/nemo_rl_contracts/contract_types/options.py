# SPDX-License-Identifier: Apache-2.0
"""import-linter's fields under the types that they have once a contract is made."""

from typing import Any

from importlinter import fields

__all__ = ["flag", "required_text", "required_texts", "text", "texts"]

# import-linter reads the fields from the class and puts plain values on the instance, which no type checker can know;
# hence `Any` here, and the type of the value where a field is declared.


def required_text() -> Any:
    """Make a field for one text that must be given."""
    return fields.StringField()


def text(default: str = "") -> Any:
    """Make a field for one text."""
    return fields.StringField(default=default)


def required_texts() -> Any:
    """Make a field for several texts that must be given."""
    return fields.ListField(subfield=fields.StringField())


def texts(default: tuple[str, ...] = ()) -> Any:
    """Make a field for several texts."""
    return fields.ListField(subfield=fields.StringField(), default=list(default))


def flag(default: bool) -> Any:
    """Make a field for yes or no."""
    return fields.BooleanField(default=default)
