"""How the commands of each page are run: in which deployment, with which files, and which of them cannot run here.

A command that is not run is still parsed (`tests/unit/docs/test_commands.py`).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from baton.config.directories import cache_directory
from baton.config.settings import Settings
from baton.models.demo import DEMOS, prepare_demo
from tests.docs.pages import blocks

SGLANG = "needs SGLang, which has an environment of its own: tests/real_sglang parses and runs such arguments"
TENSORRT = "needs TensorRT-LLM and a GPU"
HUB = "needs a model of the Hugging Face hub"
MIXTURE = "needs a mixture-of-experts model; tests/torch/test_expert_engine.py runs it on a random one"
OTHERS = "needs other machines"
LOAD = "make test-clients runs it, in an environment of its own"
NEWCOMER = "tests/docs/test_newcomer.py runs it, in a fresh clone"


class Plan(NamedTuple):
    """The deployment that a page takes for granted, files that its commands read, and commands that are not run.

    `files` maps a name to the first words of the block of the page that has its content; `replaced` maps texts of the
    page to functions that return those of this machine; `not_run` maps the beginning of a command to the reason. Output
    that depends on the port of the endpoint is not `compared`.
    """

    before: str = ""
    files: Mapping[str, str] = {}
    replaced: Mapping[str, Callable[[Path], str]] = {}
    prepare: Callable[[Path], None] = lambda directory: None
    variables: Mapping[str, str] = {}
    compared: bool = True
    not_run: Mapping[str, str] = {}


def _smollm2(_directory: Path) -> str:
    return str(prepare_demo(DEMOS["smollm2"], cache_directory(Settings()) / "models"))


def _write_dump(directory: Path) -> None:
    """Write counts of experts as a recorder does: the busiest have several times the mean load."""
    import torch

    counts = torch.distributions.Gamma(0.7, 0.001).sample((1, 61, 256)).to(torch.int64)
    counts[:, :3] = 0
    torch.save({"logical_count": counts}, directory / "dump.pt")


def _write_report(directory: Path) -> None:
    """Write a text to summarize, and make the directory of a shell's completions."""
    (directory / "report.txt").write_text("The lighthouse was built in 1870. It has a red light.\n")
    (directory.parent / "home" / ".config" / "fish" / "completions").mkdir(parents=True)


PLANS: dict[str, Plan] = {
    "README.md": Plan(not_run={"make serve": NEWCOMER, "make test": "runs this test"}),
    "docs/start.md": Plan(not_run={"": NEWCOMER}),
    "docs/cli.md": Plan(
        prepare=_write_report,
        compared=False,
        not_run={
            "baton chat     ": "a conversation with a person",
            "baton chat --image": "needs a vision-language model; docs/start.md sends a picture to one",
            "baton chat --url": OTHERS,
            "baton top     ": "goes on until a person ends it",
            "baton top --url": OTHERS,
            "baton logs -f": "goes on until a person ends it",
            "baton logs -n 1000 decode-1": "the worker is started further down",
            "baton doctor": "says what is wrong with this machine, and fails if something is",
            "python3 -m venv": LOAD,
            "aiperf": LOAD,
            "guidellm": LOAD,
        },
    ),
    "docs/cluster.md": Plan(
        not_run={"": "needs several hosts or a cluster: tests/e2e/test_hosts.py, make test-deploy"}
    ),
    "docs/metrics.md": Plan(
        not_run={"prometheus": "runs until it is ended; tests/e2e/test_monitoring.py runs Prometheus"}
    ),
    "docs/security.md": Plan(
        not_run={"baton worker --config settings.yaml": "needs certificates: tests/e2e/test_hosts_tls.py"}
    ),
    "docs/timelines.md": Plan(
        before="baton serve --engine echo",
        variables={"BATON_CONTROL_TOKEN": "a-token-of-this-test"},
        not_run={
            "pip install": "changes the environment of the tests",
            "OTEL": "needs a collector; tests/e2e/test_trace_layouts.py has one",
        },
    ),
    "docs/diffusion.md": Plan(
        not_run={"baton serve --engine torch --model JetLM": HUB, "curl localhost:8000/v1/chat/completions -H": HUB}
    ),
    "docs/engines.md": Plan(not_run={"baton worker --engine sglang": SGLANG, "baton worker --engine trtllm": TENSORRT}),
    "docs/engines/sglang.md": Plan(not_run={"": SGLANG}),
    "docs/engines/trtllm.md": Plan(not_run={"": TENSORRT}),
    "docs/experts.md": Plan(
        prepare=_write_dump,
        not_run={
            "export SGLANG_EXPERT": MIXTURE,
            "baton worker --engine torch": MIXTURE,
            "baton worker --engine sglang": SGLANG,
            "baton ctl 9090 experts": MIXTURE,
        },
    ),
    "docs/frontend.md": Plan(files={"answers.yaml": "weather:"}),
    "docs/operations.md": Plan(
        before="baton serve --system-port 9090",
        replaced={"/models/step-100": _smollm2, "/tmp/profiles": lambda directory: str(directory / "profiles")},
        not_run={
            'curl -s -H "$A" $W/weights/update': "the data of its tensors is abbreviated",
            "baton ctl 9090 lora": "needs SGLang or TensorRT-LLM, and an adapter",
            "curl -s localhost:8000/v1/completions -d": "needs that adapter",
        },
    ),
    "docs/requests.md": Plan(not_run={"lm_eval": "make test-lm-eval runs lm-eval, in an environment of its own"}),
    "docs/router.md": Plan(
        files={"pools.yaml": "mode: disaggregated"},
        not_run={"baton router run --topology global_router.json": "needs pools of Dynamo"},
    ),
}


def plan_of(page: str) -> Plan:
    """Return the plan of a page."""
    return PLANS.get(page, Plan())


def reason_not_to_run(plan: Plan, text: str) -> str | None:
    """Return why a command is not run, None if it is."""
    return next((reason for start, reason in plan.not_run.items() if text.startswith(start)), None)


def block_that_begins(page: str, words: str) -> str:
    """Return the content of the first block of a page that begins with `words`."""
    return next("\n".join(block.lines) + "\n" for block in blocks(page) if "\n".join(block.lines).startswith(words))
