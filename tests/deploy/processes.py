"""The Baton processes that manifests start: their settings, as the process itself would read them, and their pods."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from baton.config.load import load, options
from baton.config.settings import Settings
from tests.deploy.rendering import Manifest


class Process:
    """One container that runs `baton`."""

    def __init__(self, manifest: Manifest, others: list[Manifest], directory: Path) -> None:
        self.manifest = manifest
        self.name = manifest["metadata"]["name"]
        self.labels: dict[str, str] = manifest["spec"]["template"]["metadata"]["labels"]
        self.pod: dict[str, Any] = manifest["spec"]["template"]["spec"]
        (self.container,) = self.pod["containers"]
        self._others = others
        self._directory = directory / self.name
        self._directory.mkdir()
        words = [part for argument in self.container["args"] for part in argument.split("=", 1)]
        self.command = "router" if words[:2] == ["router", "run"] else words[0]
        self._words = words[2:] if self.command == "router" else words[1:]

    @property
    def mounts(self) -> dict[str, str]:
        """The volumes by the paths that they are mounted at."""
        return {mount["mountPath"]: mount["name"] for mount in self.container["volumeMounts"]}

    def volume(self, path: str) -> dict[str, Any]:
        """Return the volume that is mounted at `path`."""
        name = self.mounts[path]
        return next(volume for volume in self.pod["volumes"] if volume["name"] == name)

    def port(self, name: str) -> int:
        """Return a port by its name."""
        return int(next(each["containerPort"] for each in self.container["ports"] if each["name"] == name))

    def settings(self) -> Settings:
        """Return the settings: flags that the command has, variables, and its settings file. Raises ConfigError."""
        known = {name: option for option in options() if self.command in option.commands for name in _names(option)}
        words = self._words[: self._words.index("--")] if "--" in self._words else self._words
        given = dict(zip(words[::2], words[1::2], strict=True))
        file = self._settings_file(given.pop("--config"))
        unknown = set(given) - set(known)
        assert not unknown, f"{self.name}: baton {self.command} has no {unknown}"
        variables = {each["name"]: each["value"] for each in self.container.get("env", []) if "value" in each}
        flags = {known[name].key: yaml.safe_load(value) for name, value in given.items()}
        return load(flags, {name: value for name, value in variables.items() if name.startswith("BATON_")}, file)

    def _settings_file(self, path: str) -> Path:
        """Write the ConfigMap that is mounted at `path` to files; return that of the settings."""
        mounted = path if path in self.mounts else str(Path(path).parent)
        name = self.volume(mounted)["configMap"]["name"]
        data = next(each["data"] for each in self._others if _is(each, "ConfigMap", name))
        for file, text in data.items():
            text = text.replace("/etc/baton/settings/topology.yaml", str(self._directory / "topology.yaml"))
            (self._directory / file).write_text(text)
        return self._directory / Path(path).name


def processes(manifests: list[Manifest], directory: Path) -> Iterator[Process]:
    """Yield the processes of Baton among objects."""
    for manifest in manifests:
        if manifest["kind"] == "Deployment":
            yield Process(manifest, manifests, directory)


def _names(option: Any) -> tuple[str, ...]:
    return (option.flag, *option.aliases)


def _is(manifest: Manifest, kind: str, name: str) -> bool:
    return manifest["kind"] == kind and manifest["metadata"]["name"] == name
