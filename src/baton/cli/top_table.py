"""The table of `baton top`, as text that fits the terminal. Pure functions."""

import click

from baton.cli.top_samples import Row

TITLES = ("PROCESS", "ROLE", "MODEL", "STATE", "FLY", "RUN", "WAIT", "KV", "REQ/S", "TOK/S", "TTFT p50", "p95", "GAP")
LEFT = 4
"""Columns of text; the others are numbers, aligned to the right."""
STATE_COLORS = {"serving": "green", "starting": "yellow", "draining": "yellow", "paused": "yellow"}
ROLES = ("frontend", "router", "process", "encode", "prefill", "decode", "aggregated", "embed")


def render(rows: list[Row], width: int, height: int, clock: str) -> str:
    """Return a summary and a line for each process, cut to the size of a terminal."""
    ordered = sorted(rows, key=lambda row: (_order(row), row.name))
    cells = [TITLES, *(_cells(row) for row in ordered)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [_summary(rows, clock)[:width], "", click.style(_line(TITLES, widths)[:width], bold=True)]
    shown = max(1, height - len(lines) - 1)
    for row in ordered[:shown]:
        text = _line(_cells(row), widths)
        text = text.rstrip() + f"   {row.problem}" if row.problem else text
        lines.append(_colored(text[:width], row))
    if len(ordered) > shown:
        lines.append(f"... and {len(ordered) - shown} more")
    return "\n".join(lines)


def _summary(rows: list[Row], clock: str) -> str:
    answering = [row for row in rows if row.role in ("aggregated", "decode")]
    states = {state: sum(1 for row in rows if row.state == state) for state in sorted({row.state for row in rows})}
    counts = ", ".join(f"{number} {state}" for state, number in states.items())
    tokens = sum(row.tokens_per_s for row in answering)
    flying = sum(row.in_flight for row in answering)
    processes, requests = _count(len(rows), "process", "es"), _count(flying, "request", "s")
    return f"baton  {clock}  {processes} ({counts})  {requests} in flight  {tokens:.0f} tokens/s"


def _count(number: int, noun: str, ending: str) -> str:
    return f"{number} {noun}{'' if number == 1 else ending}"


def _order(row: Row) -> int:
    return ROLES.index(row.role) if row.role in ROLES else len(ROLES)


def _cells(row: Row) -> tuple[str, ...]:
    blocks = f"{row.used_blocks / row.total_blocks:.0%}" if row.total_blocks else "-"
    return (
        row.name,
        row.role or "-",
        row.model or "-",
        row.state,
        str(row.in_flight),
        str(row.running),
        str(row.waiting),
        blocks,
        f"{row.requests_per_s:.1f}",
        f"{row.tokens_per_s:.0f}",
        _ms(row.ttft_p50_ms),
        _ms(row.ttft_p95_ms),
        _ms(row.gap_p50_ms),
    )


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1000:.1f} s" if value >= 10_000 else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    parts = [cell.ljust(width) for cell, width in zip(cells[:LEFT], widths[:LEFT], strict=True)]
    parts += [cell.rjust(width) for cell, width in zip(cells[LEFT:], widths[LEFT:], strict=True)]
    return "  ".join(parts)


def _colored(text: str, row: Row) -> str:
    color = STATE_COLORS.get(row.state, "red")
    return text.replace(row.state, click.style(row.state, fg=color), 1) if color != "green" else text
