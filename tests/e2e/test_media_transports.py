"""Images in the layouts that move rows or KV, over each transport and with both styles of handoff; and many at once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.transfer import nixl
from tests.e2e.test_media_layouts import (
    LAYOUTS,
    answer_to,
    assert_nothing_is_left,
    picture,
    said_to,
    start,
    wait_for_encoders,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

TRANSPORTS = ["shm", "tcp", pytest.param("nixl", marks=pytest.mark.skipif(not nixl.available(), reason="no NIXL"))]
REQUESTS = 200


@pytest.mark.parametrize("handoff", ["early", "late"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("layout", ["EP/D", "E/PD", "E/P/D"])
def test_every_layout_works_over_every_transport(tmp_path: Path, layout: str, transport: str, handoff: str) -> None:
    if handoff == "late" and "prefill" not in LAYOUTS[layout]:
        pytest.skip("no handoff of KV in this layout")
    system = start(tmp_path, layout, "--kv-transports", transport, "--kv-handoff", handoff)
    try:
        system.wait_ready()
        wait_for_encoders(system, layout)
        parts = (picture(30, 20), "then ", picture(64, 64, (1, 2, 3)), picture(30, 20))
        assert answer_to(system, *parts) == said_to(*parts)
        fetched = [
            system.metric("baton_transfer_bytes_total", worker, transport=transport) for worker in range(system.workers)
        ]
        assert sum(map(bool, fetched)) == (2 if layout == "E/P/D" else 1), "rows, and KV"
        assert_nothing_is_left(system)
        system.stop()
    finally:
        system.close()


def test_many_images_at_once_are_all_answered_although_few_fit_the_cache(tmp_path: Path) -> None:
    system = start(tmp_path, "E/P/D", "--media-cache-bytes", str(40 * 16384), "--echo-encode-ms", "20")
    try:
        system.wait_ready()
        wait_for_encoders(system, "E/P/D")
        pictures = [picture(10 + number, 20) for number in range(REQUESTS)]
        with ThreadPoolExecutor(REQUESTS) as pool:
            answers = list(pool.map(lambda each: answer_to(system, "a ", each, " b ", pictures[0]), pictures))
        assert answers == [said_to("a ", each, " b ", pictures[0]) for each in pictures]
        assert_nothing_is_left(system)
        system.stop()
    finally:
        system.close()
