# SPDX-License-Identifier: Apache-2.0
"""Contract types for import-linter, one a module; a configuration names them as attributes of this package."""

from nemo_rl_contracts.contract_types.coverage import CoverageContract
from nemo_rl_contracts.contract_types.declared_dependencies import DeclaredDependenciesContract
from nemo_rl_contracts.contract_types.import_phase import ImportPhaseContract
from nemo_rl_contracts.contract_types.lock_closure import LockClosureContract
from nemo_rl_contracts.contract_types.string_imports import StringImportsContract

__all__ = [
    "CoverageContract",
    "DeclaredDependenciesContract",
    "ImportPhaseContract",
    "LockClosureContract",
    "StringImportsContract",
]
