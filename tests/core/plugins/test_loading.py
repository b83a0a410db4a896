# SPDX-License-Identifier: Apache-2.0
"""Loading one plugin: the right object, or the error that tells this failure from the others."""

import sys

import pytest

from nemo_rl_core.errors import (
    BackendAbsentError,
    BackendBlockedError,
    BackendBrokenError,
    BackendDuplicateError,
    BackendIncompatibleError,
    UnknownBackendError,
)
from nemo_rl_core.plugins import PluginState, check, collect_mappings, load
from tests.core.plugins.conftest import Site

GROUP = "test.group"


def test_only_the_named_plugin_is_imported(site: Site) -> None:
    """F46: beside it stands one that must not run."""
    site.install("good", "good = plugin_good:SPEC.value", plugin_good="class SPEC:\n    value = 7\n")
    site.install("other", "other = plugin_other:X", plugin_other="raise RuntimeError\n")
    assert load("good", group=GROUP) == 7
    assert "plugin_other" not in sys.modules


def test_a_wrong_name_lists_the_installed_ones_and_the_nearest(site: Site) -> None:
    site.install("a", "vllm = m:X")
    site.install("b", "torch = m:X")
    with pytest.raises(UnknownBackendError, match=r"installed: torch, vllm\. Did you mean 'vllm'\?"):
        load("vlm", group=GROUP)
    with pytest.raises(UnknownBackendError) as caught:
        load("zzz", group=GROUP)
    assert "Did you mean" not in str(caught.value)
    with pytest.raises(UnknownBackendError, match="installed: none"):
        load("x", group="no.such.group")


def test_a_missing_adapter_names_its_command(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(site.root)])
    site.install("nemo-rl-core", "torch = m:X", group="nemo_rl_core.generation")
    with pytest.raises(BackendAbsentError, match=r'pip install "nemo-rl-core\[vllm\]"'):
        load("vllm")


@pytest.mark.parametrize(
    ("body", "cause", "words"),
    [
        ("import foo_that_is_missing\n", ModuleNotFoundError, "foo_that_is_missing"),
        ("from json import gone\n", ImportError, "gone"),
        ("raise OSError('libcuda.so.1: cannot open')\n", OSError, "libcuda"),
        ("raise SystemExit('no licence')\n", SystemExit, "no licence"),
        ("def f(:\n", SyntaxError, "invalid syntax"),
        ("Y = 1\n", AttributeError, "X"),
    ],
)
def test_a_broken_plugin_keeps_the_real_cause_and_gives_no_install_advice(
    site: Site, body: str, cause: type[BaseException], words: str
) -> None:
    """F27, F41, F29: installed and failing is not absent."""
    site.install("adapter", "bad = plugin_bad:X", plugin_bad=body)
    with pytest.raises(BackendBrokenError, match=words) as caught:
        load("bad", group=GROUP)
    assert type(caught.value.__cause__) is cause
    assert "adapter 1.0" in str(caught.value)
    assert "pip install" not in str(caught.value)


def test_blocked_and_duplicate_are_refused_before_any_import(site: Site) -> None:
    site.install("one", "x = plugin_one:X\noff = plugin_one:X", plugin_one="raise RuntimeError\n")
    site.install("two", "x = plugin_two:X", plugin_two="raise RuntimeError\n")
    with pytest.raises(BackendDuplicateError, match=r"one 1\.0 and two 1\.0"):
        load("x", group=GROUP)
    with pytest.raises(BackendBlockedError, match="NEMO_RL_PLUGINS_BLOCKED"):
        load("off", group=GROUP, blocked=["off"])
    assert not {"plugin_one", "plugin_two"} & set(sys.modules)


def test_another_protocol_is_incompatible_and_names_both_numbers(site: Site) -> None:
    """F30: an adapter for another core is told apart from a broken one."""
    body = "class A:\n    protocol = 7\nclass B:\n    pass\n"
    site.install("adapter", "a = plugin_protocol:A\nb = plugin_protocol:B", plugin_protocol=body)
    assert load("a", group=GROUP, expected_protocol=7).protocol == 7
    assert load("b", group=GROUP).__name__ == "B"
    with pytest.raises(BackendIncompatibleError, match="speaks protocol 7, this core speaks 1"):
        load("a", group=GROUP, expected_protocol=1)
    with pytest.raises(BackendIncompatibleError, match="names no protocol number"):
        load("b", group=GROUP, expected_protocol=1)


def test_the_deep_check_finds_what_a_listing_cannot_know(site: Site) -> None:
    """F21: a native library that does not load shows only when asked for."""
    site.install("n", "native = plugin_native:X", plugin_native="raise OSError('undefined symbol')\n")
    site.install("p", "protocol = plugin_number:X", plugin_number="class X:\n    protocol = 2\n")
    site.install("g", "good = plugin_fine:X", plugin_fine="class X:\n    protocol = 1\n")
    site.install("o", "old = m:X", requires=["nemo-rl-core>=99"])
    got = {name: check(name, group=GROUP, expected_protocol=1) for name in ("native", "protocol", "good", "old")}
    assert {name: plugin.state for name, plugin in got.items()} == {
        "native": PluginState.BROKEN,
        "protocol": PluginState.INCOMPATIBLE,
        "good": PluginState.AVAILABLE,
        "old": PluginState.INCOMPATIBLE,
    }
    assert "undefined symbol" in got["native"].reason
    with pytest.raises(UnknownBackendError):
        check("nothing", group=GROUP)


def test_one_broken_plugin_never_hides_another(site: Site) -> None:
    """F43, F48: good, failing at import, failing when called, and one after them; each failure is kept."""
    site.install("d1", "a = items_a:ITEMS", items_a="ITEMS = {'a.Actor': 'base'}\n")
    site.install("d2", "b = items_b:ITEMS", items_b="import foo_that_is_missing\n")
    half = "def give():\n    items = {'c.One': 'vllm'}\n    raise ValueError('after one of two')\n"
    site.install("d3", "c = items_c:give", items_c=half)
    site.install("d4", "d = items_d:give", items_d="def give():\n    return {'d.Actor': 'fsdp'}\n")
    collected = collect_mappings(GROUP)
    assert dict(collected.items) == {"a.Actor": "base", "d.Actor": "fsdp"}
    assert dict(collected.sources) == {"a.Actor": "a", "d.Actor": "d"}
    assert {name: type(error.__cause__) for name, error in collected.failures.items()} == {
        "b": ModuleNotFoundError,
        "c": ValueError,
    }
    with pytest.raises(BackendBrokenError, match="foo_that_is_missing"):
        collect_mappings(GROUP, strict=True)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("ITEMS = {'x.One': 'base', 'x.Two': 3}\n", r"strings to strings, got \('x\.Two', 3\)"),
        ("ITEMS = 5\n", "a mapping of strings to strings, got int"),
        ("def ITEMS():\n    return None\n", "got NoneType"),
        ("def ITEMS(argument):\n    return {}\n", "TypeError"),
    ],
)
def test_a_plugin_counts_with_all_of_its_items_or_with_none(site: Site, body: str, words: str) -> None:
    """F43: the valid first item of a plugin with a wrong second one is not taken."""
    site.install("d", "x = items_x:ITEMS", items_x=body)
    collected = collect_mappings(GROUP)
    assert dict(collected.items) == {}
    assert isinstance(collected.failures["x"], BackendBrokenError)
    with pytest.raises(BackendBrokenError, match=words):
        collect_mappings(GROUP, strict=True)


def test_a_key_that_another_plugin_gave_makes_the_whole_plugin_a_duplicate(site: Site) -> None:
    site.install("d1", "a = items_first:ITEMS", items_first="ITEMS = {'k': 'base'}\n")
    site.install("d2", "b = items_second:ITEMS", items_second="ITEMS = {'k': 'vllm', 'other': 'vllm'}\n")
    collected = collect_mappings(GROUP)
    assert dict(collected.items) == {"k": "base"}
    assert isinstance(collected.failures["b"], BackendDuplicateError)
    assert "'a' and 'b' both give 'k'" in str(collected.failures["b"])


def test_a_blocked_plugin_is_no_failure_in_strict_mode(site: Site) -> None:
    site.install("d", "x = items_blocked:ITEMS", items_blocked="raise RuntimeError\n")
    collected = collect_mappings(GROUP, blocked=["x"], strict=True)
    assert dict(collected.items) == {}
    assert isinstance(collected.failures["x"], BackendBlockedError)
