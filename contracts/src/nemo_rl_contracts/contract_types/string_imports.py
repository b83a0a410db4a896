# SPDX-License-Identifier: Apache-2.0
"""``string_imports``: no module is named in a text that is given to a function that imports."""

from pathlib import Path

from grimp import ImportGraph

from nemo_rl_contracts.chains import Chain, Edge, ImportMap, covers
from nemo_rl_contracts.contract_types.base import (
    FirewallContract,
    read_import_map,
    root_packages,
    select_forbidden,
    select_modules,
)
from nemo_rl_contracts.contract_types.options import required_texts, texts
from nemo_rl_contracts.errors import MisconfiguredError
from nemo_rl_contracts.known_names import KnownNames
from nemo_rl_contracts.patterns import AllowList
from nemo_rl_contracts.phases import Form
from nemo_rl_contracts.violations import Violation, hops_of

__all__ = ["StringImportsContract"]


class StringImportsContract(FirewallContract):
    """A forbidden module must not be named in a literal that a function imports.

    The same name as data is fine: a list of what is forbidden, a hint what to install. Whether the call stands in a
    function makes no difference: such a call is how a module is reached past every linter.

    Options:

    - ``source_modules``: modules that are read, each with those below it.
    - ``forbidden_modules``: names, each with what is below it; a name has to be known, as for ``import_phase``.
    - ``import_functions``: further functions that import what their first argument names.
    - ``allow``: lines ``importer -> imported  # reason``; one that lets nothing through is an error.
    - ``module_distributions``, ``accept_unknown``: see ``KnownNames``.
    """

    rule = "string_imports"

    source_modules: list[str] = required_texts()
    forbidden_modules: list[str] = required_texts()
    import_functions: list[str] = texts()
    allow: list[str] = texts()
    module_distributions: list[str] = texts()
    accept_unknown: list[str] = texts()

    def examine(self, graph: ImportGraph) -> list[Violation]:
        """Return one violation for each call; see the base class.

        Args:
            graph: The import graph.
        """
        roots = root_packages(self.session_options)
        imports = read_import_map(graph, self.session_options, import_functions=self.import_functions)
        sources = select_modules(self.source_modules, imports.modules, option="source_modules")
        if not sources:
            raise MisconfiguredError("source_modules is empty, so nothing would be checked")
        known = KnownNames(
            Path.cwd(),
            roots=roots,
            module_distributions=self.module_distributions,
            accept_unknown=self.accept_unknown,
        )
        forbidden = select_forbidden(self.forbidden_modules, imports.modules, roots=roots, known=known)
        allow = AllowList(self.allow, internal=roots)
        violations = []
        for module in sources:
            if module not in imports.reader.files or not imports.reader.marks(module).may_call:
                continue
            for edge in imports.edges(module):
                if edge.form is not Form.DYNAMIC or edge.initialiser:
                    continue
                if not any(covers(name, edge.imported) for name in forbidden):
                    continue
                if not allow.covers(edge, edge.imported):
                    violations.append(_violation(edge, imports))
        imports.reader.save()
        if useless := [*allow.unused(), *known.unused()]:
            raise MisconfiguredError("\n".join(useless))
        for text in known.notes():
            self.note(text)
        return violations


def _violation(edge: Edge, imports: ImportMap) -> Violation:
    return Violation(
        rule=StringImportsContract.rule,
        message=f"{edge.importer} imports {edge.imported} by a string ({edge.phase})",
        file=imports.path(edge.importer),
        line=edge.lineno,
        hops=hops_of(Chain(edges=(edge,), target=edge.imported), imports),
        key=f"{edge.importer} -> {edge.imported}",
        advice="Let it be found by an entry point, or let the configuration name it.",
    )
