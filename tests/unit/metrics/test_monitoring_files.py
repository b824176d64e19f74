"""Alert rules and dashboard: every expression is valid, every metric in them exists, every alert has its tests."""

import re
from pathlib import Path

import pytest
import yaml

from tests.monitoring_files import (
    ALERT_TESTS,
    ALERTS,
    CONFIGURATION,
    METRIC,
    alert_rules,
    dashboard_queries,
    needs_prometheus,
    panels,
    promtool,
)
from tools.metrics_page import all_families, series_names

MATCHED = re.compile(r"(\w+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


def test_alerts_and_dashboard_use_only_metrics_that_exist() -> None:
    named = {name for rule in alert_rules() for name in METRIC.findall(rule["expr"])}
    named |= {name for _, query in dashboard_queries() for name in METRIC.findall(query)}
    assert named - series_names() == set()
    assert len(named) > 40


@pytest.mark.parametrize(
    "query", [*(rule["expr"] for rule in alert_rules()), *(query for _, query in dashboard_queries())]
)
def test_label_values_in_queries_are_those_that_metrics_have(query: str) -> None:
    """A typing error in one would be an alert that never fires."""
    families = {family.name: family for family in all_families()}
    for name, matchers in MATCHED.findall(query):
        family = families.get(re.sub("_(bucket|sum|count)$", "", name))
        for label, _, pattern in MATCHER.findall(matchers) if family is not None else ():
            values = next((each.values for each in family.labels if each.name == label), ())
            wanted = pattern.split("|") if values and "." not in pattern else []
            assert set(wanted) <= set(values), f"{name}: {label} has no value {pattern}"


def test_every_alert_says_what_has_happened_and_what_to_do() -> None:
    for rule in alert_rules():
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert len(rule["annotations"]["summary"]) > 10, rule["alert"]
        assert len(rule["annotations"]["description"]) > 20, rule["alert"]


def test_every_alert_has_a_test_that_fires_it_and_one_that_does_not() -> None:
    tests = {test["name"] for test in yaml.safe_load(ALERT_TESTS.read_text())["tests"]}
    for rule in alert_rules():
        assert {f"{rule['alert']} fires", f"{rule['alert']} does not fire"} <= tests


def test_panels_have_titles_of_their_own() -> None:
    titles = [panel["title"] for panel in panels()]
    assert len(titles) == len(set(titles)) > 20


@needs_prometheus
@pytest.mark.process
def test_promtool_accepts_the_rules_and_the_configuration() -> None:
    promtool("check", "rules", str(ALERTS))
    promtool("check", "config", str(CONFIGURATION))


@needs_prometheus
@pytest.mark.process
def test_alerts_fire_when_they_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(ALERT_TESTS))


@needs_prometheus
@pytest.mark.process
def test_promtool_parses_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = [{"record": f"query:{number}", "expr": query} for number, (_, query) in enumerate(dashboard_queries())]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(file))
