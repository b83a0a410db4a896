# SPDX-License-Identifier: Apache-2.0
"""grimp and our own reading of the same files agree, but for what grimp leaves out by design."""

import grimp
import pytest

from nemo_rl_contracts.chains import ImportMap, covers
from nemo_rl_contracts.phases import Form
from nemo_rl_contracts.sources import Reader, find_sources

#: Ours, and public packages that are installed wherever these tests run.
PACKAGES = ["nemo_rl_core", "nemo_rl_vllm", "nemo_rl_contracts", "rich", "packaging", "jinja2", "hypothesis"]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_edge_of_grimp_is_found_and_only_known_kinds_are_added(package: str) -> None:
    """F1: what is added runs as an initialiser, or is named to a function that imports."""
    graph = grimp.build_graph(package, include_external_packages=True, cache_dir=None)
    imports = ImportMap(graph, Reader(find_sources(package)[0]))
    outside = {name for name in graph.modules if graph.is_module_squashed(name)}
    missing, added = [], []
    for module in sorted(imports.modules):
        theirs = graph.find_modules_directly_imported_by(module) - {
            module
        }  # `from . import attribute` in an initialiser
        edges = imports.edges(module)
        ours = {
            edge.imported
            if edge.imported in imports.modules
            else next((o for o in outside if covers(o, edge.imported)), "")
            for edge in edges
        }
        missing += [(module, name) for name in theirs - ours]
        added += [
            edge
            for edge in edges
            if not any(edge.imported == name or (name in outside and covers(name, edge.imported)) for name in theirs)
        ]
    assert missing == []
    assert [edge for edge in added if not edge.initialiser and edge.form is not Form.DYNAMIC] == []
    assert len(imports.modules) >= 3
