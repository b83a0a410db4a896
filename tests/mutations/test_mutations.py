# SPDX-License-Identifier: Apache-2.0
"""Every guard, contract and property can fail: each patch takes one away, and what it names turns red.

The full tier runs the patches; a patch that no longer applies fails at once, in the fast tier.
"""

from pathlib import Path

import pytest

from tests.mutations.harness import Check, all_patches, apply, copy_tree, imported_from, noticed, read, run

PATCHES = all_patches()
NAMES = [path.stem for path in PATCHES]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """A copy of the tree that no test changes."""
    return copy_tree(tmp_path_factory.mktemp("pristine"))


def test_the_copys_own_code_is_what_a_check_imports(pristine: Path) -> None:
    """Otherwise every mutation would survive, or none would mean anything."""
    files = imported_from(pristine)
    assert len(files) == 3
    assert [str(file) for file in files if not file.is_relative_to(pristine)] == []


@pytest.mark.parametrize("path", PATCHES, ids=NAMES)
def test_a_patch_says_what_it_guards_and_still_applies(pristine: Path, path: Path) -> None:
    mutation = read(path)
    done = apply(path, pristine, dry_run=True)
    assert done.returncode == 0, f"{path.name} no longer applies; make it anew for the code as it is:\n{done.stderr}"
    for target in mutation.red.targets if mutation.red.tool == "pytest" else ():
        assert (pristine / target.partition("::")[0]).exists(), f"{path.name} names {target}, which is not there"


def test_there_is_a_mutation_for_every_kind_of_promise() -> None:
    kinds = {name.partition("_")[0] for name in NAMES}
    assert kinds >= {
        *("config", "contract", "distributed", "fp8", "guard", "objectives", "policy"),
        *("packaging", "phases", "plugins", "refit", "rollout", "sampling", "violation", "workers"),
    }


def test_no_two_patches_are_the_same_mutation() -> None:
    bodies = [path.read_text().partition("\n--- ")[2] for path in PATCHES]
    assert len(set(bodies)) == len(bodies)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tool", ["pytest", "lint-imports"])
def test_without_a_mutation_everything_that_they_name_is_green(pristine: Path, tool: str) -> None:
    """Control: a red below comes from the patch."""
    targets = {target for path in PATCHES if (red := read(path).red).tool == tool for target in red.targets}
    done = run(Check(tool=tool, targets=tuple(sorted(targets))), pristine, limit_s=1700.0, all_failures=True)
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.full
@pytest.mark.parametrize("path", PATCHES, ids=NAMES)
def test_the_mutation_turns_its_check_red(tmp_path: Path, path: Path) -> None:
    mutation = read(path)
    tree = copy_tree(tmp_path)
    done = apply(path, tree)
    assert done.returncode == 0, done.stderr
    done = run(mutation.red, tree)
    assert noticed(mutation.red, done), (
        f"nothing noticed that this is gone: {mutation.guards} (exit code {done.returncode})\n{done.stdout[-3000:]}"
    )
