"""Strategies of requests that are valid: every one of them is answered by the echo engine with its context of 256."""

from hypothesis import strategies as st

Json = dict[str, object]

TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)
WORDS = st.text("abcxyz 0.,\n", min_size=1, max_size=30).filter(lambda text: bool(text.strip()))
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": WORDS}), min_size=1, max_size=3)
PENALTY = st.floats(-2, 2)

SAMPLING: dict[str, st.SearchStrategy[object]] = {
    "max_tokens": st.integers(1, 20),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.none() | WORDS | st.lists(WORDS, max_size=4),
    "frequency_penalty": PENALTY,
    "presence_penalty": PENALTY,
    "n": st.integers(1, 3),
    "user": TEXT,
    "top_k": st.integers(-1, 50),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.1, 2),
    "ignore_eos": st.booleans(),
    "cache_salt": TEXT,
    "stop_token_ids": st.lists(st.integers(0, 255), max_size=3),
    "include_stop_str_in_output": st.booleans(),
}


def request(
    required: dict[str, st.SearchStrategy[object]], **optional: st.SearchStrategy[object]
) -> st.SearchStrategy[Json]:
    """Return the strategy of bodies with all of `required` and some of `optional`."""
    return st.fixed_dictionaries({"model": st.just("echo"), **required}, optional=optional)


def streamed(body: Json) -> st.SearchStrategy[Json]:
    """Return the body as it is, or as a stream with or without usage."""
    options = st.sampled_from([{}, {"stream": False}, {"stream": True}])
    usage = st.sampled_from([{}, {"stream_options": {"include_usage": True}}, {"stream_options": {}}])
    return st.tuples(options, usage).map(lambda both: body | both[0] | (both[1] if both[0].get("stream") else {}))


def scored(body: Json) -> st.SearchStrategy[Json]:
    """Return a chat with or without log-probabilities."""
    logprobs = st.fixed_dictionaries({"logprobs": st.just(True)}, optional={"top_logprobs": st.integers(0, 20)})
    return (st.just({}) | logprobs).map(lambda added: body | added)


TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": WORDS | PARTS}),
    min_size=1,
    max_size=3,
)
CHATS = TURNS.flatmap(
    lambda turns: st.sampled_from([[], [{"role": "system", "content": "Be brief."}]]).map(lambda head: head + turns)
)
PROMPTS = WORDS | st.lists(st.integers(0, 255), min_size=1, max_size=20) | st.lists(WORDS, min_size=1, max_size=3)

VALID: dict[str, st.SearchStrategy[Json]] = {
    "/v1/chat/completions": request({"messages": CHATS}, **SAMPLING).flatmap(streamed).flatmap(scored),
    "/v1/completions": request({"prompt": PROMPTS}, **SAMPLING, logprobs=st.integers(0, 5), suffix=st.just("")).flatmap(
        streamed
    ),
    "/v1/responses": request(
        {"input": WORDS, "max_output_tokens": st.integers(1, 20)},
        instructions=WORDS,
        temperature=st.floats(0, 2),
        top_p=st.floats(0, 1),
        metadata=st.dictionaries(st.text("abc", min_size=1, max_size=5), WORDS, max_size=3),
        stream=st.booleans(),
        store=st.just(False),
    ),
    "/v1/messages": request(
        {"messages": TURNS, "max_tokens": st.integers(1, 20)},
        system=WORDS | PARTS,
        temperature=st.floats(0, 1),
        top_p=st.floats(0, 1),
        top_k=st.integers(1, 50),
        stop_sequences=st.lists(WORDS, max_size=3),
        stream=st.booleans(),
    ),
    "/v1/messages/count_tokens": request({"messages": TURNS}, system=WORDS),
    "/tokenize": request({"prompt": TEXT}, return_token_strs=st.booleans(), add_special_tokens=st.booleans()),
    "/detokenize": request({"tokens": st.lists(st.integers(0, 255), max_size=20)}),
}
