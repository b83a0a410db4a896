# SPDX-License-Identifier: Apache-2.0
"""The proof can fail: one `import vllm` in a train module turns it red, with and without an engine installed."""

import shutil
from pathlib import Path

import pytest

from tests.packaging import proof
from tests.packaging.workshop import Venv, build_wheel

#: The train module that gets the import, and the statement of a method before which the second form puts it.
MODULE = "src/nemo_rl_core/workers/dtensor.py"
FIRST_IMPORT = "import contextlib\n"
IN_TRAIN = "        self._optimizer.zero_grad(set_to_none=True)\n        shares = "
SMUGGLED = {
    "at module level": (FIRST_IMPORT, "import vllm\n" + FIRST_IMPORT),
    "in a function": (IN_TRAIN, "        import vllm\n\n" + IN_TRAIN),
}


@pytest.fixture(scope="module", params=SMUGGLED)
def smuggled(request, sources, core_alone, tmp_path_factory) -> tuple[str, Venv]:
    """An environment whose core has one more import; it is a real wheel, built from a copy of the tree."""
    folder = tmp_path_factory.mktemp("smuggled")
    project = Path(shutil.copytree(sources / "nemo_rl_core", folder / "nemo_rl_core"))
    before, after = SMUGGLED[request.param]
    path = project / MODULE
    assert path.read_text().count(before) == 1, "the statement to hang the import on has moved; choose another"
    path.write_text(path.read_text().replace(before, after))
    wheel = build_wheel(project, folder / "wheels")
    venv = core_alone.clone(folder)
    venv.install("--no-deps", "--reinstall-package", "nemo-rl-core", str(wheel.path))
    return request.param, venv


@pytest.fixture
def fake_engine(smuggled):
    """A `vllm` that imports fine, in the environment for one test: an installed engine must not help."""
    folder = smuggled[1].site_packages / "vllm"
    folder.mkdir()
    (folder / "__init__.py").write_text("__version__ = '0.0.fake'\n")
    yield
    shutil.rmtree(folder)


def test_the_statement_is_found_wherever_it_stands(smuggled: tuple[str, Venv]) -> None:
    """F4, F31: nothing has to run for this."""
    with pytest.raises(AssertionError, match=r"nemo_rl_core\.workers\.dtensor:\d+ imports vllm"):
        proof.no_statement_names_the_engine(smuggled[1])


def test_without_an_engine_importing_every_module_fails_at_module_level_only(smuggled: tuple[str, Venv]) -> None:
    """F31, U6: what this check can't see, the two others do."""
    form, venv = smuggled
    if form == "in a function":
        proof.every_module_imports(venv)
        return
    with pytest.raises(AssertionError, match=r"dtensor\W+ModuleNotFoundError: No module named 'vllm'"):
        proof.every_module_imports(venv)


@pytest.mark.usefixtures("fake_engine")
def test_with_an_engine_installed_the_module_level_import_is_refused_and_named(smuggled: tuple[str, Venv]) -> None:
    """F31: an image with everything in it hides the ImportError; the guard does not."""
    form, venv = smuggled
    if form == "in a function":
        proof.every_module_imports(venv, role="train")
        return
    with pytest.raises(AssertionError, match=r"ForbiddenImportError: import of 'vllm' is refused.*workers/dtensor\.py"):
        proof.every_module_imports(venv, role="train")


@pytest.mark.full
def test_without_an_engine_the_training_fails(smuggled: tuple[str, Venv]) -> None:
    """F31: both forms, since a step calls the function."""
    with pytest.raises(AssertionError, match=r"vllm(.|\n)*workers/dtensor\.py|workers/dtensor\.py(.|\n)*vllm"):
        proof.two_steps_train(smuggled[1])


@pytest.mark.full
@pytest.mark.usefixtures("fake_engine")
def test_with_an_engine_installed_the_training_fails_by_the_guard_that_names_the_culprit(
    smuggled: tuple[str, Venv],
) -> None:
    """F31: a training that would run to its end without the guard."""
    with pytest.raises(AssertionError, match=r"import of 'vllm' is refused: a train process(.|\n)*workers/dtensor\.py"):
        proof.two_steps_train(smuggled[1])
