# SPDX-License-Identifier: Apache-2.0
"""What is kept between runs makes them faster and never different."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_contracts.sources import CACHE_FOLDER, Reader, find_sources
from tests.contracts.repository import Repository
from tests.contracts.test_check_command import RULE, SESSION


def read(repository: Repository, module: str = "pkg.a") -> list[str]:
    reader = Reader(find_sources("pkg")[0], cache_folder=repository.root / CACHE_FOLDER)
    found = [one.module for one in reader.imports(module)]
    reader.save()
    return found


def cache_file(repository: Repository) -> Path:
    (path,) = (repository.root / CACHE_FOLDER).glob("*.json")
    return path


def test_an_edit_of_the_same_size_and_time_is_seen(repository: Repository) -> None:
    """The content is the key."""
    repository.package({"a.py": "import json\n"})
    file = repository.root / "pkg" / "a.py"
    before = file.stat()
    assert read(repository) == ["json"]
    file.write_text("import vllm\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert read(repository) == ["vllm"]


def test_the_same_text_in_another_package_has_its_own_answer(repository: Repository) -> None:
    repository.package(
        {"a.py": "from . import x\n", "b/a.py": "from . import x\n", "c/__init__.py": "from . import x\n"}
    )
    assert [read(repository, module) for module in ("pkg.a", "pkg.b.a", "pkg.c")] == [["pkg"], ["pkg.b"], ["pkg.c"]]
    assert [read(repository, module) for module in ("pkg.a", "pkg.b.a", "pkg.c")] == [["pkg"], ["pkg.b"], ["pkg.c"]]


def test_what_is_kept_is_used(repository: Repository) -> None:
    """Shown by an answer that only the file can give."""
    repository.package({"a.py": "import json\n"})
    read(repository)
    path = cache_file(repository)
    path.write_text(path.read_text().replace('"json"', '"from_the_file"'))
    assert read(repository) == ["from_the_file"]


def test_what_another_release_found_is_not_used_and_goes(repository: Repository) -> None:
    """The code that reads files is a part of the file's name."""
    repository.package({"a.py": "import json\n"})
    read(repository)
    path = cache_file(repository)
    other = path.with_name(path.name.replace(path.stem[-16:], "0" * 16))
    other.write_text(path.read_text().replace('"json"', '"from_the_file"'))
    path.unlink()
    assert read(repository) == ["json"]
    assert cache_file(repository) == path


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "\x00", "[" * 100_000, '{"key": 1}', b"\xff\xfe", "EACH:null", "EACH:[1]", 'EACH:[["json"]]',
     'EACH:[["json", [], 1, "soon", "statement", false]]', 'EACH:[["json", [], "x", "eager", "statement", false]]',
     'EACH:[["json", 7, 1, "eager", "statement", false]]'],
)  # fmt: skip
def test_a_spoiled_file_does_no_harm(text: str | bytes, repository: Repository) -> None:
    repository.package({"a.py": "import json\n"})
    read(repository)
    path = cache_file(repository)
    if isinstance(text, str) and text.startswith("EACH:"):
        text = json.dumps(dict.fromkeys(json.loads(path.read_text()), json.loads(text.removeprefix("EACH:"))))
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert read(repository) == ["json"]
    assert read(repository) == ["json"]


@pytest.mark.parametrize("obstacle", ["a file", "a folder in its place", "read-only"])
def test_a_folder_that_cannot_be_written_does_no_harm(obstacle: str, repository: Repository) -> None:
    repository.package({"a.py": "import json\n"})
    folder = repository.root / CACHE_FOLDER
    if obstacle == "a file":
        folder.touch()
    elif obstacle == "read-only":
        folder.mkdir(mode=0o500)
    else:
        read(repository)
        path = cache_file(repository)
        path.unlink()
        path.mkdir()
    assert read(repository) == ["json"]
    assert not folder.is_dir() or not list(folder.glob("*.tmp*"))


def test_the_folder_keeps_itself_out_of_git(repository: Repository) -> None:
    repository.package({"a.py": ""})
    read(repository)
    assert (repository.root / CACHE_FOLDER / ".gitignore").read_text() == "*\n"


def test_processes_beside_each_other_spoil_nothing(repository: Repository) -> None:
    repository.package({f"m{n}.py": f"import json\nimport x{n}\n" for n in range(200)})
    code = (
        "from pathlib import Path; from nemo_rl_contracts.sources import *\n"
        "for _ in range(5):\n"
        f"    for old in Path({CACHE_FOLDER!r}).glob('*.json'): old.unlink(missing_ok=True)\n"
        f"    reader = Reader(find_sources('pkg')[0], cache_folder=Path({CACHE_FOLDER!r}))\n"
        "    for module in reader.files: reader.imports(module)\n"
        "    reader.save()\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code], cwd=repository.root) for _ in range(2)]
    assert [process.wait(timeout=60) for process in running] == [0, 0]
    assert len(json.loads(cache_file(repository).read_text())) == 201
    assert read(repository, "pkg.m7") == ["json", "x7"]


def test_a_file_that_changes_behind_its_time_is_seen(repository: Repository, command) -> None:
    """grimp's cache goes by times; a checkout with fixed times and a restored cache would pass for clean."""
    repository.package({"a.py": "import json\n"}).write({".importlinter": SESSION + RULE})
    path = repository.root / "pkg" / "a.py"
    os.utime(path, (1_500_000_000, 1_500_000_000))
    assert command("check").code == 0
    path.write_text("import vllm\n")
    os.utime(path, (1_500_000_000, 1_500_000_000))
    assert command("check").code == 1


def test_a_cache_of_the_linter_that_nobody_vouches_for_is_not_used(repository: Repository, command) -> None:
    repository.package({"a.py": "import json\n"}).write({".importlinter": SESSION + RULE})
    path = repository.root / "pkg" / "a.py"
    os.utime(path, (1_500_000_000, 1_500_000_000))
    assert command("check").code == 0
    (repository.root / ".nemo_rl_contracts_cache" / "contents.json").unlink()
    path.write_text("import vllm\n")
    os.utime(path, (1_500_000_000, 1_500_000_000))
    assert command("check").code == 1
