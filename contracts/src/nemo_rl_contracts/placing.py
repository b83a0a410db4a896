# SPDX-License-Identifier: Apache-2.0
"""What a configuration file holds that nobody would read: sections, keys and types that are written wrongly.

A contract in a section that import-linter passes by is checked by nobody, and nothing turns red. So the file is looked at
once more beside import-linter's own reading, and what looks like a contract without being one is refused.
"""

import configparser
import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nemo_rl_contracts import contract_types
from nemo_rl_contracts.errors import MisconfiguredError
from nemo_rl_contracts.known_names import read_toml

__all__ = ["BUILT_IN_TYPES", "refuse_misplaced", "refuse_unplaced_types", "registered_types", "require_plain_values"]

#: The contract types of import-linter itself, 2.14 to 2.17; `lint-imports` checks them.
BUILT_IN_TYPES = frozenset({"acyclic_siblings", "forbidden", "independence", "layers", "private_modules", "protected"})

_SECTION = "importlinter"
_INI_FILES = ("setup.cfg", ".importlinter")
#: What the top of a configuration may say.
_TOP_TEXTS = ("root_package", "include_external_packages", "exclude_type_checking_imports", "show_timings")
_TOP_LISTS = ("root_packages", "contract_types")


def refuse_misplaced(path: Path | None) -> None:
    """Refuse sections and keys that look like a part of the configuration and that import-linter does not read.

    Args:
        path: The file; None means the one that import-linter takes in the working directory.

    Raises:
        MisconfiguredError: If there is one, or a value has a form that no option takes. A file that is not there, or is no
            INI, is left to import-linter.
    """
    if path is not None:
        (_refuse_in_toml if path.suffix == ".toml" else _refuse_in_ini)(path)
        return
    for name in _INI_FILES:
        if _refuse_in_ini(Path(name)):
            return
    _refuse_in_toml(Path("pyproject.toml"))


def _refuse_in_ini(path: Path) -> bool:
    """Look at an INI file; tell whether it is a configuration."""
    parser = configparser.ConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, configparser.Error):
        return False
    if _SECTION not in parser:
        return False
    for section in parser.sections():
        if section == _SECTION or section.startswith(f"{_SECTION}:"):
            continue
        # `.importlinter` holds nothing else; `setup.cfg` belongs to other tools too.
        if path.name == ".importlinter" or _looks_like_ours(section):
            raise MisconfiguredError(
                f"{path}: nobody reads the section [{section}]; a contract stands in [{_SECTION}:contract:ID]"
            )
    _refuse_top_keys(dict(parser[_SECTION]), path)
    return True


def _refuse_in_toml(path: Path) -> None:
    if not path.is_file():
        return
    document = read_toml(path)
    tool = document.get("tool", {})
    if not isinstance(tool, dict) or not tool.get(_SECTION):
        return
    for place, table in (("", document), ("tool.", tool)):
        for key in table:
            if not (place and key == _SECTION) and _looks_like_ours(key):
                raise MisconfiguredError(
                    f"{path}: nobody reads [{place}{key}]; the configuration stands in [tool.{_SECTION}] and its contracts "
                    f"in [[tool.{_SECTION}.contracts]]"
                )
    top = tool[_SECTION]
    if not isinstance(top, dict):
        raise MisconfiguredError(f"{path}: tool.{_SECTION} is a table; got {top!r}")
    contracts = top.get("contracts", [])
    if not isinstance(contracts, list) or not all(isinstance(contract, dict) for contract in contracts):
        raise MisconfiguredError(f"{path}: contracts are tables [[tool.{_SECTION}.contracts]]; got {contracts!r}")
    _refuse_top_keys({key: value for key, value in top.items() if key != "contracts"}, path)


def _refuse_top_keys(top: Mapping[str, Any], path: Path) -> None:
    """Check what stands at the top of a configuration."""
    known = (*_TOP_TEXTS, *_TOP_LISTS)
    for key, value in top.items():
        if key not in known:
            near = difflib.get_close_matches(key, [*known, "contracts"], n=1, cutoff=0.75)
            holds_tables = isinstance(value, dict) or (
                isinstance(value, list) and any(isinstance(part, dict) for part in value)
            )
            if near or holds_tables or "contract" in key:
                hint = f"; did you mean {near[0]!r}?" if near else "; take it out"
                raise MisconfiguredError(f"{path}: nobody reads {key!r} at the top of the configuration{hint}")
        elif key in _TOP_TEXTS and (
            not isinstance(value, (str, bool)) or (key == "root_package" and not isinstance(value, str))
        ):
            raise MisconfiguredError(f"{path}: {key} is one text; got {value!r}")
        elif key in _TOP_LISTS and not _is_texts(value):
            raise MisconfiguredError(f"{path}: {key} is a list of texts; got {value!r}")


def require_plain_values(options: Mapping[str, Any]) -> None:
    """Check the values of one contract of ours; TOML has kinds that no option of ours takes.

    Args:
        options: What the contract says.

    Raises:
        MisconfiguredError: If a value is neither a text, nor yes or no, nor a list of texts.
    """
    for key, value in options.items():
        if not _is_texts(value):
            raise MisconfiguredError(
                f"{key} of the contract {options.get('name', '')!r} takes a text, true or false, or a list of texts; "
                f"got {value!r}"
            )


def _is_texts(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(part, str) for part in value))


def _looks_like_ours(section: str) -> bool:
    """Tell whether the name of a section was meant for import-linter."""
    first = re.split(r"[:.\s]", section.strip().lower())[0]
    word = re.sub(r"[^a-z]", "", first)
    return bool(difflib.get_close_matches(word, [_SECTION], cutoff=0.85))


def registered_types(session: Mapping[str, Any]) -> tuple[dict[str, str], set[str]]:
    """Read `contract_types` at the top of a configuration.

    Args:
        session: The top of the configuration.

    Returns:
        Our types by the names that the configuration uses for them, and the names that it registers for other types.

    Raises:
        MisconfiguredError: If a line is no pair, names a type of ours that there is not, or gives a name to a type that
            has it not.
    """
    lines = session.get("contract_types") or []
    own = {getattr(contract_types, name).rule: getattr(contract_types, name) for name in contract_types.__all__}
    names = {rule: rule for rule in own}
    others: set[str] = set()
    seen: set[str] = set()
    for line in [lines] if isinstance(lines, str) else lines:
        if not line.strip():
            continue
        alias, _, target = (part.strip() for part in line.partition(":"))
        if not alias or not target:
            raise MisconfiguredError(
                f"a line of contract_types has the form 'name: package.module.Class'; got {line!r}"
            )
        if alias in seen:
            raise MisconfiguredError(f"contract_types has the name {alias!r} twice")
        seen.add(alias)
        rule = _rule_of(target)
        if alias in own and rule != alias:
            raise MisconfiguredError(
                f"contract_types registers {target!r} as {alias!r}, which is the name of another type of ours; that is "
                f"{_path_of(own[alias])}. Give the other one another name"
            )
        if alias in BUILT_IN_TYPES:
            raise MisconfiguredError(
                f"contract_types registers {target!r} as {alias!r}, which is a type of import-linter; give another name"
            )
        if rule:
            names[alias] = rule
        else:
            others.add(alias)
    return names, others


def _rule_of(target: str) -> str:
    """Return the name of our type that a path means, "" of somebody else's.

    Raises:
        MisconfiguredError: If it is meant for one of ours and is none.
    """
    paths = {}
    for name in contract_types.__all__:
        kind = getattr(contract_types, name)
        paths |= {_path_of(kind): kind.rule, f"{kind.__module__}.{name}": kind.rule}
    if target in paths:
        return paths[target]
    top = target.partition(".")[0]
    if difflib.get_close_matches(top, ["nemo_rl_contracts"], cutoff=0.8):
        near = difflib.get_close_matches(target, sorted(paths), n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise MisconfiguredError(f"contract_types names {target!r}, and there is no such type{hint}")
    return ""


def _path_of(kind: type) -> str:
    return f"{contract_types.__name__}.{kind.__name__}"


def refuse_unplaced_types(contracts: Iterable[Mapping[str, Any]], ours: Iterable[str], others: Iterable[str]) -> None:
    """Refuse contracts that nobody would check, here or in `lint-imports`.

    Args:
        contracts: The options of each contract.
        ours: Names of our types.
        others: Names that the configuration registers for types of somebody else's.

    Raises:
        MisconfiguredError: If a contract has no name or no type, or a type that nobody has.
    """
    ours, others = sorted(ours), sorted(others)
    for options in contracts:
        label = str(options.get("name") or options.get("id") or "?")
        kind = options.get("type")
        if not kind or not isinstance(kind, str):
            raise MisconfiguredError(
                f"the contract {label!r} has no type, so nobody checks it; give it one of {', '.join(ours)}"
            )
        if not isinstance(options.get("name"), str) or not options["name"].strip():
            raise MisconfiguredError(f"the contract {label!r} has no name; give it one that says what it holds")
        if kind not in {*ours, *others, *BUILT_IN_TYPES}:
            known = sorted({*ours, *others, *BUILT_IN_TYPES})
            near = difflib.get_close_matches(kind, known, n=1, cutoff=0.75)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
            raise MisconfiguredError(f"no contract type is called {kind!r} (contract {label!r}){hint}")
