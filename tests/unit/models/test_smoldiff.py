"""smoldiff's files: a token for every byte, a chat template, and what training wrote."""

import json
from pathlib import Path

from baton.models.directory import read_config, resolve_model
from baton.models.tokenizer import HubTokenizer
from tools.smoldiff.directory import ASSISTANT, END, MASK, SYSTEM, USER, VOCABULARY, write_directory
from tools.smoldiff.wordings import KINDS

DIRECTORY = resolve_model("smoldiff", Path())


def test_any_text_has_a_token_for_each_byte() -> None:
    tokenizer = HubTokenizer(DIRECTORY)
    text = "".join(map(chr, range(0x250))) + "  2 \n\r\t 山 😀 it's"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_a_chat_is_the_prompt_that_training_had() -> None:
    tokenizer = HubTokenizer(DIRECTORY)
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": [{"type": "text", "text": "Spell ant"}]},
        {"role": "assistant", "content": "a-n-t"},
        {"role": "user", "content": "1 + 1"},
    ]
    asked = [SYSTEM, *b"Be exact.", END, USER, *b"Spell ant", END, ASSISTANT, *b"a-n-t", END, USER, *b"1 + 1", END]
    assert tokenizer.encode(tokenizer.render_chat(messages)) == [*asked, ASSISTANT]


def test_the_files_are_those_that_the_training_script_writes(tmp_path: Path) -> None:
    write_directory(tmp_path)
    for file in tmp_path.iterdir():
        assert (DIRECTORY / file.name).read_text() == file.read_text()
    config = read_config(DIRECTORY)
    assert (config.vocab_size, config.eos_token_ids) == (VOCABULARY, (END,))
    assert json.loads((DIRECTORY / "config.json").read_text())["mask_token_id"] == MASK


def test_the_log_ends_with_an_accuracy_of_98_percent_for_every_kind() -> None:
    lines = [json.loads(line) for line in (DIRECTORY / "training.jsonl").read_text().splitlines()]
    final = [line for line in lines if line.get("final") == "held_out_problems"][-1]
    assert all(final[kind] >= 0.98 for kind in KINDS)
    assert lines[0]["parameters"] <= 8_000_000
