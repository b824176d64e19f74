"""LlamaIndex's OpenAILike."""

from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from program import GREETING, PARIS, TOO_HOT, UNKNOWN_MODEL, WRONG_KEY, Server, run, weather


def model(server: Server, **changes: Any) -> OpenAILike:
    options = {"model": server.model, "api_base": server.base_url, "api_key": server.key}
    fixed = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0, "context_window": 8192}
    return OpenAILike(**(options | fixed | changes))


def hello() -> list[ChatMessage]:
    return [ChatMessage(role="user", content=GREETING)]


def chat(server: Server) -> Any:
    return model(server).chat(hello()).message.content


def stream(server: Server) -> Any:
    return [chunk.delta for chunk in model(server).stream_chat(hello())]


def unknown_model(server: Server) -> Any:
    return model(server, model=UNKNOWN_MODEL).chat(hello())


def bad_parameter(server: Server) -> Any:
    return model(server).chat(hello(), temperature=TOO_HOT)


def wrong_key(server: Server) -> Any:
    return model(server, api_key=WRONG_KEY).chat(hello())


def completion(server: Server) -> Any:
    return model(server, is_chat_model=False, max_tokens=13).complete(GREETING).text


def tool_call(server: Server) -> Any:
    tool = FunctionTool.from_defaults(weather, name="get_weather")
    llm = model(server)
    answer = llm.chat_with_tools([tool], user_msg=PARIS)
    return [[call.tool_name, call.tool_kwargs] for call in llm.get_tool_calls_from_response(answer)]


if __name__ == "__main__":
    run(chat, stream, unknown_model, bad_parameter, wrong_key, completion, tool_call)
