"""Every hostile case ends as documented, leaves nothing behind, and the next request works."""

from pathlib import Path

import msgspec
import pytest

from baton.errors import BatonError
from baton.media.fetch import Fetcher
from baton.media.images import decode_image
from baton.media.loader import PolicyLoader
from baton.media.policy import Policy
from baton.media.video import by_count, decode_video
from baton.protocol.media import EmbeddingFile, LoadedMediaItem
from baton.testing import eventually, run_bounded
from tests.unit.media.hostile_cases import CASES, FILES, Case, Lab, answer, prepare
from tests.unit.media.media_sites import data_url, media_url, png, site

DOCS = Path(__file__).parents[3] / "docs" / "media.md"


def decoded(item: LoadedMediaItem) -> str:
    if isinstance(item, EmbeddingFile):
        return f"{item.rows} rows"
    if item.modality == "video":
        return f"{len(decode_video(item, by_count(4)).frames)} frames"
    picture = decode_image(item)
    assert item.size == picture.size
    return f"{picture.width} x {picture.height}, first pixel {picture.getpixel((0, 0))}"


async def outcome(loader: PolicyLoader, case: Case, lab: Lab) -> str:
    try:
        return "taken: " + "; ".join(map(decoded, await loader.load(case.urls(lab))))
    except BatonError as error:
        return f"{error.status}: {error.message}"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hostile_media_end_as_documented(case: Case, tmp_path: Path) -> None:
    async def body() -> None:
        prepare(tmp_path)
        (tmp_path / "allowed" / "sub").mkdir()
        options = case.options
        if case in FILES[1:]:
            options = msgspec.structs.replace(options, local_dirs=str(tmp_path / "allowed"))
        loader = PolicyLoader(options, Fetcher(Policy(options), case.resolver))
        async with site(answer) as server:
            result = await outcome(loader, case, Lab(server, tmp_path / "allowed"))
            status, _, reason = case.result.partition(": ")
            assert result.startswith(f"{status}: ")
            assert reason in result
            if case.options.private == "":
                assert server.requests == []
            await eventually(lambda: loader.held_bytes == 0)
            assert len(await loader.load([media_url(data_url(png()))])) == 1, "the next request works"
            await loader.close()

    run_bounded(body())


def test_the_documented_cases_are_these() -> None:
    lines = DOCS.read_text().partition("## Hostile media")[2].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    documented = [(name.strip().strip("`"), result.strip()) for name, result in rows[1:]]
    assert documented == [(case.name, case.result) for case in CASES]
    assert len({case.name for case in CASES}) == len(CASES) >= 40
