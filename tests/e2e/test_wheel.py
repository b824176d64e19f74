"""The wheel holds the product and nothing else, and what it installs in an empty environment serves."""

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Serve

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")


def uv(*arguments: object) -> None:
    subprocess.run([UV, "--quiet", *map(str, arguments)], cwd=ROOT, check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    uv("build", "--wheel", "--out-dir", directory)
    return next(directory.glob("*.whl"))


def test_the_wheel_holds_only_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [Path(name) for name in archive.namelist()]
    roots = {name.parts[0] for name in names}
    assert roots == {"baton", next(root for root in roots if root.endswith(".dist-info"))}
    packages = {name.parts[1] for name in names if name.parts[0] == "baton" and len(name.parts) > 2}
    assert {"engines", "handlers", "ports", "protocol", "testing"} <= packages
    assert not {"bench", "tests", "tools", "doubles"} & packages
    assert Path("baton/models/smoldiff/model.safetensors") in names
    assert Path("baton/views/static/js/app.js") in names


def test_baton_serves_from_the_wheel_in_an_empty_environment(
    wheel: Path, tmp_path: Path, start: Callable[..., Serve]
) -> None:
    environment = tmp_path / "environment"
    uv("venv", "--python", sys.executable, environment)
    uv("pip", "install", "--python", environment, "--constraint", "constraints.txt", wheel)
    installed = subprocess.run(
        [UV, "pip", "freeze", "--python", environment], capture_output=True, text=True, check=True
    )
    assert "torch==" not in installed.stdout, "serving with the echo engine needs no torch"

    serve = start(Serve, settings={"PYTHONPATH": ""}, program=str(environment / "bin" / "baton"))
    libraries = {each.path for each in serve.worker().memory_maps()}
    assert any(path.startswith(str(environment)) for path in libraries), "its packages are those of the environment"
    answer = serve.client().chat.completions.create(
        model="echo", messages=[{"role": "user", "content": "From the wheel"}], max_tokens=14
    )
    assert answer.choices[0].message.content == "From the wheel"
    serve.stop()
