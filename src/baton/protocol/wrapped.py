"""The wrapped prefill request of Dynamo's SGLang workers: `{request, sampling_params, data_parallel_rank}`.

`sampling_params` has SGLang's names. They take precedence over the options of the inner request, as they do there.
"""

from collections.abc import Mapping

from baton.protocol.codec import DecodeError, Wire, decode_request
from baton.protocol.requests import GenerateRequest

_STOP = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
    "stop_token_ids": "stop_token_ids",
    "stop": "stop",
}
_SAMPLING = {"sampling_seed": "seed"}
_OUTPUT = {"skip_special_tokens": "skip_special_tokens"}
_GUIDED = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}


def decode_prefill_request(raw: object) -> GenerateRequest:
    """Return the request that `raw` describes, wrapped or flat. Raises DecodeError."""
    is_wrapped = isinstance(raw, Mapping) and "request" in raw and "token_ids" not in raw
    return decode_request(_unwrap(raw) if is_wrapped and isinstance(raw, Mapping) else raw)


def _unwrap(raw: Mapping[str, object]) -> Wire:
    unknown = raw.keys() - {"request", "sampling_params", "data_parallel_rank"}
    if unknown:
        raise DecodeError(f"{min(unknown)}: a wrapped request has no such field")
    request, params = dict(_object(raw, "request")), _object(raw, "sampling_params")
    stop, output = _section(request, "stop_conditions"), _section(request, "output_options")
    sampling = _section(request, "sampling_options")
    guided: Wire = {}
    for name, value in params.items():
        if value is None:
            continue
        for names, section in ((_STOP, stop), (_OUTPUT, output), (_GUIDED, guided)):
            if name in names:
                section[names[name]] = value
                break
        else:
            sampling[_SAMPLING.get(name, name)] = value
    if guided:
        sampling["guided_decoding"] = guided
    request |= {"stop_conditions": stop, "sampling_options": sampling, "output_options": output}
    if (rank := raw.get("data_parallel_rank")) is not None:
        request["routing"] = _section(request, "routing") | {"dp_rank": rank}
    return request


def _object(raw: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DecodeError(f"Expected `object`, got `{type(value).__name__}` - at `$.{key}`")
    return value


def _section(request: Wire, key: str) -> Wire:
    return dict(_object(request, key))
