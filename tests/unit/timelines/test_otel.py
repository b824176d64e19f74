"""OpenTelemetry: which variables turn it on, and that nothing of it is imported otherwise."""

import os
import subprocess
import sys

import pytest

from baton.timelines.otel import exports_traces

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}


@pytest.mark.parametrize(
    ("variables", "exports"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, False),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "console, otlp"}, True),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, False),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "false"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
    ],
)
def test_the_standard_variables_turn_the_export_on_and_off(variables: dict[str, str], exports: bool) -> None:
    assert exports_traces(variables) is exports


@pytest.mark.process
def test_nothing_of_opentelemetry_is_imported_when_it_is_off() -> None:
    program = (
        "import sys\n"
        "from baton.config.settings import Settings\n"
        "from baton.process.process_reports import ProcessReports\n"
        "import baton.process.worker, baton.process.router, baton.process.frontend, baton.process.text_processor\n"
        "reports = ProcessReports(Settings(), 'aggregated')\n"
        "print(reports.timelines.is_on, [name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env=_plain_environment(),
    )
    assert result.stdout.strip() == "True []"


def _plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
