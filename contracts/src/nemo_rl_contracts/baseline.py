# SPDX-License-Identifier: Apache-2.0
"""Known violations of a repository that is not clean yet. The list is written once and may only shrink.

A violation is kept by its key, which holds no line numbers. An entry that is no longer true is an error, so that what
was repaired stays repaired; no command adds one to a list that exists. Who wants to add one edits the file by hand,
where a reviewer sees it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nemo_rl_contracts.errors import MisconfiguredError
from nemo_rl_contracts.violations import Violation

__all__ = ["Baseline"]

_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The known violations in one file.

    Attributes:
        path: The file.
        sections: Name of a contract or report, to the keys of its known violations.
    """

    path: Path
    sections: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Baseline":
        """Read a file.

        Raises:
            MisconfiguredError: If it is not there, or no baseline.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise MisconfiguredError(f"the baseline {path} is not there; `nemo-rl-contracts init` writes one") from None
        except (OSError, ValueError) as error:
            raise MisconfiguredError(f"the baseline {path} can't be read: {error}") from error
        if not isinstance(data, dict) or data.get("schema") != _SCHEMA or not _is_sections(data.get("known")):
            raise MisconfiguredError(f"{path} is no baseline of schema {_SCHEMA}: it needs 'schema' and 'known'")
        return cls(path=path, sections={name: tuple(keys) for name, keys in data["known"].items()})

    def settle(self, section: str, violations: Sequence[Violation]) -> tuple[list[Violation], int]:
        """Take the known violations out.

        Args:
            section: Name of the contract.
            violations: What it found.

        Returns:
            The new violations, and the number of the known ones.

        Raises:
            MisconfiguredError: If the file has no such section, or an entry that is no longer true.
        """
        known = self._known(section)
        found = {violation.key for violation in violations}
        gone = [key for key in known if key not in found]
        if gone:
            lines = [f"{key!r} stands in {self.path} and is no longer true; take it out" for key in gone]
            raise MisconfiguredError("\n".join([*lines, "`nemo-rl-contracts check --shrink-baseline` does it"]))
        return [violation for violation in violations if violation.key not in known], len(known)

    def shrunk(self, section: str, violations: Iterable[Violation]) -> "Baseline":
        """Return it without the entries of a section that are no longer true; nothing is ever added.

        Raises:
            MisconfiguredError: If the file has no such section.
        """
        found = {violation.key for violation in violations}
        keys = tuple(key for key in self._known(section) if key in found)
        return Baseline(path=self.path, sections={**self.sections, section: keys})

    def _known(self, section: str) -> tuple[str, ...]:
        if section not in self.sections:
            raise MisconfiguredError(
                f"the baseline {self.path} has no section {section!r}; it has {', '.join(self.sections) or 'none'}"
            )
        return self.sections[section]

    def with_section(self, section: str, violations: Iterable[Violation]) -> "Baseline":
        """Return it with a new section.

        Raises:
            MisconfiguredError: If the section is there already: then it may only shrink.
        """
        if section in self.sections:
            raise MisconfiguredError(
                f"the baseline {self.path} has a section {section!r} already, which may only shrink; to add an entry, "
                f"edit the file by hand, where a reviewer sees it"
            )
        keys = tuple(sorted({violation.key for violation in violations}))
        return Baseline(path=self.path, sections={**self.sections, section: keys})

    def write(self) -> None:
        """Write the file, in an order that diffs well.

        Raises:
            MisconfiguredError: If it can't be written.
        """
        known = {name: sorted(keys) for name, keys in sorted(self.sections.items())}
        text = json.dumps({"schema": _SCHEMA, "known": known}, indent=2, ensure_ascii=False) + "\n"
        aside = self.path.with_name(self.path.name + ".tmp")
        try:
            aside.write_text(text, encoding="utf-8")
            aside.replace(self.path)
        except OSError as error:
            raise MisconfiguredError(f"the baseline {self.path} can't be written: {error}") from error


def _is_sections(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(keys, list) and all(isinstance(key, str) for key in keys) for keys in value.values()
    )
