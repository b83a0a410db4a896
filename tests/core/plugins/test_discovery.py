# SPDX-License-Identifier: Apache-2.0
"""Listing: from metadata alone, one scan, each state told apart."""

import sys
import warnings
from pathlib import Path
from typing import Any

import importlib_metadata
import pytest

import nemo_rl_core
from nemo_rl_core.errors import BackendDuplicateError, BackendIncompatibleError
from nemo_rl_core.plugins import PluginState, discover, load
from tests.core.plugins.conftest import Site

GROUP = "test.group"
#: Leaves a mark, since a listing that handles errors would leave no module behind.
TRAP = "open(f'{__file__}.sprung', 'w').close()\nraise RuntimeError('imported by a listing')\n"


def states(group: str = GROUP, **settings: Any) -> dict[str, str]:
    return {name: plugin.state.value for name, plugin in discover(group, **settings).items()}


def test_listing_imports_nothing_and_keeps_every_state_apart(site: Site) -> None:
    """F21, F43, F46: one scan shows all of them, and no trap springs."""
    site.install("good", "good = trap_good:X", trap_good=TRAP)
    site.install("old", "old = trap_old:X", requires=["nemo-rl-core<0.0.1"], trap_old=TRAP)
    site.install("typo", "typo = not-a-module!", trap_typo=TRAP)
    site.install("one", "twice = trap_one:X", trap_one=TRAP)
    site.install("two", "twice = trap_two:X", trap_two=TRAP)
    site.install("off", "off = trap_off:X", trap_off=TRAP)
    assert states(blocked=("off",)) == {
        "good": "available",
        "off": "blocked",
        "old": "incompatible",
        "twice": "duplicate",
        "typo": "broken",
    }
    assert list(site.root.glob("*.sprung")) == []
    assert not [name for name in sys.modules if name.startswith("trap_")]


def test_a_plugin_tells_its_distribution_version_and_value(site: Site) -> None:
    site.install("Some-Adapter", "good = m:X.y", version="2.3")
    plugin = discover(GROUP)["good"]
    assert (plugin.name, plugin.value, plugin.distribution, plugin.version) == ("good", "m:X.y", "Some-Adapter", "2.3")
    assert (plugin.state, plugin.reason) == (PluginState.AVAILABLE, "")


@pytest.mark.parametrize(
    ("requires", "state"),
    [
        ([], "available"),
        (["nemo-rl-core"], "available"),
        ([f"nemo_rl.core=={nemo_rl_core.__version__}"], "available"),
        (["nemo-rl-core>=99"], "incompatible"),
        (["Nemo_RL_Core>=99"], "incompatible"),
        (["nemo-rl-core>=99; python_version<'3'"], "available"),
        (["nemo-rl-core>=99; extra == 'dev'"], "available"),
        (["other>=99", "nemo-rl-core>=0"], "available"),
        (["not a requirement ;;", "nemo-rl-core>=99"], "incompatible"),
    ],
)
def test_versions_are_judged_by_the_metadata(site: Site, requires: list[str], state: str) -> None:
    """F30: before anything is imported; markers and name spellings count."""
    site.install("adapter", "x = trap_versions:X", requires=requires, trap_versions=TRAP)
    assert states() == {"x": state}
    if state == "incompatible":
        with pytest.raises(BackendIncompatibleError, match=r"adapter 1\.0 requires nemo-rl-core>=99.*this is"):
            load("x", group=GROUP)


def test_a_bare_folder_of_the_engines_name_is_no_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: Site
) -> None:
    """F25: folders named like the packages, without metadata, change no answer."""
    for name in ("vllm", "nemo_rl_ghost"):
        (tmp_path / "cwd" / name).mkdir(parents=True)
    before = states("nemo_rl_core.generation")
    monkeypatch.syspath_prepend(str(tmp_path / "cwd"))
    assert states("nemo_rl_core.generation") == before


def test_a_known_adapter_that_is_not_installed_is_absent(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(site.root)])
    site.install("nemo-rl-core", "torch = m:X", group="nemo_rl_core.generation")
    listed = discover()
    assert {name: plugin.state.value for name, plugin in listed.items()} == {"torch": "available", "vllm": "absent"}
    assert 'pip install "nemo-rl-core[vllm]"' in listed["vllm"].reason


def test_blocking_by_variable_is_read_when_asked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """F48: a switch without touching code, for single names and for all that is not core's own."""
    site.install("a", "a = m:X")
    site.install("b", "b = m:X")
    site.install("nemo-rl-core", "own = m:X", version="0.0")
    monkeypatch.setenv("NEMO_RL_PLUGINS_BLOCKED", " a , ")
    assert states() == {"a": "blocked", "b": "available", "own": "available"}
    monkeypatch.setenv("NEMO_RL_PLUGINS_BLOCKED", "*")
    assert states() == {"a": "blocked", "b": "blocked", "own": "available"}
    monkeypatch.delenv("NEMO_RL_PLUGINS_BLOCKED")
    assert states(blocked=["b"]) == {"a": "available", "b": "blocked", "own": "available"}


def test_a_duplicate_names_both_distributions(site: Site) -> None:
    site.install("one", "x = m:X\ny = m:X")
    site.install("two", "x = n:X\ny = m:X", version="2.0")
    for plugin in discover(GROUP).values():
        assert plugin.state is PluginState.DUPLICATE
        assert "one 1.0 and two 2.0 both register" in plugin.reason
        assert (plugin.distribution, plugin.version) == ("one, two", "1.0, 2.0")


def test_strict_raises_and_reports_every_failure(site: Site) -> None:
    """F43, F48: the second and third failure are named too; blocked and absent are nobody's failure."""
    site.install("one", "x = m:X")
    site.install("two", "x = n:X")
    site.install("old", "y = m:X", requires=["nemo-rl-core<0.0.1"])
    site.install("bad", "z = no module")
    with pytest.raises(BackendDuplicateError) as caught:
        discover(GROUP, strict=True)
    for words in ("one 1.0", "two 1.0", "old 1.0", "bad 1.0"):
        assert words in str(caught.value)
    assert set(discover(GROUP, blocked=["x", "y", "z"], strict=True)) == {"x", "y", "z"}


def test_a_stale_info_folder_without_metadata_hides_nothing(site: Site) -> None:
    """F43: what an interrupted uninstall leaves behind must not break the listing of others."""
    site.install("stale", "stale = m:X", metadata=False)
    site.install("good", "good = m:X")
    assert states() == {"good": "available", "stale": "broken"}
    assert str(site.root) in discover(GROUP)["stale"].reason


class CountingFinder:
    """Stands first on sys.meta_path, has no distributions, and counts how often it is asked for them."""

    def __init__(self) -> None:
        self.scans = 0

    def find_spec(self, *_: object) -> None:
        return None

    def find_distributions(self, context: object = None) -> list[importlib_metadata.Distribution]:
        self.scans += 1
        return []


@pytest.mark.parametrize("num_dists", [1, 200])
def test_one_call_is_at_most_one_scan(site: Site, monkeypatch: pytest.MonkeyPatch, num_dists: int) -> None:
    """F49: however many distributions are installed and names are asked for."""
    for index in range(num_dists):
        site.install(f"d{index}", f"x{index} = good_module:X", good_module="X = 1\n")
    counter = CountingFinder()
    monkeypatch.setattr(sys, "meta_path", [counter, *sys.meta_path])
    assert len(discover(GROUP)) == num_dists
    assert counter.scans == 1
    assert load("x0", group=GROUP) == 1
    assert counter.scans == 2


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("METADATA", b"Metadata-Version: 2.1\nName: foreign\n"),
        ("METADATA", b"\xff\xfe\x00"),
        ("entry_points.txt", b"[test.group]\nno equals sign\n"),
        ("entry_points.txt", b"\xff\xfe\x00"),
    ],
)
def test_a_foreign_package_with_unreadable_metadata_hides_no_plugin(site: Site, file: str, content: bytes) -> None:
    """F43: whatever lies in site-packages, the plugins of others are found."""
    site.install("good-one", "good = good_module:OBJECT", good_module="OBJECT = 1\n")
    site.install("foreign", "odd = odd_module:OBJECT", odd_module="OBJECT = 1\n")
    (site.root / "foreign-1.0.dist-info" / file).write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert discover("test.group")["good"].state is PluginState.AVAILABLE
        assert load("good", group="test.group") == 1
