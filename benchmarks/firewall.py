# SPDX-License-Identifier: Apache-2.0
"""What the firewall costs: checking a tree beside `lint-imports`, installing the checker, and the guard in a process.

    uv run python benchmarks/firewall.py            # everything, about five minutes
    uv run python benchmarks/firewall.py check      # the ratios on 300 files and 127,000 lines
    uv run python benchmarks/firewall.py scale      # seconds at 300 to 10,000 files
    uv run python benchmarks/firewall.py install    # size of what `pip install nemo-rl-contracts` brings
    uv run python benchmarks/firewall.py guard      # nanoseconds for an import, with and without the guard

One JSON line a figure. Two commands are compared in one run, in turn, and the ratio is that of their medians.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

BIN = Path(sys.executable).parent
CACHES = (".import_linter_cache", ".nemo_rl_contracts_cache")
NUM_FILES = 300
NUM_LINES = 127_000

#: The neighbour gets its easiest case: a name that nobody imports. Ours is imported in functions of every tenth module,
#: and has to be found and told apart.
PLAIN = """
[importlinter]
root_package = generated
include_external_packages = True

[importlinter:contract:plain]
name = Nobody imports it
type = forbidden
source_modules = generated
forbidden_modules = absent_engine
"""
OURS = """
[importlinter]
root_package = generated
include_external_packages = True

[importlinter:contract:coverage]
name = Every file is covered
type = coverage

[importlinter:contract:phase]
name = Nobody imports it at import time
type = import_phase
source_modules = generated
forbidden_modules = heavy_engine
accept_unknown = heavy_engine
"""


def generate(folder: Path, *, num_files: int, lines_per_file: int) -> None:
    """Write a package that looks like one: packages of twenty modules that import each other and a few libraries."""
    draw = random.Random(20261201)
    names = [f"part{number // 20}.mod{number}" for number in range(num_files)]
    package = folder / "generated"
    for number, name in enumerate(names):
        path = package / (name.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(_module(draw, number, names[:number], lines_per_file))
    (package / "__init__.py").touch()


def _module(draw: random.Random, number: int, earlier: list[str], num_lines: int) -> str:
    lines = ["import json", "import logging", "from collections.abc import Mapping", "import numpy as np"]
    lines += [
        f"from generated.{name} import work_0 as other_{name[-3:].strip('.d')}"
        for name in draw.sample(earlier, min(6, len(earlier)))
    ]
    if number % 7 == 0:
        lines += ["from typing import TYPE_CHECKING", "if TYPE_CHECKING:", "    import pandas"]
    if number % 25 == 0:
        lines += ["import importlib", "def plugin(name):", '    return importlib.import_module(f"generated.{name}")']
    counter = 0
    while len(lines) + 12 < num_lines:
        lines += [
            f"def work_{counter}(values: Mapping[str, float], scale: float = {draw.random():.3f}) -> dict[str, float]:",
            f'    """Scale values by part {counter}."""',
        ]
        if number % 10 == 0 and counter == 3:
            lines += ["    from heavy_engine.config import Settings", "    logging.info(Settings)"]
        lines += [
            "    found = {}",
            "    for name, value in sorted(values.items()):",
            "        if value > scale and name not in found:",
            "            found[name] = np.clip(value * scale, 0.0, 1.0)",
            "        elif not value:",
            "            found.setdefault(name, json.loads('0'))",
            "    return {name: float(value) for name, value in found.items()}",
            "",
        ]
        counter += 1
    return "\n".join([*lines, *["# padding"] * (num_lines - len(lines))]) + "\n"


def _seconds(command: list[str], folder: Path, *, cold: bool) -> float:
    """Run a command once; a cold run finds no cache, neither its own nor the other's."""
    if cold:
        for cache in CACHES:
            shutil.rmtree(folder / cache, ignore_errors=True)
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode != 0:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return seconds


def _commands(folder: Path) -> dict[str, list[str]]:
    (folder / "plain.importlinter").write_text(PLAIN)
    (folder / "ours.importlinter").write_text(OURS)
    return {
        "lint-imports": [str(BIN / "lint-imports"), "--config", "plain.importlinter"],
        "nemo-rl-contracts": [str(BIN / "nemo-rl-contracts"), "check", "--config", "ours.importlinter"],
    }


def measure_check(*, repeats: int = 9) -> Iterator[dict]:
    """Compare `nemo-rl-contracts check` with `lint-imports` and one plain contract, cold and warm."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generate(folder, num_files=NUM_FILES, lines_per_file=NUM_LINES // NUM_FILES)
        commands = _commands(folder)
        for temperature, promised in (("cold", 2.0), ("warm", 1.5)):
            taken: dict[str, list[float]] = {command: [] for command in commands}
            for command in commands.values():
                _seconds(command, folder, cold=True)  # the first run of each pays for its own bytecode
            for _ in range(repeats):
                for command, arguments in commands.items():
                    taken[command].append(_seconds(arguments, folder, cold=temperature == "cold"))
            medians = {command: statistics.median(seconds) for command, seconds in taken.items()}
            yield {
                "figure": f"check/{temperature}",
                "files": NUM_FILES,
                "lines": NUM_LINES,
                **{f"{command}_s": round(median, 3) for command, median in medians.items()},
                "ratio": round(medians["nemo-rl-contracts"] / medians["lint-imports"], 2),
                "promised": promised,
            }


def measure_scale(*, sizes: tuple[int, ...] = (300, 1000, 3000, 10_000)) -> Iterator[dict]:
    """Time both commands on growing trees of files of 60 lines, cold and warm."""
    for size in sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            generate(folder, num_files=size, lines_per_file=60)
            row: dict = {"figure": "scale", "files": size}
            for command, arguments in _commands(folder).items():
                row[f"{command}_cold_s"] = round(min(_seconds(arguments, folder, cold=True) for _ in range(3)), 3)
                row[f"{command}_warm_s"] = round(min(_seconds(arguments, folder, cold=False) for _ in range(3)), 3)
            row["us_per_file_cold"] = round(row["nemo-rl-contracts_cold_s"] / size * 1e6)
            yield row


def measure_install() -> Iterator[dict]:
    """Install nemo-rl-contracts into a fresh environment and weigh what it brings."""
    uv = shutil.which("uv")
    if uv is None:
        raise RuntimeError("`uv` is not on the PATH; install it (pip install uv)")
    with tempfile.TemporaryDirectory() as name:
        venv = Path(name) / "venv"
        subprocess.run([uv, "venv", "--quiet", str(venv)], check=True, timeout=120)
        python = str(venv / "bin" / "python")
        install = [uv, "pip", "install", "--quiet", "--link-mode", "copy", "--python", python, str(ROOT / "contracts")]
        subprocess.run(install, check=True, timeout=300)
        listed = subprocess.run(
            [uv, "pip", "list", "--quiet", "--format", "json", "--python", python],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
        (site,) = (venv / "lib").glob("python3.*/site-packages")
        size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
        names = sorted(row["name"] for row in json.loads(listed.stdout))
        yield {"figure": "install", "megabytes": round(size / 1e6, 1), "promised": 20, "distributions": names}


def measure_guard() -> Iterator[dict]:
    """Time an import statement with and without the guard; see guard_cost.py."""
    sys.path.insert(0, str(Path(__file__).parent))
    import guard_cost

    yield from guard_cost.measure()


PARTS = {"check": measure_check, "scale": measure_scale, "install": measure_install, "guard": measure_guard}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all")
    parts = parser.parse_args().parts or list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    os.environ["COLUMNS"] = "120"
    for part in parts:
        for row in PARTS[part]():
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
