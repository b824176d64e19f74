"""Fields that chat and completions share, and what happens to their values."""

from baton.edge.errors import FieldError
from baton.edge.fields import types
from baton.edge.fields.table import Field, Json, honoured, refused, translated, unsupported, without

# Keeps the most likely token only, as `top_p` 0 does in OpenAI's API. The frontend takes values above 0.
_LEAST_TOP_P = 1e-6
# The frontend keeps temperatures in 32 bits, and so takes what is much smaller for 0.
_LEAST_TEMPERATURE = 1e-37


def top_p(body: Json) -> Json:
    """Replace 0, and what the frontend rounds to 0, by the least value that it takes."""
    given = body["top_p"]
    return {**body, "top_p": _LEAST_TOP_P} if isinstance(given, int | float) and given < _LEAST_TOP_P else body


def _stop(body: Json) -> Json:
    """Empty stop strings stop nothing."""
    stop = body["stop"]
    given = stop if isinstance(stop, list) else [stop]
    kept = [each for each in given if each not in ("", None)]
    if not kept:
        return without(body, "stop")
    return body if len(kept) == len(given) else {**body, "stop": kept}


def _user(body: Json) -> Json:
    user = body["user"]
    return body if isinstance(user, str) and user.strip() else without(body, "user")


def _n(body: Json) -> Json:
    """At temperature 0 all choices are equal. The frontend refuses that, so it gets the same sampling by `top_k`."""
    number, temperature = body["n"], body.get("temperature")
    if not isinstance(number, int) or number < 2:
        return body
    if not isinstance(temperature, int | float) or temperature >= _LEAST_TEMPERATURE:
        return body
    return {**without(body, "temperature"), "top_k": 1}


def _cache_salt(body: Json) -> Json:
    """The frontend passes the salt of `nvext` to its router and to every worker, that of the body to some workers."""
    extensions = body.get("nvext")
    salted = {**extensions} if isinstance(extensions, dict) else {}
    if body["cache_salt"] is not None:
        salted.setdefault("cache_salt", body["cache_salt"])
    return {**without(body, "cache_salt"), **({"nvext": salted} if salted else {})}


def stream_options(body: Json) -> Json:
    """Refuse options without a stream, and padded events."""
    options = body["stream_options"]
    if not isinstance(options, dict):
        return without(body, "stream_options")
    if not body.get("stream"):
        message = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        raise FieldError("stream_options", message, code="invalid_value")
    if options.get("include_obfuscation"):
        raise unsupported("stream_options.include_obfuscation", "events are not padded")
    if "include_obfuscation" in options:
        return {**body, "stream_options": without(options, "include_obfuscation")}
    return body


USER = translated("user", str, _user, "Changes no answer. An empty one is left out.")
STREAM = honoured("stream", bool)
STREAM_OPTIONS = translated(
    "stream_options", types.StreamOptions, stream_options, "Only with `stream`. `include_obfuscation`: only false."
)
TOP_P = translated("top_p", types.Share, top_p, "0 keeps the most likely token only.")
DIFFUSION = honoured("diffusion", types.Diffusion, "Diffusion language models only: [diffusion.md](diffusion.md).")
NVEXT = honoured("nvext", dict[str, object], "Extensions of the runtime: [frontend.md](frontend.md).")

SAMPLING: tuple[Field, ...] = (
    honoured("temperature", types.Temperature),
    TOP_P,
    translated("n", types.Choices, _n, "At temperature 0 all choices are equal. An engine may allow fewer."),
    honoured("frequency_penalty", types.Penalty),
    honoured("presence_penalty", types.Penalty),
    translated("stop", types.Stop, _stop, "Up to 32. Empty texts, and an empty list, stop nothing."),
    honoured("seed", types.Seed),
    honoured("logit_bias", types.LogitBias, "Depends on the engine."),
    STREAM,
    STREAM_OPTIONS,
    USER,
)

EXTENSIONS: tuple[Field, ...] = (
    honoured("top_k", int, "Sample from the most likely tokens only; -1: from all."),
    honoured("min_p", types.Share),
    honoured("repetition_penalty", float, "Above 0, up to 2."),
    honoured("min_tokens", types.Count),
    honoured("ignore_eos", bool),
    honoured("stop_token_ids", list[types.TokenId]),
    honoured("stop_regex", object, "Depends on the engine."),
    honoured("bad_words", object, "Depends on the engine."),
    honoured("include_stop_str_in_output", bool),
    honoured("skip_special_tokens", bool),
    honoured("prompt_logprobs", types.Count, "Depends on the engine."),
    honoured("return_tokens_as_token_ids", bool),
    honoured("return_token_ids", bool),
    honoured("truncate_prompt_tokens", types.Count),
    honoured("guided_json", object, "Guided decoding; as `response_format`."),
    honoured("guided_regex", str),
    honoured("guided_choice", list[str]),
    honoured("guided_grammar", str),
    honoured("guided_decoding_backend", str),
    honoured("guided_whitespace_pattern", str),
    honoured("structural_tag", object, "Depends on the engine."),
    translated("cache_salt", str, _cache_salt, "Separates the prefix caches of tenants; the same as in `nvext`."),
    DIFFUSION,
    NVEXT,
    refused("allowed_token_ids", "no engine applies it"),
    refused("bad_words_token_ids", "no engine applies it"),
    refused("logprob_token_ids", "no engine applies it"),
    refused("detokenize", "answers are text", neutral=(True,)),
    refused("use_beam_search", "there is no beam search", neutral=(False,)),
    refused("length_penalty", "there is no beam search", neutral=(1, 1.0)),
    refused("prompt_embeds", "engines compute the embeddings of a prompt themselves"),
)
