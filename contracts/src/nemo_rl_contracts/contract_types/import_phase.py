# SPDX-License-Identifier: Apache-2.0
"""``import_phase``: some modules must not reach others in the phases listed."""

from collections.abc import Iterable
from pathlib import Path

from grimp import ImportGraph

from nemo_rl_contracts.baseline import Baseline
from nemo_rl_contracts.chains import Chain, ImportMap, covers, find_chains
from nemo_rl_contracts.contract_types.base import (
    FirewallContract,
    is_on,
    read_import_map,
    root_packages,
    select_forbidden,
    select_modules,
)
from nemo_rl_contracts.contract_types.options import flag, required_texts, text, texts
from nemo_rl_contracts.errors import MisconfiguredError
from nemo_rl_contracts.known_names import KnownNames
from nemo_rl_contracts.patterns import AllowList
from nemo_rl_contracts.phases import Phase
from nemo_rl_contracts.violations import Hop, Violation, counted, hops_of

__all__ = ["ImportPhaseContract", "parse_phases"]

_ADVICE = {
    "eager": "Import it inside the function that needs it, or move what both sides share to a module that needs neither.",
    "conditional": "Whether it runs depends on the machine; import it inside the function that needs it.",
    "lazy": "Move the use behind the seam that may know the package, or list it in `allow` with the reason.",
    "typing": "Describe what you need as a Protocol of your own instead of naming the package's type.",
}


class ImportPhaseContract(FirewallContract):
    """Source modules must not reach forbidden modules in the listed phases.

    Options:

    - ``source_modules``: where chains start; each stands for what is below it unless ``as_packages = False``.
    - ``forbidden_modules``: what must not be reached, with what is below it. Of an external package it may be a
      submodule; its name has to be known: installed, declared or locked.
    - ``phases``: phases that count (default ``eager`` and ``conditional``). A chain runs when the latest of its hops does.
    - ``exempt_modules``: source modules from which nothing starts; chains through them count for the others.
    - ``allow``: lines ``importer -> imported  # reason``; one that lets nothing through is an error.
    - ``baseline``: a file with violations that are known; see ``nemo_rl_contracts.baseline``.
    - ``module_distributions``, ``accept_unknown``: see ``KnownNames``.
    - ``import_functions``: further functions that import what their first argument names.
    """

    rule = "import_phase"

    source_modules: list[str] = required_texts()
    forbidden_modules: list[str] = required_texts()
    phases: list[str] = texts(("eager", "conditional"))
    as_packages: bool = flag(True)
    exempt_modules: list[str] = texts()
    allow: list[str] = texts()
    baseline: str = text()
    module_distributions: list[str] = texts()
    accept_unknown: list[str] = texts()
    import_functions: list[str] = texts()

    def examine(self, graph: ImportGraph) -> list[Violation]:
        """Return one violation for each cause; see the base class.

        Args:
            graph: The import graph.
        """
        phases = parse_phases(self.phases)
        if Phase.TYPING in phases and is_on(self.session_options, "exclude_type_checking_imports"):
            raise MisconfiguredError(
                "phases lists typing, and exclude_type_checking_imports = True at the top of the configuration leaves such "
                "imports out; take one of the two out"
            )
        roots = root_packages(self.session_options)
        imports = read_import_map(graph, self.session_options, import_functions=self.import_functions)
        sources = self._sources(imports)
        known = KnownNames(
            Path.cwd(),
            roots=roots,
            module_distributions=self.module_distributions,
            accept_unknown=self.accept_unknown,
        )
        forbidden = select_forbidden(self.forbidden_modules, imports.modules, roots=roots, known=known)
        if all(any(covers(name, source) for name in forbidden) for source in sources):
            raise MisconfiguredError("forbidden_modules covers every source module, so the contract checks nothing")
        allow = AllowList(self.allow, internal=roots)
        chains = find_chains(imports, sources=sources, forbidden=forbidden, phases=phases, is_allowed=allow.covers)
        imports.reader.save()
        if useless := [*allow.unused(), *known.unused()]:
            raise MisconfiguredError("\n".join(useless))
        for note in known.notes():
            self.note(note)
        violations = [_violation(chain, imports, sources) for chain in chains]
        if self.baseline:
            violations, known_ones = Baseline.read(Path(self.baseline)).settle(self.name, violations)
            self.note(f"{counted(known_ones, 'known violation')} in {self.baseline}", warn=True)
        return violations

    def _sources(self, imports: ImportMap) -> set[str]:
        """Return the modules where chains start."""

        def select(names: list[str], option: str) -> set[str]:
            return set(select_modules(names, imports.modules, option=option, as_packages=self.as_packages))

        sources = select(self.source_modules, "source_modules")
        if not sources:
            raise MisconfiguredError("source_modules is empty, so nothing would be checked")
        for name in self.exempt_modules:
            if sources.isdisjoint(select([name], "exempt_modules")):
                raise MisconfiguredError(f"exempt_modules lists {name!r}, which is no source module; take it out")
        sources -= select(self.exempt_modules, "exempt_modules")
        if not sources:
            raise MisconfiguredError("exempt_modules takes every source module away, so the contract checks nothing")
        return sources


def parse_phases(names: Iterable[str]) -> list[Phase]:
    """Return phases by name.

    Raises:
        MisconfiguredError: If there is none, or a name is no phase.
    """
    try:
        phases = [Phase(name.strip()) for name in names]
    except ValueError:
        raise MisconfiguredError(f"a phase is one of {', '.join(Phase)}; got {', '.join(names)}") from None
    if not phases:
        raise MisconfiguredError(f"phases is empty, so nothing would count; it takes {', '.join(Phase)}")
    return phases


def _violation(chain: Chain, imports: ImportMap, sources: set[str]) -> Violation:
    hops = hops_of(chain, imports)
    if chain.source not in sources:
        # A package above the sources: it runs when any of them is imported.
        below = min(source for source in sources if covers(chain.source, source))
        hops = (
            Hop(
                importer=below,
                imported=chain.source,
                phase=Phase.EAGER.value,
                note="runs as a package initialiser",
            ),
            *hops,
        )
    last = chain.edges[-1]
    where = "is imported" if len(chain.edges) == 1 else f"is reached from {chain.source}, by {last.importer}"
    who = f" by {last.importer}" if len(chain.edges) == 1 else ""
    return Violation(
        rule=ImportPhaseContract.rule,
        message=f"{chain.target} {where}{who} ({chain.phase}{', guarded' if last.guarded else ''})",
        file=imports.path(last.importer),
        line=last.lineno,
        hops=hops,
        key=chain.key,
        advice=_ADVICE[chain.phase],
    )
