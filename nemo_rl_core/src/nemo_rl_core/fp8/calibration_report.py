# SPDX-License-Identifier: Apache-2.0
"""A calibration as a page to read: a row for each layer and kind, and what to look at."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.fp8.blockwise import E4M3_MAX

__all__ = ["Row", "report_text", "rows_of", "things_to_look_at"]

#: A layer whose magnitude is this many times the median of its kind is an outlier.
OUTLIER_FACTOR = 4.0
#: Below this many tokens the largest values of a model have hardly shown up.
FEW_TOKENS = 10_000
#: Share of subnormal values from which precision is lost in a way that shows.
MANY_SUBNORMAL = 0.01


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layer and kind.

    Attributes:
        owner: Live module.
        kind: ``q``, ``k`` or ``v``.
        amax: Largest magnitude that was seen.
        scale: What the engine gets.
        saturated: Share of values above 448 scales.
        subnormal: Share of values that e4m3 keeps with fewer bits.
    """

    owner: str
    kind: str
    amax: float
    scale: float
    saturated: float
    subnormal: float

    @property
    def headroom(self) -> float:
        """How many times larger than the largest seen a value may be before it saturates."""
        return self.scale * E4M3_MAX / self.amax


def rows_of(result: Mapping[str, Any]) -> tuple[Row, ...]:
    """Return the rows of a calibration result, by layer, q before k before v."""
    return tuple(
        Row(
            owner=owner,
            kind=kind,
            amax=result["amax"][owner][kind],
            scale=result["layers"][f"{owner}.{kind}_scale"],
            saturated=rates["saturated"],
            subnormal=rates["subnormal"],
        )
        for owner, kinds in result["rates"].items()
        for kind, rates in kinds.items()
    )


def things_to_look_at(result: Mapping[str, Any], num_tokens: int) -> Iterator[str]:
    """Yield a sentence where data are few, for each outlier, for all that saturates, and for each row that loses precision.

    Args:
        result: As a calibration gives it.
        num_tokens: Tokens that it has seen.
    """
    rows = rows_of(result)
    if num_tokens < FEW_TOKENS:
        yield (
            f"the data: {num_tokens:,} tokens are few, and the largest values come late. Take some hundred sequences as "
            f"long as those that will be served."
        )
    for kind in ("q", "k", "v"):
        of_kind = [row for row in rows if row.kind == kind]
        typical = statistics.median(row.amax for row in of_kind) if of_kind else 0.0
        for row in of_kind:
            if row.amax > OUTLIER_FACTOR * typical:
                yield (
                    f"`{row.owner}`: {kind} reaches {row.amax:.4g}, {row.amax / typical:.1f} times the median of all "
                    f"layers ({typical:.4g}). An outlier like this is common in first layers and where projections have a "
                    f"bias; its own scale covers it."
                )
    if saturated := [row for row in rows if row.saturated > 0]:
        worst = max(saturated, key=lambda row: row.saturated)
        yield (
            f"the percentile: values of {len(saturated)} of {len(rows)} scales saturate, because it leaves them out; at most "
            f"{_percent(worst.saturated)}, of {worst.kind} in `{worst.owner}`."
        )
    for row in rows:
        if row.subnormal > MANY_SUBNORMAL:
            yield (
                f"`{row.owner}`: {_percent(row.subnormal)} of {row.kind} are so small beside the largest that e4m3 keeps "
                f"them with fewer bits; a lower margin, or a percentile below 100, gives them more."
            )


def report_text(result: Mapping[str, Any], facts: Mapping[str, str], num_tokens: int) -> str:
    """Return the report in Markdown.

    Args:
        result: As a calibration gives it.
        facts: What the head of the report lists, in that order.
        num_tokens: Tokens that it has seen.
    """
    remarks = [f"- {remark}" for remark in things_to_look_at(result, num_tokens)]
    return "\n".join(
        [
            "# FP8 scales of the KV cache",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in facts.items()),
            "",
            "## To look at",
            "",
            *(remarks or ["Nothing: tokens are many, no layer stands out, no value saturates and few are subnormal."]),
            "",
            "## Layers",
            "",
            "Headroom: how many times larger than the largest seen a value may be before it saturates at 448 scales.",
            "Subnormal: the share that e4m3 keeps with fewer bits. Shares are of the calibration data.",
            "",
            "![scales by layer](scales.svg)",
            "",
            "| module | | largest | scale | headroom | saturated | subnormal |",
            "|---|---|---:|---:|---:|---:|---:|",
            *(
                f"| `{row.owner}` | {row.kind} | {row.amax:.4g} | {row.scale:.6g} | {row.headroom:.2f} | "
                f"{_percent(row.saturated)} | {_percent(row.subnormal)} |"
                for row in rows_of(result)
            ),
            "",
        ]
    )


def _percent(share: float) -> str:
    """Return a share in percent; only none at all is 0."""
    if share == 0:
        return "0"
    return f"{100 * share:.3f} %" if share >= 1e-5 else "< 0.001 %"
