# SPDX-License-Identifier: Apache-2.0
"""`string_imports`: names in a text that a function imports, and the same names as data."""

import pytest

from tests.contracts.repository import Repository

RULE = {"source_modules": ["pkg"], "forbidden_modules": ["vllm", "pkg.adapter"], "accept_unknown": ["vllm"]}


@pytest.fixture
def repository(repository: Repository) -> Repository:
    return repository.package({"adapter.py": ""})


def test_the_name_as_data_is_legal(repository: Repository) -> None:
    """The list of a guard, a hint for pip, a probe and a comment import nothing."""
    repository.package(
        {
            "guard.py": "FORBIDDEN = ('vllm', 'pkg.adapter')\nHINT = 'pip install vllm'\n",
            "probe.py": "from importlib.util import find_spec\nthere = find_spec('vllm')\n",
            "log.py": "import importlib\nprint('vllm')\nlog = {'vllm': importlib.import_module('json')}\n",
            "words.py": "# __import__('vllm')\n'''exec('import vllm')'''\n",
        }
    )
    assert repository.messages("string_imports", **RULE) == []


@pytest.mark.parametrize(
    ("code", "phase"),
    [
        ("import importlib\nimportlib.import_module('vllm')\n", "eager"),
        ("def f():\n    return __import__('vllm.config')\n", "lazy"),
        ("import importlib as i\nif x:\n    i.import_module('vllm')\n", "conditional"),
        ("def f():\n    exec('from vllm import LLM')\n", "lazy"),
        ("import typing\nif typing.TYPE_CHECKING:\n    __import__('vllm')\n", "typing"),
        ("f = lambda: __import__(f'vllm.{x}')\n", "lazy"),
        ("import pkgutil\npkgutil.resolve_name('pkg.adapter:Worker')\n", "eager"),
        ("import importlib\nimportlib.import_module('.adapter', __package__)\n", "eager"),
    ],
)
def test_a_text_given_to_a_function_that_imports_counts_wherever_it_runs(code, phase, repository: Repository) -> None:
    repository.package({"a.py": code, "adapter.py": ""})
    (message,) = repository.messages("string_imports", **RULE)
    assert message.startswith("pkg.a imports ")
    assert message.endswith(f"by a string ({phase})")


def test_a_statement_is_the_business_of_another_contract(repository: Repository) -> None:
    repository.package({"a.py": "import vllm\nimport pkg.adapter\n__import__('json')\n", "adapter.py": ""})
    assert repository.messages("string_imports", **RULE) == []


def test_functions_of_ones_own_are_named_in_the_options(repository: Repository) -> None:
    repository.package(
        {
            "load.py": "def by_name(name): ...\n",
            "a.py": "from .load import by_name as get\nget('vllm')\n",
            "b.py": "from pkg import load\nload.by_name(name='vllm')\n",
        }
    )
    assert repository.messages("string_imports", **RULE) == []
    found = repository.messages("string_imports", import_functions=["pkg.load.by_name"], **RULE)
    assert [message.split()[0] for message in found] == ["pkg.a", "pkg.b"]


@pytest.mark.parametrize(
    "function", ["pkg.laod.by_name", "pkg.load.by_nmae", "hydra.utils.get_clas", "by_name", "pkg.load."]
)
@pytest.mark.parametrize("kind", ["string_imports", "import_phase"])
def test_a_function_that_nobody_defines_or_calls_is_refused(kind: str, function: str, repository: Repository) -> None:
    """F8: a typing error there would switch the rule off."""
    repository.package({"load.py": "def by_name(name): ...\n", "a.py": "from hydra.utils import get_class\n"})
    rule = {"source_modules": ["pkg"], "forbidden_modules": ["json"]}
    assert repository.messages(kind, import_functions=["pkg.load.by_name", "hydra.utils.get_class"], **rule) == []
    assert f"got '{function}'" in (said := repository.problems(kind, import_functions=[function], **rule)) or (
        f"'{function}', which no file under check defines or calls" in said
    )


def test_an_allowed_call_has_a_reason_and_is_of_use(repository: Repository) -> None:
    repository.package({"a.py": "__import__('vllm.x')\n"})
    assert repository.messages("string_imports", allow=["pkg.a -> vllm  # the launcher"], **RULE) == []
    assert "says why" in repository.problems("string_imports", allow=["pkg.a -> vllm"], **RULE)
    allow = ["pkg.a -> vllm  # the launcher", "pkg.b -> vllm  # gone"]
    assert "'pkg.b -> vllm' of allow lets nothing through" in repository.problems("string_imports", allow=allow, **RULE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"forbidden_modules": ["tochr"]}, "no module 'tochr' is installed here"),
        ({"forbidden_modules": ["json  # engine"]}, "takes names of modules; got 'json  # engine'"),
        ({"forbidden_modules": ["pkg.adaptor"]}, "forbidden_modules names 'pkg.adaptor'"),
        ({"accept_unknown": ["other"]}, "accept_unknown lists 'other', which the contract does not name"),
        ({"module_distributions": ["other = x"]}, "maps 'other', which the contract does not name"),
    ],
)
def test_a_name_that_is_none_is_refused(options, words: str, repository: Repository) -> None:
    """F8: a typing error would forbid nothing."""
    rule = {"source_modules": ["pkg"], "forbidden_modules": ["json"]}
    assert repository.messages("string_imports", **rule) == []
    assert words in repository.problems("string_imports", **{**rule, **options})


def test_a_name_that_nobody_could_look_up_is_noted(repository: Repository) -> None:
    repository.write({"pyproject.toml": '[project]\nname = "p"\ndependencies = ["flashinfer-python"]\n'})
    rule = {"source_modules": ["pkg"], "forbidden_modules": ["flashinfer"]}
    mapped = {"module_distributions": ["flashinfer = flashinfer-python"]}
    (note,) = repository.check("string_imports", **rule, **mapped).metadata["notes"]
    assert note.startswith("not installed here")
    assert note.endswith("vouches for flashinfer")
