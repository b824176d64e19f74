"""The multimodal benchmark: its requests, what it reads from metrics, and which cells a line of a table compares."""

import base64
import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from bench.disagg_client import TimedResponse
from bench.multimodal_client import Pictures, has_token, image_request
from bench.multimodal_load import mixture_until
from bench.multimodal_report import (
    EncodeCell,
    MixedCell,
    RequestCell,
    encode_rows,
    first_token_rows,
    mixed_row,
    transfer_rows,
)
from bench.multimodal_system import Layout, Readings, measured_order, total

pytestmark = pytest.mark.torch

METRICS = """# HELP baton_media_cache_lookups_total Media
baton_media_cache_lookups_total{result="hit"} 1.0
baton_media_cache_lookups_total{result="miss"} 2.0
baton_first_output_seconds_sum 0.5
baton_first_output_seconds_count 3.0"""


def request_cell(system: str, first_s: float, cache: str = "cold", encode_s: float = 0.0) -> RequestCell:
    return RequestCell(
        model="smolsee",
        system=system,
        images=1,
        cache=cache,
        repeat=0,
        first_s=first_s,
        encode_s=encode_s,
        transfer_s=encode_s / 100,
        transfer_bytes=18_000 if encode_s else 0,
        misses=1,
    )


def encode_cell(variant: str, rate: float, repeat: int = 0) -> EncodeCell:
    return EncodeCell(
        model="smolsee", variant=variant, at_once=8, threads=1, repeat=repeat, images_per_s=rate, cpu_s=0.01
    )


def mixed_cell(system: str, images_per_s: float, number: int) -> MixedCell:
    return MixedCell(
        system=system,
        round=number,
        undisturbed_gaps_s=[0.01],
        paced_gaps_s=[0.02],
        paced_first_s=[0.5],
        saturated_gaps_s=[0.03],
        saturated_first_s=[],
        images_per_s=images_per_s,
        tokens_per_s=100.0,
        busy_cores=2.0,
    )


def test_metrics_are_summed_over_the_samples_with_a_label() -> None:
    assert total(METRICS, "baton_media_cache_lookups_total") == 3.0
    assert total(METRICS, "baton_media_cache_lookups_total", 'result="miss"') == 2.0
    assert total(METRICS, "baton_first_output_seconds_sum") == 0.5
    assert total(METRICS, "baton_transfer_seconds_sum") == 0.0


def test_readings_are_differences_of_totals() -> None:
    assert Readings(3.0, 2.0, 100.0, 5.0).since(Readings(1.0, 2.0, 40.0, 4.0)) == Readings(2.0, 0.0, 60.0, 1.0)


def test_an_encode_worker_comes_with_its_flag() -> None:
    assert Layout(2, 0).flags == ("--workers", "2", "--kv-transports", "shm")
    assert Layout(1, 1, "tcp").flags == ("--workers", "1", "--encode", "1", "--kv-transports", "tcp")


def test_each_system_is_the_first_one_in_turn() -> None:
    orders = [measured_order(["a", "b", "c"], repeat) for repeat in range(4)]
    assert ["".join(order) for order in orders] == ["abc", "bca", "cab", "abc"]


def test_pictures_are_never_repeated_and_the_text_comes_before_them() -> None:
    files = Pictures(1).make(2)
    assert files[0] != files[1]
    assert Pictures(1).make(2) == files
    body = json.loads(image_request("label", files).partition(b"\r\n\r\n")[2])
    text, *images, _question = body["messages"][0]["content"]
    assert text["text"].startswith("label")
    assert [base64.b64decode(image["image_url"]["url"].partition(",")[2]) for image in images] == files


@pytest.mark.parametrize(
    ("event", "counts"),
    [
        (b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}', True),
        (b'data: {"choices":[{"delta":{"content":"","role":"assistant"},"finish_reason":null}]}', False),
        (b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}', True),
        (b'data: {"choices":[],"usage":{}}', False),
    ],
)
def test_an_event_counts_with_text_or_an_end(event: bytes, counts: bool) -> None:
    assert has_token(event) is counts


def test_a_load_ends_with_its_time() -> None:
    text, early, late = TimedResponse(0.0, [1.0, 2.0, 4.0]), TimedResponse(0.0, [2.5]), TimedResponse(0.0, [3.5])
    mixture = mixture_until(3.0, 3.0, [text], [early, late])
    assert mixture.texts[0].gaps_s == [1.0]
    assert mixture.images == [early]


def test_first_tokens_are_compared_by_cache() -> None:
    cells = [
        request_cell("all in one", 0.1),
        request_cell("E/PD, shm", 0.15, encode_s=0.05),
        request_cell("all in one", 0.05, "warm"),
        request_cell("E/PD, shm", 0.06, "warm"),
    ]
    assert first_token_rows(cells) == [
        ["smolsee", "1", "cold", "100.0", "150.0", "50.0"],
        ["smolsee", "1", "warm", "50.0", "60.0", "10.0"],
    ]


def test_transfers_are_compared_with_the_encoding_of_the_same_request() -> None:
    cells = [request_cell("all in one", 0.1), request_cell("E/PD, tcp", 0.1, encode_s=0.05)]
    assert transfer_rows(cells) == [["smolsee", "1", "tcp", "18", "50.0", "0.50", "1.00"]]


def test_mixed_loads_are_compared_round_by_round() -> None:
    cells = [
        mixed_cell("two aggregated", 2.0, 0),
        mixed_cell("encode + PD", 4.0, 0),
        mixed_cell("two aggregated", 4.0, 1),
        mixed_cell("encode + PD", 4.0, 1),
    ]
    name = "image requests/s, saturated"
    assert mixed_row(cells, name) == [name, "3.0 (2.0 to 4.0)", "4.0 (4.0 to 4.0)", "1.50 (1.00 to 2.00)"]


def test_encoders_are_compared_for_the_same_work() -> None:
    cells = [
        encode_cell("Baton, from files", 40.0),
        encode_cell("transformers, from files", 20.0),
        encode_cell("transformers, from files, one batch", 10.0),
        encode_cell("Baton, tower alone", 60.0),
        encode_cell("transformers, tower alone", 60.0),
    ]
    assert [(row[3], row[5]) for row in encode_rows(cells)] == [
        ("Baton, from files", "-"),
        ("transformers, from files", "2.00"),
        ("transformers, from files, one batch", "4.00"),
        ("Baton, tower alone", "-"),
        ("transformers, tower alone", "1.00"),
    ]
