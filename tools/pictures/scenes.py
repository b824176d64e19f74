"""Each picture of the documentation. `python -m tools.generate_docs` writes them to docs/pictures."""

from collections.abc import Callable

from tools.pictures.drawing import Colour, Drawing


def processes() -> str:
    """Draw the processes of a deployment and what moves between them."""
    picture = Drawing(760, 300, "A client calls the frontend, which calls encode, prefill and decode workers")
    picture.box(20, 116, 90, 56, "client", "idle")
    picture.box(170, 70, 170, 148, "", "edge")
    picture.text(255, 92, "frontend process", "middle", 12, soft=True)
    picture.box(186, 104, 138, 44, "edge\nkeys, limits, fields", size=12)
    picture.box(186, 160, 138, 44, "frontend\ntemplate, routing", size=12)
    picture.arrow(110, 144, 168, 144, "HTTP")
    picture.box(470, 20, 150, 56, "encode worker\nimages to rows", "encode", 13)
    picture.box(470, 116, 150, 56, "prefill worker\ncomputes the prompt", "prefill", 13)
    picture.box(470, 212, 150, 56, "decode worker\ngenerates tokens", "decode", 13)
    picture.arrow(340, 112, 468, 52, "1")
    picture.arrow(340, 144, 468, 144, "2  request")
    picture.arrow(340, 176, 468, 236, "2")
    picture.arrow(545, 76, 545, 114)
    picture.text(554, 99, "rows of the image", size=12, soft=True)
    picture.arrow(545, 172, 545, 210)
    picture.text(554, 195, "KV blocks: shm, NIXL, TCP", size=12, soft=True)
    picture.text(255, 246, "tokens come back from the", "middle", 12, soft=True)
    picture.text(255, 262, "decode worker as they are generated", "middle", 12, soft=True)
    return picture.svg()


def interference() -> str:
    """Draw what a long prompt does to running answers, on one worker and on two."""
    picture = Drawing(760, 360, "Steps of one worker that does both, and of a prefill and a decode worker")
    picture.heading(20, 28, "Two aggregated workers: each computes prompts and generates")
    _steps(picture, 46, "worker", [("decode", 6), ("prefill", 1), ("decode", 3), ("prefill", 1), ("decode", 4)])
    picture.text(
        20, 118, "An answer on this worker waits while the prompt of another request is computed:", size=12, soft=True
    )
    _answer(picture, 136, (6, 3, 4))
    picture.line(20, 172, 740, 172, dashed=True)
    picture.heading(20, 200, "One prefill worker and one decode worker")
    _steps(picture, 216, "prefill", [("idle", 3), ("prefill", 1), ("idle", 2), ("prefill", 1), ("idle", 3)])
    _steps(picture, 262, "decode", [("decode", 22)])
    picture.arrow(330, 250, 366, 262)
    picture.text(374, 259, "KV", size=12, soft=True)
    picture.text(
        20,
        322,
        "The answer has an even pace. The first token of the new request needs its KV to be moved first.",
        size=12,
        soft=True,
    )
    return picture.svg()


def _steps(picture: Drawing, top: float, name: str, parts: list[tuple[str, int]]) -> None:
    """Draw a row of steps: short ones that decode, long ones that compute a prompt."""
    picture.text(20, top + 25, name, size=13)
    x = 90.0
    for kind, count in parts:
        for _ in range(count):
            if kind == "prefill":
                picture.box(x, top, 150, 38, "prompt", "prefill", 13)
                x += 154
            elif kind == "decode":
                picture.box(x, top, 22, 38, "", "decode")
                x += 26
            else:
                x += 40


def _answer(picture: Drawing, top: float, groups: tuple[int, ...]) -> None:
    """Draw the tokens of one answer as ticks, with a gap between two groups."""
    x = 90.0
    for number, count in enumerate(groups):
        if number:
            picture.line(x, top + 7, x + 150, top + 7, dashed=True)
            x += 154
        for _ in range(count):
            picture.box(x + 6, top, 10, 14, "", "decode")
            x += 26


def early_handoff() -> str:
    """Draw the messages of an early handoff."""
    picture = Drawing(760, 400, "Early handoff: both workers get the request at once")
    columns = _lifelines(picture, ("frontend", "prefill worker", "decode worker"), 370)
    front, prefill, decode = columns
    picture.arrow(front, 80, prefill, 88, "request, room, secret")
    picture.arrow(front, 104, decode, 118, "request, address of the prefill worker, room, secret", above=False)
    picture.box(prefill - 62, 132, 124, 34, "prompt, chunk 1", "prefill", 12)
    picture.arrow(decode - 62, 148, prefill + 64, 148, "claims the room")
    picture.box(decode - 62, 132, 124, 34, "reserves blocks", "kv", 12)
    picture.box(prefill - 62, 186, 124, 34, "prompt, chunk 2", "prefill", 12)
    picture.arrow(prefill + 64, 204, decode, 204, "KV of chunk 1")
    picture.box(prefill - 62, 240, 124, 34, "last chunk", "prefill", 12)
    picture.arrow(prefill + 64, 258, decode, 258, "KV of chunk 2")
    picture.arrow(prefill, 292, decode, 292, "last KV, lease confirmed")
    picture.box(decode - 62, 304, 124, 44, "first token,\nthen the others", "decode", 12)
    picture.arrow(decode - 64, 332, front, 332, "tokens", above=False)
    return picture.svg()


def late_handoff() -> str:
    """Draw the messages of a late handoff."""
    picture = Drawing(760, 340, "Late handoff: the decode worker gets the request when the prompt is computed")
    front, prefill, decode = _lifelines(picture, ("frontend", "prefill worker", "decode worker"), 310)
    picture.arrow(front, 82, prefill, 90, "request")
    picture.box(prefill - 62, 102, 124, 60, "prompt", "prefill", 12)
    picture.arrow(prefill, 178, front, 178, "ticket: address, room, secret")
    picture.arrow(front, 202, decode, 216, "request, ticket")
    picture.arrow(decode, 236, prefill, 236, "claims the room")
    picture.arrow(prefill, 262, decode, 262, "KV of the whole prompt")
    picture.box(decode - 62, 272, 124, 30, "tokens", "decode", 12)
    picture.arrow(decode - 64, 296, front, 296, "tokens", above=False)
    return picture.svg()


def _lifelines(picture: Drawing, names: tuple[str, str, str], bottom: float) -> tuple[float, float, float]:
    """Draw a column for each process, from top to bottom in time; return where they are."""
    columns = (90.0, 380.0, 660.0)
    for x, name in zip(columns, names, strict=True):
        picture.box(x - 75, 16, 150, 38, name, "plain", 14)
        picture.line(x, 54, x, bottom, dashed=True)
    return columns


def kv_blocks() -> str:
    """Draw which blocks of a prompt move."""
    picture = Drawing(760, 250, "KV blocks of one prompt in the caches of two workers")
    picture.text(20, 62, "prefill worker", size=13)
    picture.text(20, 178, "decode worker", size=13)
    for number in range(8):
        x = 140 + number * 74
        ready = number < 6
        picture.box(
            x, 36, 64, 42, f"block {number}" if ready else "being\ncomputed", "prefill" if ready else "idle", 12
        )
        kind: Colour = "decode" if number < 2 else "kv" if number < 6 else "idle"
        text = (
            "cached" if number < 2 else f"block {number}" if number < 5 else "arriving" if number == 5 else "reserved"
        )
        picture.box(x, 152, 64, 42, text, kind, 12)
        if 2 <= number < 6:
            picture.arrow(x + 32, 80, x + 32, 150)
    picture.text(214, 118, "not sent", "middle", 12, soft=True)
    picture.text(
        20,
        228,
        "Blocks move while the rest of the prompt is computed. Decoding starts when the last one is there.",
        size=12,
        soft=True,
    )
    return picture.svg()


def layouts() -> str:
    """Draw the layouts for images."""
    picture = Drawing(760, 280, "Four layouts: which worker encodes, computes the prompt and generates")
    rows: tuple[tuple[str, list[tuple[str, Colour, int]]], ...] = (
        ("all in one", [("encode, prompt, tokens", "plain", 300)]),
        ("EP/D", [("encode, prompt", "prefill", 195), ("tokens", "decode", 130)]),
        ("E/PD", [("encode", "encode", 110), ("prompt, tokens", "plain", 215)]),
        ("E/P/D", [("encode", "encode", 110), ("prompt", "prefill", 110), ("tokens", "decode", 130)]),
    )
    for number, (name, boxes) in enumerate(rows):
        y = 20 + number * 62
        picture.text(20, y + 27, name, size=14)
        x = 150.0
        for place, (text, colour, width) in enumerate(boxes):
            if place:
                picture.arrow(x - 42, y + 22, x - 3, y + 22, "rows" if colour != "decode" else "KV")
            picture.box(x, y, width, 44, text, colour, 13)
            x += width + 45
    return picture.svg()


def pools() -> str:
    """Draw a global router with its pools."""
    picture = Drawing(760, 270, "A global router sends each request to one pool of each role")
    picture.box(20, 104, 110, 52, "frontend", "edge")
    picture.box(210, 96, 130, 68, "global router\ntopology file", "plain")
    picture.arrow(130, 130, 208, 130, "request")
    rows: tuple[tuple[str, str, Colour], ...] = (
        ("prefill pool short", "prompts below 4,096 tokens", "prefill"),
        ("prefill pool long", "other prompts", "prefill"),
        ("decode pool few", "targets below 50 ms a token", "decode"),
        ("decode pool many", "other targets", "decode"),
    )
    for number, (name, note, colour) in enumerate(rows):
        y = 14 + number * 62
        picture.box(470, y, 270, 48, f"{name}\n{note}", colour, 13)
        picture.arrow(340, 118 + number * 8, 468, y + 24)
    return picture.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "processes": processes,
    "interference": interference,
    "handoff-early": early_handoff,
    "handoff-late": late_handoff,
    "kv-blocks": kv_blocks,
    "layouts": layouts,
    "pools": pools,
}
