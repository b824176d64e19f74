"""Runs all checks in the order in which people look for a cause."""

from baton.config.settings import Settings
from baton.doctor.findings import Check, Finding, problem
from baton.doctor.hardware import check_compiler, check_cpu, check_gpu, check_memory
from baton.doctor.limits import check_files, check_inotify, check_ports
from baton.doctor.models import check_directories, check_model
from baton.doctor.services import check_clock, check_etcd, check_nats
from baton.doctor.software import check_engines, check_packages, check_python
from baton.errors import ConfigError

CHECKS: tuple[Check, ...] = (
    check_python,
    check_packages,
    check_engines,
    check_gpu,
    check_cpu,
    check_compiler,
    check_memory,
    check_ports,
    check_files,
    check_inotify,
    check_etcd,
    check_nats,
    check_clock,
    check_directories,
    check_model,
)


def run_checks(settings: Settings) -> list[Finding]:
    """Return the findings of all checks. Takes some seconds; changes nothing and fetches nothing."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += check(settings)
        except ConfigError as error:
            subject = check.__name__.removeprefix("check_")
            findings.append(problem(subject, error.message, "change the setting that it names"))
        except Exception as error:  # noqa: BLE001 - the findings of the other checks are still shown
            subject = check.__name__.removeprefix("check_")
            findings.append(problem(subject, f"the check itself failed: {error!r}", "report this line as a bug"))
    return findings
