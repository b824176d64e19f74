"""Ports that are needed, and limits of the operating system: files and inotify instances."""

import resource
from collections.abc import Iterator
from pathlib import Path

from baton.config.settings import Settings, endpoint_url
from baton.doctor.findings import Finding, note, ok, problem, warning
from baton.errors import ConfigError
from baton.runtimes.dynamo.inotify import out_of_instances
from baton.runtimes.dynamo.listener import refuse_unusable_address
from baton.topology.instances import refuse_taken_address, running_instances
from baton.topology.process_specs import build_process_specs

FEW_FILES = 4096
FEW_INSTANCES = 512
INSTANCES = Path("/proc/sys/fs/inotify/max_user_instances")


def check_ports(settings: Settings) -> Iterator[Finding]:
    """Check that the endpoint and the system servers can listen."""
    own = next((each for each in running_instances() if each.name == endpoint_url(settings)), None)
    if own is not None:
        yield note("ports", f"{own.name} is that of a `baton serve` that runs (pid {own.pid})")
        return
    try:
        refuse_taken_address(settings)
        yield ok("ports", f"{settings.host}:{settings.port} is free for the endpoint")
    except ConfigError as error:
        yield problem("ports", error.message, f"baton serve --port {settings.port + 1}")
    if settings.system_port:
        yield from _system_ports(settings)


def _system_ports(settings: Settings) -> Iterator[Finding]:
    try:
        specs = build_process_specs(settings, cores=1)
        ports = [settings.system_port + spec.slot for spec in specs]
        for port in ports:
            refuse_unusable_address(settings.system_host, port, "--system-host", "--system-port")
    except ConfigError as error:
        yield problem("ports", error.message, "choose another range with --system-port, or 0 for any free ports")
        return
    yield ok("ports", f"{settings.system_host}:{ports[0]} to {ports[-1]} are free for system servers")


def check_files(_: Settings) -> Iterator[Finding]:
    """Check the number of files, which connections are, that a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FEW_FILES:
        yield ok("files", f"a process may open {soft} files")
        return
    mend = "ulimit -n 65536 (systemd: LimitNOFILE=65536; docker run --ulimit nofile=65536)"
    yield warning("files", f"a process may open {soft} files, which bounds the connections (at most {hard})", mend)


def check_inotify(settings: Settings) -> Iterator[Finding]:
    """Check the number of inotify instances, which discovery by files needs."""
    if settings.runtime.discovery != "file":
        yield note("inotify", f"not needed with --runtime-discovery {settings.runtime.discovery}")
        return
    mend = "sudo sysctl fs.inotify.max_user_instances=1024"
    try:
        allowed = int(INSTANCES.read_text())
    except (OSError, ValueError):
        allowed = 0
    if out_of_instances():
        yield problem("inotify", f"this user has no inotify instance left (of {allowed})", mend)
    elif allowed < FEW_INSTANCES:
        text = f"a user may have {allowed} inotify instances: enough for a dozen `baton serve`"
        yield warning("inotify", text, mend)
    else:
        yield ok("inotify", f"a user may have {allowed} instances")
