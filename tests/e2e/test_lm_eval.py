"""lm-eval scores a local task through Baton as it does with transformers. Needs scripts/lm-eval-venv.sh to have run."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.config.directories import cache_directory
from baton.config.settings import Settings
from baton.errors import ConfigError
from baton.models.demo import DEMOS, prepare_demo
from tests.e2e.harness import Serve

pytest.importorskip("torch")
pytest.importorskip("transformers")

VENV = Path(os.environ.get("BATON_LM_EVAL_VENV", ".venv-lm-eval"))
LM_EVAL = VENV / "bin" / "lm_eval"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not LM_EVAL.exists(), reason="lm-eval is not installed: run scripts/lm-eval-venv.sh"),
]

QUESTIONS = (
    ("The capital of France is", ("Paris", "Berlin", "a kind of cheese", "seven"), 0),
    ("Two plus two equals", ("five", "four", "a river", "Monday"), 1),
    ("The opposite of hot is", ("warm", "spicy", "cold", "fire"), 2),
    ("Water is made of hydrogen and", ("iron", "gold", "salt", "oxygen"), 3),
    ("A week has", ("seven days", "ten days", "two hours", "no end"), 0),
    ("Cats like to chase", ("mountains", "mice", "ideas", "the letter Q"), 1),
    ("The sun rises in the", ("north", "cellar", "east", "soup"), 2),
    ("“Größe” is a word of the language", ("French", "Latin", "English", "German"), 3),
)
TASK = """
task: local_questions
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
"""


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return prepare_demo(DEMOS["smollm2"], cache_directory(Settings()) / "models")
    except ConfigError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="module")
def serve(start_shared: Callable[..., Serve], model: Path) -> Iterator[Serve]:
    serve = start_shared(Serve, "--model", "smollm2", "--torch-dtype", "float32", engine="torch")
    yield serve
    serve.stop()


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A folder with one task of questions with four answers each."""
    data = tmp_path / "questions.jsonl"
    rows = [{"question": text, "choices": list(choices), "answer": answer} for text, choices, answer in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "local_questions.yaml").write_text(TASK.format(data=data))
    return folder


def evaluate(task: Path, output: Path, *model: str) -> tuple[dict[str, Any], list[list[tuple[float, bool]]]]:
    """Return the metrics of the task, and for each answer its score and whether it is the greedy one."""
    command = [str(LM_EVAL), "--tasks", "local_questions", "--include_path", str(task), *model]
    subprocess.run(
        [*command, "--log_samples", "--output_path", str(output)],
        check=True,
        timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(output / "home")},
    )
    (results,) = output.rglob("results_*.json")
    (samples,) = output.rglob("samples_*.jsonl")
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    scores = [[_score(choice) for choice in row["filtered_resps"]] for row in rows]
    return json.loads(results.read_text())["results"]["local_questions"], scores


def _score(choice: list[Any]) -> tuple[float, bool]:
    score, is_greedy = choice
    return float(score), str(is_greedy) == "True"


def test_loglikelihood_is_that_of_transformers(serve: Serve, model: Path, task: Path, tmp_path: Path) -> None:
    arguments = f"model=smollm2,base_url={serve.url}/v1/completions,tokenizer={model},tokenizer_backend=huggingface"
    found, scores = evaluate(
        task, tmp_path / "baton", "--model", "local-completions", "--model_args", arguments, "--batch_size", "4"
    )
    local = f"pretrained={model},dtype=float32"
    expected, wanted = evaluate(task, tmp_path / "hf", "--model", "hf", "--model_args", local, "--device", "cpu")
    assert [[score for score, _ in question] for question in scores] == [
        pytest.approx([score for score, _ in question], abs=1e-3) for question in wanted
    ]
    assert [[greedy for _, greedy in question] for question in scores] == [
        [greedy for _, greedy in question] for question in wanted
    ]
    assert {name: value for name, value in found.items() if name.startswith("acc")} == {
        name: value for name, value in expected.items() if name.startswith("acc")
    }
    assert len({max(range(4), key=lambda at: question[at][0]) for question in scores}) > 1, "answers differ"
