"""When TensorRT-LLM has queued and computed a prompt, from the times in its results."""

from datetime import timedelta
from typing import Protocol

from baton.protocol.outputs import PromptProgress

NS_PER_US = 1000


class TimingMetrics(Protocol):
    """When things happened to one request, by the monotonic clock; zero for what has not."""

    arrival_time: timedelta
    first_scheduled_time: timedelta
    first_token_time: timedelta


class RequestPerfMetrics(Protocol):
    """What the engine has measured of one request."""

    timing_metrics: TimingMetrics


def prompt_progress(metrics: RequestPerfMetrics | None, computed_tokens: int) -> tuple[PromptProgress, ...]:
    """Return what the metrics of a finished request tell about its prompt, of which `computed_tokens` were not cached.

    The library's clock is the monotonic one that `time.perf_counter_ns` reads too. A time that is not known is zero.
    """
    if metrics is None:
        return ()
    times = metrics.timing_metrics
    progress = (
        PromptProgress(_ns(times.arrival_time), "queued"),
        PromptProgress(_ns(times.first_scheduled_time), "first_step"),
        PromptProgress(_ns(times.first_token_time), "prefill_chunk", computed_tokens),
    )
    return tuple(each for each in progress if each.at_ns)


def _ns(time: timedelta) -> int:
    return time // timedelta(microseconds=1) * NS_PER_US
