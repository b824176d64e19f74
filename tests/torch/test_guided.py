"""Answers keep the shape that was asked for, whatever the model would say, and no grammar takes the engine down."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("llguidance")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

from baton.engines.torch.guided import MAX_SCHEMA_BYTES, GuideCompiler  # noqa: E402
from baton.engines.torch.reasoning_guide import ReasoningGuide  # noqa: E402
from baton.engines.torch.sampling.sampler import Sampled, sample  # noqa: E402
from baton.engines.torch.sampling_params import Guide, finish_of, make_sampling_params  # noqa: E402
from baton.engines.torch.sequence import Sequence  # noqa: E402
from baton.errors import EngineDead, InvalidRequest, Unsupported  # noqa: E402
from baton.models.defaults import SamplingDefaults  # noqa: E402
from baton.ports.engine import Work  # noqa: E402
from baton.protocol.ids import RequestId  # noqa: E402
from baton.protocol.requests import GuidedDecoding, Sampling, StopConditions  # noqa: E402

EOS, TURN, START = 0, 1, 2
SPECIAL = ["<|end|>", "<|turn|>", "<|start|>"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer"},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WAIT_S = 60


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small byte-level tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [json.dumps(SCHEMA), "yes no maybe the name is", '{"name": "x", "age": 12}'] * 9, trainer
    )
    directory = tmp_path_factory.mktemp("model")
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def vocab(tokenizer: Tokenizer) -> int:
    """The model's vocabulary is padded, as models' are."""
    return int(tokenizer.get_vocab_size()) + 13


@pytest.fixture(scope="module")
def compiler(model_dir: Path, vocab: int) -> Iterator[GuideCompiler]:
    compiler = GuideCompiler(model_dir, vocab, (EOS, TURN))
    yield compiler
    compiler.close()


def guide_of(compiler: GuideCompiler, guided: GuidedDecoding) -> Guide:
    return compiler.compile(guided).result(WAIT_S)()


def allowed_by(guide: Guide) -> set[int]:
    bits = int.from_bytes(guide.mask(), "little")
    return {token for token in range(bits.bit_length()) if bits >> token & 1}


def follow(guide: Guide, tokenizer: Tokenizer, text: str) -> None:
    for token in tokenizer.encode(text).ids:
        assert token in allowed_by(guide)
        guide.accept(token)


def make_sequence(vocab: int, seed: int, guide: Guide | None, stop: StopConditions | None = None) -> Sequence:
    work = Work(
        request_id=RequestId("r"),
        token_ids=(5, 6),
        max_tokens=400,
        sampling=Sampling(seed=seed, temperature=1.0),
        stop=stop or StopConditions(),
        eos_token_ids=(EOS, TURN),
    )
    sequence = Sequence(work, 0, make_sampling_params(work, SamplingDefaults(), vocab), 0)
    sequence.guide = guide
    return sequence


def run(sequences: list[Sequence], vocab: int, seed: int = 0) -> None:
    """Generate from random logits, as the engine would, until every guided sequence has ended."""
    generator = torch.Generator().manual_seed(seed)
    open_ = [sequence for sequence in sequences if sequence.guide is not None]
    while open_:
        logits = torch.randn(len(sequences), vocab, generator=generator)
        logits[:, [EOS, TURN]] += 2.0  # or an open-ended text would seldom end
        batch = [sequence for sequence in sequences if sequence in open_ or sequence.guide is None]
        for sequence, result in zip(batch, sample(logits[: len(batch)], batch), strict=True):
            assert isinstance(result, Sampled)
            sequence.tokens.append(result.token)
            ended = finish_of(sequence.params, result.token, sequence.generated)
            if sequence in open_ and (ended or (sequence.guide and sequence.guide.done)):
                open_.remove(sequence)


def text_of(sequence: Sequence, tokenizer: Tokenizer) -> str:
    tokens = [token for token in sequence.tokens[sequence.prompt_length :] if token not in (EOS, TURN)]
    assert not {START} & set(tokens)
    assert all(token < tokenizer.get_vocab_size() for token in tokens)
    text: str = tokenizer.decode(tokens, skip_special_tokens=False)
    return text


CHOICES = ("yes", "no", "maybe not", 'a|b (c) \\ "d" -#&~/\n', "über", "")
SUM = 'root ::= term ("+" term)*\nterm ::= [0-9] | "(" root ")"'
SUM_LARK = 'start: term ("+" term)*\nterm: /[0-9]/ | "(" start ")"'


def is_sum(text: str) -> bool:
    while (shorter := re.sub(r"\(\d(\+\d)*\)", "1", text)) != text:
        text = shorter
    return re.fullmatch(r"\d(\+\d)*", text) is not None


def is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        person.keys() <= {"name", "age", "kind"} and isinstance(person["name"], str) and isinstance(person["age"], int)
    )


SHAPES = {
    "json": (GuidedDecoding(json=SCHEMA), is_person),
    "json text": (GuidedDecoding(json=json.dumps(SCHEMA)), is_person),
    "regex": (
        GuidedDecoding(regex=r"[A-Z][a-z]{1,5} \d{2,3}(-x)?"),
        lambda text: re.fullmatch(r"[A-Z][a-z]{1,5} \d{2,3}(-x)?", text),
    ),
    "choice": (GuidedDecoding(choice=CHOICES), lambda text: text in CHOICES),
    "gbnf": (GuidedDecoding(grammar=SUM), is_sum),
    "lark": (GuidedDecoding(grammar=SUM_LARK), is_sum),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_output_from_random_logits_matches_the_grammar(
    shape: str, compiler: GuideCompiler, tokenizer: Tokenizer, vocab: int
) -> None:
    guided, fits = SHAPES[shape]
    make = compiler.compile(guided).result(WAIT_S)
    for seed in range(3):
        sequences = [make_sequence(vocab, seed * 10 + row, make() if row % 2 == 0 else None) for row in range(6)]
        run(sequences, vocab, seed)
        for sequence in sequences[::2]:
            if sequence.generated < 400:
                assert fits(text_of(sequence, tokenizer)), text_of(sequence, tokenizer)
        assert any(sequence.generated < 400 for sequence in sequences[::2])


def test_different_grammars_share_a_batch(compiler: GuideCompiler, tokenizer: Tokenizer, vocab: int) -> None:
    pairs = [SHAPES[name] for name in ("json", "regex", "choice")]
    sequences = [make_sequence(vocab, seed, guide_of(compiler, guided)) for seed, (guided, _) in enumerate(pairs)]
    run([*sequences, make_sequence(vocab, 9, None)], vocab)
    for sequence, (_, fits) in zip(sequences, pairs, strict=True):
        assert fits(text_of(sequence, tokenizer))


@pytest.mark.parametrize("anything", [True, {}, "{}", "true"])
def test_true_and_the_empty_schema_are_any_object(
    anything: object, compiler: GuideCompiler, tokenizer: Tokenizer
) -> None:
    guide = guide_of(compiler, GuidedDecoding(json=anything))
    assert all(tokenizer.decode([token]).lstrip().startswith("{") or token for token in allowed_by(guide))
    follow(guide, tokenizer, '{"x": [1, null, {"y": "z"}]}')
    assert guide.done


def test_end_tokens_are_allowed_exactly_where_the_grammar_may_end(
    compiler: GuideCompiler, tokenizer: Tokenizer
) -> None:
    guide = guide_of(compiler, GuidedDecoding(regex="ab?"))
    assert not {EOS, TURN} & allowed_by(guide)
    follow(guide, tokenizer, "a")
    assert {EOS, TURN} < allowed_by(guide)
    assert not guide.done
    follow(guide, tokenizer, "b")
    assert guide.done
    assert allowed_by(guide) == {EOS, TURN}
    guide.accept(TURN)
    assert guide.done


def test_an_end_token_ends_a_match_that_could_continue(compiler: GuideCompiler, tokenizer: Tokenizer) -> None:
    guide = guide_of(compiler, GuidedDecoding(regex="a+"))
    follow(guide, tokenizer, "a")
    guide.accept(EOS)
    assert guide.done


def test_without_end_tokens_a_match_still_ends(model_dir: Path, tokenizer: Tokenizer, vocab: int) -> None:
    for eos in ((), (vocab - 1,), (10**6,)):
        compiler = GuideCompiler(model_dir, vocab, eos)
        guide = guide_of(compiler, GuidedDecoding(regex="ab?"))
        follow(guide, tokenizer, "a")
        assert allowed_by(guide) == {tokenizer.token_to_id("b")}
        follow(guide, tokenizer, "b")
        assert guide.done
        with pytest.raises(InvalidRequest, match="no token"):
            guide.mask()
        compiler.close()


def test_special_and_padding_tokens_are_never_allowed(compiler: GuideCompiler, tokenizer: Tokenizer) -> None:
    guide = guide_of(compiler, GuidedDecoding(regex=r"(?s:.*)"))
    allowed = allowed_by(guide)
    assert START not in allowed
    assert max(allowed) < tokenizer.get_vocab_size()
    named = guide_of(compiler, GuidedDecoding(grammar='start: (<|start|> | "a" | <[2-9]>)+'))
    assert START not in allowed_by(named)
    with pytest.raises(InvalidRequest, match="grammar"):
        guide_of(compiler, GuidedDecoding(grammar="start: <|start|>"))


def test_a_vocabulary_smaller_than_the_tokenizer_is_respected(model_dir: Path) -> None:
    compiler = GuideCompiler(model_dir, 101, (EOS,))
    guide = guide_of(compiler, GuidedDecoding(regex="(?s:.*)"))
    assert len(guide.mask()) == 13
    assert max(allowed_by(guide)) <= 100
    compiler.close()


def test_a_token_that_the_grammar_forbids_is_refused(compiler: GuideCompiler, tokenizer: Tokenizer) -> None:
    guide = guide_of(compiler, GuidedDecoding(regex="a"))
    with pytest.raises(InvalidRequest, match="regex"):
        guide.accept(tokenizer.token_to_id("b"))


def test_min_tokens_cannot_force_more_than_the_grammar_has(
    compiler: GuideCompiler, tokenizer: Tokenizer, vocab: int
) -> None:
    sequence = make_sequence(
        vocab, 1, guide_of(compiler, GuidedDecoding(choice=("yes",))), StopConditions(min_tokens=50)
    )
    run([sequence], vocab)
    assert text_of(sequence, tokenizer) == "yes"


def test_a_whitespace_pattern_is_used(compiler: GuideCompiler, tokenizer: Tokenizer) -> None:
    guided = GuidedDecoding(json={"type": "array", "items": {"type": "integer"}}, whitespace_pattern="_")
    guide = guide_of(compiler, guided)
    follow(guide, tokenizer, "[1,_2")
    assert tokenizer.token_to_id("Ġ") not in allowed_by(guide)


def test_an_empty_whitespace_pattern_allows_none(compiler: GuideCompiler, tokenizer: Tokenizer) -> None:
    guided = GuidedDecoding(json={"type": "array", "items": {"type": "integer"}}, whitespace_pattern="")
    guide = guide_of(compiler, guided)
    follow(guide, tokenizer, "[1,")
    assert tokenizer.token_to_id("Ġ") not in allowed_by(guide)


def test_unknown_formats_are_annotations(compiler: GuideCompiler, tokenizer: Tokenizer) -> None:
    properties = {
        name: {"type": "string", "format": name} for name in ("password", "path", "binary", "uri-reference", "format")
    }
    nested = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/f"}, {"type": "null"}]}}
    schema = {
        "type": "object",
        "properties": {**properties, "nested": nested, "fixed": {"const": {"format": "kept"}}},
        "required": [*properties, "nested", "fixed"],
        "$defs": {"f": {"type": "string", "format": "decimal"}},
    }
    guide = guide_of(compiler, GuidedDecoding(json=schema, whitespace_pattern=""))
    text = "".join(f'"{name}":"x",' for name in properties)
    follow(guide, tokenizer, f'{{{text}"nested":["x",null],"fixed":{{"format":"kept"}}}}')


def test_an_object_has_only_declared_properties(compiler: GuideCompiler, tokenizer: Tokenizer) -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    guide = guide_of(compiler, GuidedDecoding(json=schema, whitespace_pattern=""))
    follow(guide, tokenizer, '{"a":{"b":1')
    assert token_of(tokenizer, ",") not in allowed_by(guide)
    follow(guide, tokenizer, "}")
    assert allowed_by(guide) == {token_of(tokenizer, "}")}
    follow(guide, tokenizer, "}")
    assert guide.done


@pytest.mark.parametrize("others", [True, {"type": "string"}], ids=str)
def test_an_object_has_other_properties_if_the_schema_says_so(
    others: object, compiler: GuideCompiler, tokenizer: Tokenizer
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": others}
    guide = guide_of(compiler, GuidedDecoding(json=schema, whitespace_pattern=""))
    follow(guide, tokenizer, '{"a":1,"b":"x"}')
    assert guide.done


def test_an_object_has_the_properties_of_all_parts_of_its_schema(compiler: GuideCompiler, tokenizer: Tokenizer) -> None:
    parts = [{"properties": {name: {"type": "integer"}}, "required": [name]} for name in "ab"]
    schema = {"type": "object", "allOf": [{"$ref": "#/$defs/first"}, parts[1]], "$defs": {"first": parts[0]}}
    guide = guide_of(compiler, GuidedDecoding(json=schema, whitespace_pattern=""))
    follow(guide, tokenizer, '{"a":1,"b":2}')
    assert guide.done


def test_a_known_format_is_enforced(compiler: GuideCompiler, tokenizer: Tokenizer) -> None:
    guide = guide_of(compiler, GuidedDecoding(json={"type": "string", "format": "date"}))
    follow(guide, tokenizer, '"2026')
    assert tokenizer.token_to_id("x") not in allowed_by(guide)


def test_a_keyword_that_is_not_supported_is_named(compiler: GuideCompiler) -> None:
    with pytest.raises(InvalidRequest, match='does not support the keywords "uniqueItems"'):
        guide_of(compiler, GuidedDecoding(json={"type": "array", "uniqueItems": True}))


def test_a_guide_after_reasoning_begins_with_the_token_after_its_end(
    compiler: GuideCompiler, tokenizer: Tokenizer, vocab: int
) -> None:
    end = token_of(tokenizer, "z")
    guide = ReasoningGuide(guide_of(compiler, GuidedDecoding(choice=("yes",))), end, vocab)
    assert allowed_by(guide) == set(range(vocab))
    for letter in "any":
        guide.accept(token_of(tokenizer, letter))
        assert not guide.done
    guide.accept(end)
    assert end not in allowed_by(guide)
    for letter in "yes":
        guide.accept(token_of(tokenizer, letter))
    assert guide.done


def token_of(tokenizer: Tokenizer, letter: str) -> int:
    token = tokenizer.token_to_id(letter)
    assert token is not None
    return token


def test_equal_requests_compile_once_and_have_separate_guides(compiler: GuideCompiler, tokenizer: Tokenizer) -> None:
    futures = [compiler.compile(GuidedDecoding(regex="(ab)+c")) for _ in range(5)]
    makes = [future.result(WAIT_S) for future in futures]
    assert len({id(make) for make in makes}) == 1
    first, second = makes[0](), makes[0]()
    follow(first, tokenizer, "a")
    assert allowed_by(first) != allowed_by(second) == allowed_by(makes[0]())


def test_cancelling_one_waiter_leaves_the_others(model_dir: Path, vocab: int) -> None:
    compiler = GuideCompiler(model_dir, vocab, (EOS,))
    left, stayed = (compiler.compile(GuidedDecoding(regex="x{1,9}")) for _ in range(2))
    if left.cancel():
        with pytest.raises(CancelledError):
            left.result(WAIT_S)
    assert stayed.result(WAIT_S)().mask()
    compiler.close()


def test_evicted_grammars_are_compiled_again(compiler: GuideCompiler) -> None:
    first = compiler.compile(GuidedDecoding(regex="kept0")).result(WAIT_S)
    for number in range(1, 40):
        compiler.compile(GuidedDecoding(regex=f"kept{number}")).result(WAIT_S)
    assert compiler.compile(GuidedDecoding(regex="kept0")).result(WAIT_S) is not first


def test_after_close_nothing_compiles_and_existing_guides_work(
    model_dir: Path, vocab: int, tokenizer: Tokenizer
) -> None:
    compiler = GuideCompiler(model_dir, vocab, (EOS,))
    guide = guide_of(compiler, GuidedDecoding(regex="ab"))
    waiting = [compiler.compile(GuidedDecoding(regex=f"w{number}")) for number in range(30)]
    compiler.close()
    compiler.close()
    for future in waiting:
        assert future.exception(WAIT_S) is None or isinstance(future.exception(), EngineDead)
    with pytest.raises(EngineDead):
        compiler.compile(GuidedDecoding(regex="a")).result(WAIT_S)
    follow(guide, tokenizer, "ab")
    assert guide.done


def test_a_directory_without_tokenizer_cannot_guide(tmp_path: Path) -> None:
    compiler = GuideCompiler(tmp_path, 100, (EOS,))
    with pytest.raises(Unsupported, match=r"tokenizer\.json"):
        guide_of(compiler, GuidedDecoding(regex="a"))
    compiler.close()


BAD = [
    ("json", GuidedDecoding(json={"type": "nothing"})),
    ("json", GuidedDecoding(json="not json")),
    ("json", GuidedDecoding(json=False)),
    ("json", GuidedDecoding(json=[1])),
    ("json", GuidedDecoding(json=7)),
    ("json", GuidedDecoding(json={"$ref": "#"})),
    ("json", GuidedDecoding(json={"$ref": "http://127.0.0.1:1/schema"})),
    ("json", GuidedDecoding(json={"type": "string", "pattern": "("})),
    ("json", GuidedDecoding(json={"type": "object"}, whitespace_pattern="(")),
    ("regex", GuidedDecoding(regex="(")),
    ("regex", GuidedDecoding(regex="(?=a)b")),
    ("regex", GuidedDecoding(regex=r"(a)\1")),
    ("regex", GuidedDecoding(regex=r"[^\s\S]")),
    ("regex", GuidedDecoding(regex="\ud800")),
    ("choice", GuidedDecoding(choice=())),
    ("grammar", GuidedDecoding(grammar="")),
    ("grammar", GuidedDecoding(grammar="hello")),
    ("grammar", GuidedDecoding(grammar="root ::= nowhere")),
    ("grammar", GuidedDecoding(grammar="root ::= root")),
    ("grammar", GuidedDecoding(grammar='root ::= "a')),
    ("grammar", GuidedDecoding(grammar="start: nowhere")),
    ("exactly one kind", GuidedDecoding()),
    ("exactly one kind", GuidedDecoding(regex="a", choice=("b",))),
    ("structural_tag", GuidedDecoding(structural_tag={})),
    ("backend", GuidedDecoding(regex="a", backend="xgrammar")),
    ("whitespace_pattern", GuidedDecoding(regex="a", whitespace_pattern="")),
]


@pytest.mark.parametrize(("field", "guided"), BAD)
def test_an_invalid_grammar_is_refused_by_name(field: str, guided: GuidedDecoding, compiler: GuideCompiler) -> None:
    with pytest.raises(InvalidRequest) as refused:
        guide_of(compiler, guided)
    assert field in refused.value.message or "guided_decoding: " in refused.value.message
    assert len(refused.value.message) < 500


def chain_of_rules(length: int) -> str:
    return "\n".join(["start: r0", *(f'r{i}: "a" r{i + 1} | "b"' for i in range(length)), f'r{length}: "z"'])


def chain_of_references(length: int) -> dict[str, object]:
    links = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "string"}}}


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HOSTILE = {
    "big schema": GuidedDecoding(json={"enum": ["x" * 100] * (MAX_SCHEMA_BYTES // 100)}),
    "huge schema": GuidedDecoding(json={"properties": {f"p{i}": {"type": "string"} for i in range(200_000)}}),
    "deep schema": GuidedDecoding(json=nested(300)),
    "very deep schema": GuidedDecoding(json='{"not":' * 30_000 + "{}" + "}" * 30_000),
    "product of unions": GuidedDecoding(
        json={"allOf": [{"anyOf": [{"required": [f"p{i}"]}, {"required": [f"q{i}"]}]} for i in range(20)]}
    ),
    "long chain of references": GuidedDecoding(json=chain_of_references(1500)),
    "repeated repetition": GuidedDecoding(regex="(x{1000}){1000}{1000}"),
    "deep regex": GuidedDecoding(regex="(" * 7000 + "a" + ")" * 7000),
    "long regex": GuidedDecoding(regex="(a|b)?" * 50_000),
    "optional run": GuidedDecoding(regex="(a|b)?" * 2700),
    "deep grammar": GuidedDecoding(grammar="root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "deep lark": GuidedDecoding(grammar="start: " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "long chain of rules": GuidedDecoding(grammar=chain_of_rules(1000)),
    "empty lines": GuidedDecoding(grammar="\n" * 30_000),
    "doubling": GuidedDecoding(
        grammar="\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)), 'r60 ::= "a"'])
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_and_the_next_one_compiles(name: str, compiler: GuideCompiler) -> None:
    with pytest.raises(InvalidRequest):
        guide_of(compiler, HOSTILE[name])
    assert guide_of(compiler, GuidedDecoding(regex="fine")).mask()


@pytest.mark.parametrize(
    "guided", [GuidedDecoding(json=chain_of_references(900)), GuidedDecoding(grammar=chain_of_rules(490))]
)
def test_a_chain_just_inside_the_limits_does_not_overflow_a_stack(
    guided: GuidedDecoding, compiler: GuideCompiler
) -> None:
    guide = guide_of(compiler, guided)
    for _ in range(30):
        guide.accept(max(allowed_by(guide)))


def test_a_grammar_that_becomes_too_complex_raises_invalid_request(
    compiler: GuideCompiler, tokenizer: Tokenizer, vocab: int
) -> None:
    guide = guide_of(compiler, GuidedDecoding(regex="(.|\n)*a(.|\n){2000}b(.|\n){2000}"))
    tokens = [tokenizer.token_to_id(letter) for letter in "ab"]

    def walk() -> None:
        for step in range(2000):
            guide.accept(tokens[step * step % 7 % 2])
            guide.mask()

    with pytest.raises(InvalidRequest, match="too many"):
        walk()
