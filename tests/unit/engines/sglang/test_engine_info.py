"""What a started SGLang reports about itself."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engines.sglang.engine_info import engine_info, facts_of
from baton.engines.sglang.launch_mode import LaunchMode
from baton.engines.sglang.server_args import Arguments

VALUES: dict[str, Any] = {
    "page_size": 16,
    "max_running_requests": 8,
    "nnodes": 1,
    "node_rank": 0,
    "dist_init_addr": None,
}


@pytest.mark.parametrize("ranks", [1, 4])
def test_blocks_have_a_page_of_each_rank_of_decode_context_parallelism(ranks: int, tmp_path: Path) -> None:
    values = VALUES | {"dcp_size": ranks}
    scheduler = {"max_req_input_len": 1000, "max_total_num_tokens": 6400}
    engine: Any = SimpleNamespace(
        server_args=SimpleNamespace(resolved_dict=lambda: values),
        _scheduler_init_result=SimpleNamespace(scheduler_infos=[scheduler]),
        tokenizer_manager=None,
    )
    arguments = Arguments(given=frozenset(), values=values)
    info = engine_info(facts_of(engine, []), LaunchMode(), arguments, tmp_path, "model")
    assert (info.block_size, info.total_blocks) == (16 * ranks, 400 // ranks)
