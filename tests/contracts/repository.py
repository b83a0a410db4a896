# SPDX-License-Identifier: Apache-2.0
"""A small repository to check: files, a configuration, and contracts run in this process or by `lint-imports`."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import grimp
from importlinter import ContractCheck

from nemo_rl_contracts.contract_types.base import FirewallContract
from nemo_rl_contracts.contract_types.coverage import CoverageContract
from nemo_rl_contracts.contract_types.declared_dependencies import DeclaredDependenciesContract
from nemo_rl_contracts.contract_types.import_phase import ImportPhaseContract
from nemo_rl_contracts.contract_types.string_imports import StringImportsContract

TYPES: Mapping[str, type[FirewallContract]] = {
    "coverage": CoverageContract,
    "declared_dependencies": DeclaredDependenciesContract,
    "import_phase": ImportPhaseContract,
    "string_imports": StringImportsContract,
}


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A folder that is the working directory and on the import path."""

    root: Path

    def write(self, files: Mapping[str, str | bytes]) -> "Repository":
        """Write files; a folder of Python files gets an initialiser where the mapping names none."""
        for name, content in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else dedent(content).encode())
        return self

    def package(self, files: Mapping[str, str | bytes], name: str = "pkg") -> "Repository":
        """Write a package; each folder in it gets an `__init__.py`."""
        self.write({f"{name}/{file}": content for file, content in files.items()})
        for folder in {self.root / name, *(path.parent for path in (self.root / name).rglob("*.py"))}:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").touch()
        return self

    def check(
        self, kind: str, *, roots: tuple[str, ...] = ("pkg",), typing: bool = True, **options: Any
    ) -> ContractCheck:
        """Check one contract in this process.

        Args:
            kind: Its type.
            roots: The root packages.
            typing: Whether the graph holds imports for type checkers.
            options: The contract's own.
        """
        graph = grimp.build_graph(
            *roots, include_external_packages=True, exclude_type_checking_imports=not typing, cache_dir=None
        )
        session = {"root_packages": list(roots), "include_external_packages": "True"}
        session |= {} if typing else {"exclude_type_checking_imports": "True"}
        contract = TYPES[kind](
            name="the rule", session_options=session, contract_options={"name": "the rule", **options}
        )
        return contract.check(graph, verbose=False)

    def messages(self, kind: str, **options: Any) -> list[str]:
        """Return the messages of the violations; the contract must be able to judge."""
        metadata = self.check(kind, **options).metadata
        assert not metadata["problems"], metadata["problems"]
        assert not metadata["uncovered"], metadata["uncovered"]
        return [violation.message for violation in metadata["violations"]]

    def problems(self, kind: str, **options: Any) -> str:
        """Return why a contract can't judge; it must be broken then."""
        check = self.check(kind, **options)
        assert not check.kept
        return "\n".join(check.metadata["problems"])

    def run(self, *arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
        """Run a module in the repository's folder."""
        return subprocess.run(
            [python, *arguments], cwd=self.root, capture_output=True, text=True, timeout=120, check=False
        )
