# SPDX-License-Identifier: Apache-2.0
"""Outcomes as text, JSON, SARIF, GitHub annotations and a Mermaid picture."""

import hashlib
import json
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nemo_rl_contracts.running import ExitCode, Outcome, exit_code
from nemo_rl_contracts.violations import Hop, Violation

__all__ = ["FORMATS", "as_mermaid", "as_text", "render", "without_a_picture"]

_WORDS = {
    ExitCode.KEPT: "kept",
    ExitCode.BROKEN: "BROKEN",
    ExitCode.MISCONFIGURED: "MISCONFIGURED",
    ExitCode.NOT_COVERED: "NOT COVERED",
}
_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def render(outcomes: Sequence[Outcome], form: str) -> str:
    """Return outcomes in one of ``FORMATS``.

    Args:
        outcomes: What the contracts say.
        form: Name of the format.
    """
    return FORMATS[form](outcomes)


def as_text(outcomes: Sequence[Outcome]) -> str:
    """Return text for people: one line for each contract, then what is wrong, with chains."""
    lines = []
    for outcome in outcomes:
        lines.append(f"{_WORDS[outcome.verdict]:13} {outcome.rule:21} {outcome.name}")
        lines += [f"{'':13} {note}" for note in outcome.notes]
    for outcome in outcomes:
        if outcome.verdict is ExitCode.KEPT:
            continue
        lines += ["", outcome.name, "-" * len(outcome.name)]
        lines += [f"Misconfigured: {text}" for text in outcome.problems]
        lines += [f"Not covered: {text}" for text in outcome.uncovered]
        for violation in outcome.violations:
            lines += _paragraph(violation)
    kept = sum(outcome.verdict is ExitCode.KEPT for outcome in outcomes)
    lines += ["", f"{kept} of {len(outcomes)} contracts kept."]
    return "\n".join(lines)


def _paragraph(violation: Violation) -> list[str]:
    place = f"{violation.file}:{violation.line}: " if violation.line else ""
    return [
        f"- {place}{violation.message}",
        *(f"    {hop}" for hop in violation.hops),
        *([f"    {violation.advice}"] if violation.advice else []),
    ]


def as_json(outcomes: Sequence[Outcome]) -> str:
    """Return one JSON document."""
    code = exit_code(outcomes)
    document = {
        "schema": 1,
        "exit_code": int(code),
        "verdict": code.name.lower(),
        "contracts": [
            {
                "name": outcome.name,
                "type": outcome.rule,
                "verdict": outcome.verdict.name.lower(),
                "violations": [_violation_row(violation) for violation in outcome.violations],
                "problems": list(outcome.problems),
                "uncovered": list(outcome.uncovered),
                "notes": list(outcome.notes),
            }
            for outcome in outcomes
        ],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _violation_row(violation: Violation) -> dict[str, Any]:
    return {
        "message": violation.message,
        "file": violation.file,
        "line": violation.line,
        "chain": [_hop_row(hop) for hop in violation.hops],
        "key": violation.key,
        "advice": violation.advice,
    }


def _hop_row(hop: Hop) -> dict[str, Any]:
    return {
        "importer": hop.importer,
        "imported": hop.imported,
        "file": hop.file,
        "line": hop.line,
        "phase": hop.phase,
        "note": hop.note,
    }


def as_sarif(outcomes: Sequence[Outcome]) -> str:
    """Return a SARIF 2.1.0 log, as code scanning services read it."""
    rules = [
        {"id": rule, "shortDescription": {"text": f"nemo-rl-contracts {rule}"}}
        for rule in sorted({outcome.rule for outcome in outcomes})
    ]
    results = []
    for outcome in outcomes:
        for text in (*outcome.problems, *outcome.uncovered):
            results.append({"ruleId": outcome.rule, "level": "error", "message": {"text": f"{outcome.name}: {text}"}})
        results += [_sarif_result(outcome, violation) for violation in outcome.violations]
    driver = {"name": "nemo-rl-contracts", "rules": rules}
    log = {"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}
    return json.dumps(log, indent=2, ensure_ascii=False)


def _sarif_result(outcome: Outcome, violation: Violation) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": outcome.rule,
        "level": "error",
        "message": {"text": f"{outcome.name}: {violation.message}"},
        "partialFingerprints": {"key/v1": hashlib.sha256(f"{outcome.name}\n{violation.key}".encode()).hexdigest()},
    }
    if violation.file:
        result["locations"] = [_sarif_place(violation.file, violation.line)]
    steps = [
        {"location": {**_sarif_place(hop.file, hop.line), "message": {"text": str(hop)}}}
        for hop in violation.hops
        if hop.file
    ]
    if len(steps) > 1:
        result["codeFlows"] = [{"threadFlows": [{"locations": steps}]}]
    return result


def _sarif_place(file: str, line: int) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": {"uri": urllib.parse.quote(file)}}
    if line:
        place["region"] = {"startLine": line}
    return {"physicalLocation": place}


def as_github(outcomes: Sequence[Outcome]) -> str:
    """Return workflow commands that GitHub shows beside the lines of a pull request."""
    lines = []
    for outcome in outcomes:
        title = _escaped(outcome.name, parameter=True)
        for text in (*outcome.problems, *outcome.uncovered):
            lines.append(f"::error title={title}::{_escaped(text)}")
        for violation in outcome.violations:
            place = f"file={_escaped(violation.file, parameter=True)}," if violation.file else ""
            place += f"line={violation.line}," if violation.line else ""
            text = "\n".join([violation.message, *map(str, violation.hops), violation.advice]).rstrip()
            lines.append(f"::error {place}title={title}::{_escaped(text)}")
    return "\n".join([*lines, *as_text(outcomes).splitlines()[-1:]])


def _escaped(text: str, *, parameter: bool = False) -> str:
    """Escape text as GitHub's workflow commands ask for."""
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if parameter else text


def as_mermaid(outcomes: Sequence[Outcome]) -> str:
    """Return a Mermaid flowchart of the chains of all violations: solid runs at import, dashed later."""
    return mermaid_of(hop for outcome in outcomes for violation in outcome.violations for hop in violation.hops)


def without_a_picture(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a line for all that is wrong and that ``as_mermaid`` can't draw."""
    lines = []
    for outcome in outcomes:
        lines += [f"misconfigured: {outcome.name}: {text}" for text in outcome.problems]
        lines += [f"not covered: {outcome.name}: {text}" for text in outcome.uncovered]
        lines += [f"{outcome.name}: {violation.message}" for violation in outcome.violations if not violation.hops]
    return lines


def mermaid_of(hops: Iterable[Hop]) -> str:
    """Return a Mermaid flowchart of some steps, each drawn once."""
    names: dict[str, str] = {}
    edges: dict[str, None] = {}
    targets: dict[str, None] = {}
    starts: set[str] = set()
    for hop in hops:
        for module in (hop.importer, hop.imported):
            names.setdefault(module, f"m{len(names)}")
        starts.add(hop.importer)
        targets[hop.imported] = None
        arrow = "-.->" if hop.phase in ("lazy", "typing") else "-->"
        label = ", ".join(filter(None, (hop.phase, hop.note, f"line {hop.line}" if hop.line else "")))
        edges[f'    {names[hop.importer]} {arrow}|"{label}"| {names[hop.imported]}'] = None
    lines = ["flowchart LR"]
    lines += [f'    {short}["{module}"]' for module, short in names.items()]
    lines += list(edges)
    ends = [names[module] for module in targets if module not in starts]
    if ends:
        lines += ["    classDef forbidden stroke:#c00,stroke-width:2px", f"    class {','.join(ends)} forbidden"]
    return "\n".join(lines)


#: Name of a format to the function that writes it.
FORMATS: Mapping[str, Callable[[Sequence[Outcome]], str]] = MappingProxyType(
    {"text": as_text, "json": as_json, "sarif": as_sarif, "github": as_github, "mermaid": as_mermaid}
)
