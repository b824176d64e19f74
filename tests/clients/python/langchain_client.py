"""LangChain's ChatOpenAI."""

from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from program import GREETING, PARIS, TOO_HOT, UNKNOWN_MODEL, WRONG_KEY, Server, run, weather


@tool
def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return weather(city)


def model(server: Server, **changes: Any) -> ChatOpenAI:
    options = {"model": server.model, "base_url": server.base_url, "api_key": server.key, "max_retries": 0}
    return ChatOpenAI(**(options | changes))


def chat(server: Server) -> Any:
    return model(server).invoke(GREETING).content


def stream(server: Server) -> Any:
    return [chunk.content for chunk in model(server).stream(GREETING)]


def unknown_model(server: Server) -> Any:
    return model(server, model=UNKNOWN_MODEL).invoke(GREETING)


def bad_parameter(server: Server) -> Any:
    return model(server, temperature=TOO_HOT).invoke(GREETING)


def wrong_key(server: Server) -> Any:
    return model(server, api_key=WRONG_KEY).invoke(GREETING)


def completion(server: Server) -> Any:
    llm = OpenAI(model=server.model, base_url=server.base_url, api_key=server.key, max_tokens=13, max_retries=0)
    return llm.invoke(GREETING)


def tool_loop(server: Server) -> Any:
    """Two turns, each a question, a call of the tool and an answer; the second sees the whole of the first."""
    bound = model(server).bind_tools([get_weather])
    messages: list[Any] = []
    answers = []
    for question in (PARIS, "And in Rome?"):
        messages.append(HumanMessage(question))
        answer = bound.invoke(messages)
        calls = [[call["name"], call["args"]] for call in answer.tool_calls]
        messages += [answer, *(get_weather.invoke(call) for call in answer.tool_calls)]
        messages.append(bound.invoke(messages))
        answers.append([calls, messages[-1].content])
    return answers


def streamed_tool_call(server: Server) -> Any:
    chunks = model(server).bind_tools([get_weather]).stream(PARIS)
    whole = None
    for chunk in chunks:
        whole = chunk if whole is None else whole + chunk
    return [[call["name"], call["args"]] for call in whole.tool_calls]


if __name__ == "__main__":
    run(chat, stream, unknown_model, bad_parameter, wrong_key, completion, tool_loop, streamed_tool_call)
