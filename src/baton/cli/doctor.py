"""`baton doctor`: what is wrong on this machine, and the command that mends it."""

import click
import msgspec

from baton.cli.exit_codes import EXIT_FAILED
from baton.cli.settings_options import settings_command
from baton.config.settings import Settings
from baton.doctor.findings import Finding

MARKS = {"ok": ("ok", "green"), "note": ("-", "white"), "warning": ("!", "yellow"), "problem": ("FAIL", "red")}


def _doctor(settings: Settings) -> int:
    findings = _findings(settings)
    for finding in findings:
        click.echo(_line(finding))
    counts = {level: sum(1 for each in findings if each.level == level) for level in ("problem", "warning")}
    click.echo(f"\n{_summary(counts['problem'], counts['warning'])}")
    return EXIT_FAILED if counts["problem"] else 0


def _doctor_json(settings: Settings) -> int:
    findings = _findings(settings)
    click.echo(msgspec.json.format(msgspec.json.encode({"findings": findings}), indent=2).decode())
    return EXIT_FAILED if any(each.level == "problem" for each in findings) else 0


def _findings(settings: Settings) -> list[Finding]:
    from baton.doctor.run import run_checks

    return run_checks(settings)


def _line(finding: Finding) -> str:
    mark, color = MARKS[finding.level]
    mend = f"\n{'':23}mend: {finding.mend}" if finding.mend else ""
    return f"{click.style(f'{mark:>5}', fg=color)}  {finding.subject:<14}  {finding.text}{mend}"


def _summary(problems: int, warnings: int) -> str:
    if not problems and not warnings:
        return "No problem found."
    return f"{problems} problem(s), {warnings} warning(s)."


doctor = settings_command(
    "doctor",
    "Check this machine for `baton serve` with the same settings, and say how to mend what is wrong.",
    _doctor,
    process="serve",
    as_json=_doctor_json,
    examples=(
        ("baton doctor", "with the default settings"),
        ("baton doctor ./model --engine sglang", "for a model and an engine"),
        ("baton doctor --runtime-discovery etcd --runtime-events nats", "with services"),
        ("baton doctor --json", "for programs"),
    ),
)
