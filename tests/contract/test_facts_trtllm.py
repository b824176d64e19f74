"""The TensorRT-LLM adapter uses nothing that a supported version lacks.

Three checks: the types that the adapter declares match the facts, nothing in it evades those types (mypy checks their
use), and the double, which is built from the facts, raises for everything else.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from baton.config.engines import TrtllmOptions
from baton.engines.echo.engine import MODEL_DIR
from baton.engines.trtllm import compat, handoff, kv_events, library_types, media_handles, readings
from baton.engines.trtllm.llm_args import (
    NOT_AUTODEPLOY,
    build_arguments,
    build_encoder_arguments,
    plan_arguments,
    plan_encoder_arguments,
)
from baton.errors import ConfigError
from tests.doubles.trtllm import World, make_library
from tests.doubles.trtllm_facts import FACTS_FILE, NotInFacts, keys_in, load_facts, problems_of, type_escapes

FACTS = load_facts()
PACKAGE = Path(inspect.getfile(library_types)).parent
CONTENT = msgspec.json.decode((FACTS_FILE).read_bytes())


def double(version: str) -> Any:
    return make_library(version, World(), CollectorRegistry())


def test_the_adapter_supports_the_versions_of_the_facts() -> None:
    for version in (*FACTS, "1.3.0rc23", "1.3.0rc25+cu13"):
        assert compat.features_of(version).version == version


@pytest.mark.parametrize(
    "version", ["1.1.0", "1.2.0", "1.2.0rc6", "1.3.0rc21", "1.3.0rc26", "1.3.0", "1.4.0rc1", "2.0", "unknown"]
)
def test_versions_that_the_facts_do_not_cover_are_refused_by_name(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"{version} is installed.*1\.2\.1, 1\.3\.0rc22 to 1\.3\.0rc25"):
        compat.features_of(version)


def test_every_type_matches_the_facts_of_every_version() -> None:
    assert problems_of(inspect.getsource(library_types), library_types.SOURCES, FACTS) == []


def test_every_imported_class_is_in_the_facts() -> None:
    for version in FACTS.values():
        assert [path for path in compat.PATHS.values() if not version.has(path)] == []
        if version.version.startswith("1.3"):
            assert [path for path in compat.PATHS_13.values() if not version.has(path)] == []


def test_every_type_is_of_a_class_in_the_facts_or_of_pydantic() -> None:
    types = set(re.findall(r"^class (\w+)\(", inspect.getsource(library_types), re.MULTILINE))
    known = {name.removesuffix("12").removesuffix("13") for name in library_types.SOURCES}
    passed_on = {"Make", "MakeLlm", "MakeSampling", "MakeGuided", "MakeDisaggregated", "MakeScheduling", "MakeLora"}
    passed_on |= {"MakeEncoder"}
    assert {name.removesuffix("12").removesuffix("13") for name in types} - known - passed_on == {
        "FieldInfo",
        "ArgumentsModel",
    }


def test_nothing_evades_the_types() -> None:
    found = {path.name: type_escapes(path.read_text()) for path in PACKAGE.glob("*.py")}
    imports = found.pop("compat.py")
    assert len(imports) == 1, "classes are fetched by name in one place"
    assert {name: escapes for name, escapes in found.items() if escapes} == {}


def test_every_key_of_stats_and_events_is_in_the_facts() -> None:
    for version in FACTS.values():
        stats = {key for keys in version.content["stats_keys"].values() for key in keys}
        events = set(version.content["kv_event_keys"])
        newer = {"attentionDpRank", "cache_salt", "layer_group_id"}
        allowed = newer if version.version.startswith("1.2") else set()
        assert keys_in(inspect.getsource(readings)) <= stats | allowed
        assert keys_in(inspect.getsource(kv_events)) <= events | allowed
    assert {"usedNumBlocks", "kvCacheStats"} <= keys_in(inspect.getsource(readings)), "the keys are found"
    assert {"parent_hash", "window_size"} <= keys_in(inspect.getsource(kv_events)), "the keys are found"


def test_handoff_fields_and_request_types_are_the_librarys() -> None:
    wire = {field.name for field in msgspec.structs.fields(handoff.HandoffParams)} - {"prompt_token_ids"}
    wire |= {field.name for field in msgspec.structs.fields(media_handles.Handles)}
    assert wire <= FACTS["1.3.0rc22"].keywords("disaggregated_params.DisaggregatedParams")
    assert wire <= FACTS["1.3.0rc25"].keywords("disaggregated_params.DisaggregatedParams")
    assert {handoff.CONTEXT_ONLY, handoff.GENERATION_ONLY, handoff.CONTEXT_AND_GENERATION} == set(
        CONTENT["request_types"]
    )


@pytest.mark.parametrize("request_type", [None, "context_only", "generation_only"])
@pytest.mark.parametrize("backend", ["pytorch", "_autodeploy"])
@pytest.mark.parametrize("version", FACTS)
def test_default_arguments_are_the_librarys(version: str, backend: Any, request_type: Any) -> None:
    options = TrtllmOptions(backend=backend, guided="xgrammar")
    tree = plan_arguments(options, {}, MODEL_DIR, request_type, context=512)
    arguments = build_arguments(double(version), options, tree)
    path = "llmapi.llm_args.TorchLlmArgs" if backend == "pytorch" else "_torch.auto_deploy.llm_args.LlmArgs"
    assert set(arguments) <= set(FACTS[version].fields(path))
    assert not set(arguments) & set(NOT_AUTODEPLOY)


@pytest.mark.parametrize("version", FACTS)
def test_the_arguments_of_an_encoder_are_the_librarys(version: str) -> None:
    tree = plan_encoder_arguments(TrtllmOptions(), {"trust_remote_code": True}, MODEL_DIR)
    arguments = build_encoder_arguments(double(version), tree)
    assert set(arguments) <= set(FACTS[version].fields("llmapi.llm_args.TorchLlmArgs"))
    with pytest.raises(ConfigError, match="no_such"):
        build_encoder_arguments(double(version), {**tree, "no_such": 1})


# The checks find something


@pytest.mark.parametrize(
    ("declaration", "addition"),
    [
        ("class Result(Protocol):", "    tokens_so_far: int"),
        ("class Llm(LibraryEngine, Protocol):", "    def get_kv_cache_capacity(self) -> int: ..."),
        ("class Llm(LibraryEngine, Protocol):", "    def shutdown(self, timeout: float) -> None: ..."),
        ("class SamplingFields(TypedDict, total=False):", "    thinking_token_budget: int"),
        ("class GenerateFields(TypedDict, total=False):", "    priority: float"),
        ("class DisaggregatedFields13(DisaggregatedFields, total=False):", "    conversation_id: str"),
        ("class MakeHandoffId13(Protocol):", "    def __call__(self, *, machine: int) -> int: ..."),
        ("class EncodeFields(TypedDict):", "    streaming: bool"),
        ("class SharedTensor(Protocol):", "    def release(self) -> None: ..."),
        ("class EncodeResult(Protocol):", "    embeddings: object"),
        ("class MediaFields(TypedDict, total=False):", "    multi_modal_files: list[str]"),
        ("class LoadVideo(Protocol):", "    def __call__(self, *, path: str) -> object: ..."),
    ],
)
def test_a_member_that_some_version_lacks_is_found(declaration: str, addition: str) -> None:
    source = inspect.getsource(library_types)
    assert declaration in source
    assert (
        len(problems_of(source.replace(declaration, f"{declaration}\n{addition}"), library_types.SOURCES, FACTS)) >= 1
    )


def test_an_escape_from_the_types_is_found() -> None:
    assert type_escapes("if hasattr(llm, 'abort'): llm.abort()")
    assert type_escapes("from typing import Any")
    assert type_escapes("llm.abort()  # type: " + "ignore[attr-defined]")


def test_the_double_raises_for_a_keyword_that_its_version_lacks() -> None:
    old, new = double("1.2.1"), double("1.3.0rc22")
    assert new.sampling_params(thinking_token_budget=1)
    for library, field in ((old, "thinking_token_budget"), (old, "no_such"), (new, "no_such")):
        with pytest.raises(NotInFacts, match=field):
            library.sampling_params(**{field: 1})
    with pytest.raises(NotInFacts, match="machine_id"):
        new.disaggregated_params(machine_id=1)
    with pytest.raises(NotInFacts, match="buckets"):
        old.metrics_collector(labels={}, buckets=())


def test_the_double_raises_for_attributes_and_calls_that_its_version_lacks() -> None:
    def llm(version: str) -> Any:
        options = TrtllmOptions()
        library = double(version)
        return library.llm(
            **build_arguments(library, options, plan_arguments(options, {}, MODEL_DIR, None, context=512))
        )

    old, new = llm("1.2.1"), llm("1.3.0rc22")
    try:
        assert new.get_kv_cache_capacity()
        with pytest.raises(NotInFacts, match="get_kv_cache_capacity"):
            old.get_kv_cache_capacity()
        with pytest.raises(NotInFacts, match="priority"):
            old.generate_async(inputs={}, sampling_params=None, priority=0.5)
        with pytest.raises(NotInFacts, match="wait"):
            new.get_stats(wait=1)
        with pytest.raises(NotInFacts, match="tokens"):
            double("1.2.1").sampling_params(max_tokens=1).tokens  # noqa: B018
    finally:
        old.shutdown()
        new.shutdown()
