# SPDX-License-Identifier: Apache-2.0
"""Test suites of somebody else's, run by a pytest of their own."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from tests.core.guard.conftest import Sandbox, sandbox

__all__ = ["Suite", "sandbox", "suite"]

PLUGIN = "nemo_rl_core.testing.forbid_imports"

#: A package that can be loaded, has something below it, and says that it was loaded; and one that imports it.
PACKAGES = {
    "heavy/__init__.py": "class Frame:\n    pass\n",
    "heavy/io.py": "VALUE = 1\n",
    "other.py": "VALUE = 1\n",
    "careless.py": "\nimport heavy\n",
    "swallowing.py": "try:\n    import heavy\nexcept ImportError:\n    heavy = None\n",
}
LIBRARIES = {"library.py": "try:\n    import heavy\nexcept ImportError:\n    heavy = None\n"}


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a run of pytest said.

    Attributes:
        returncode: 0 passed, 1 failed, 2 not collected, 4 usage error.
        text: Standard output and error.
    """

    returncode: int
    text: str

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of the last line, without the seconds: ``{"passed": 2, "errors": 1}``."""
        last = [line for line in self.text.splitlines() if re.search(r" in [\d.]+s", line)][-1]
        return {what: int(number) for number, what in re.findall(r"(\d+) ([a-z]+)", last.partition(" in ")[0])}


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A folder of tests, the packages that they import, and pytest."""

    box: Sandbox

    def run(
        self,
        files: Mapping[str, str],
        *arguments: str,
        plugin: tuple[str, ...] = ("-p", PLUGIN),
        env: Mapping[str, str] | None = None,
    ) -> Report:
        """Write the files and run pytest on them, with this plugin and no other that is installed."""
        self.box.write(files, under=self.box.root / "suite")
        command = ("-m", "pytest", "-ra", "-p", "no:cacheprovider", *plugin, *arguments, str(self.box.root / "suite"))
        alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "COLUMNS": "250", **(env or {})}
        done = self.box.run(arguments=command, env=alone)
        return Report(returncode=done.returncode, text=done.stdout + done.stderr)


@pytest.fixture
def suite(sandbox: Sandbox) -> Suite:
    sandbox.write(PACKAGES)
    sandbox.write(LIBRARIES, under=sandbox.site)
    return Suite(box=sandbox)
