"""Requests that attack the HTTP of a server, and the answers that are right.

A request whose length can be read in two ways must be refused, because a proxy in front of Baton may read it the other
way (request smuggling). So each request that hides a second one has `smuggled` as the id of that.
"""

import json

from tests.e2e.wire import chunked, head

MIB = 1 << 20
CHAT = "/v1/chat/completions"
REQUEST = {"model": "echo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
BODY = json.dumps(REQUEST).encode()
LENGTH = f"Content-Length: {len(BODY)}"
CHUNKED = "Transfer-Encoding: chunked"
SMUGGLED = head(LENGTH, request_id="smuggled") + BODY

Outcomes = set[int | None]
REFUSED: Outcomes = {400}
SERVED: Outcomes = {200}
CLOSED = None


def body_of(length: str) -> bytes:
    """A body that is complete by `length`, followed by a hidden request."""
    return head(f"Content-Length: {length}") + BODY + SMUGGLED


def coded(*encodings: str) -> bytes:
    """A body that ends at once for whoever reads chunks, and includes a hidden request for whoever does not."""
    rest = b"0\r\n\r\n" + SMUGGLED
    return head(f"Content-Length: {len(rest)}", *encodings) + rest


def alone(*encodings: str) -> bytes:
    return head(*encodings) + chunked(BODY)


def pieces(data: bytes) -> bytes:
    return head(CHUNKED) + data


def get(target: str, *lines: str, version: str = "HTTP/1.1") -> bytes:
    return head(*lines, request=f"GET {target} {version}")


def line(text: str) -> bytes:
    """A good request with one more line in its head."""
    return head(LENGTH, text) + BODY


# The bytes, and the statuses that are right; None is a closed connection without an answer.
LENGTHS: dict[str, tuple[bytes, Outcomes]] = {
    "length and chunked": (coded(CHUNKED), REFUSED),
    "chunked and length": (head(CHUNKED, f"Content-Length: {len(BODY)}") + chunked(BODY), REFUSED),
    "length and chunked in capitals": (coded("TRANSFER-ENCODING: CHUNKED"), REFUSED),
    "length and unknown coding": (coded("Transfer-Encoding: xchunked"), REFUSED),
    "length and identity": (coded("Transfer-Encoding: identity"), REFUSED),
    "length and a space before the colon": (coded("Transfer-Encoding : chunked"), REFUSED),
    "length and a tab before the colon": (coded("Transfer-Encoding\t: chunked"), REFUSED),
    "length and a vertical tab": (coded("Transfer-Encoding: \x0bchunked"), REFUSED),
    "length and a folded coding": (coded("Transfer-Encoding:\r\n chunked"), REFUSED),
    "length and a coding behind a bare LF": (coded("X-Y: z\nTransfer-Encoding: chunked"), REFUSED),
    "length and a coding behind a bare CR": (coded("X-Y: z\rTransfer-Encoding: chunked"), REFUSED),
    "length and a line that begins with a space": (coded(" Transfer-Encoding: chunked"), REFUSED),
    "length and a quoted coding": (coded('Transfer-Encoding: "chunked"'), REFUSED),
    "two codings, the last unknown": (alone(CHUNKED, "Transfer-Encoding: identity"), REFUSED),
    "two codings, the first unknown": (alone("Transfer-Encoding: identity", CHUNKED), REFUSED),
    "chunked is not the last coding": (alone("Transfer-Encoding: chunked, identity"), REFUSED),
    "chunked twice": (alone("Transfer-Encoding: chunked, chunked"), REFUSED),
    "compressed": (alone("Transfer-Encoding: gzip, chunked"), REFUSED | {501}),
    "an unknown coding alone": (alone("Transfer-Encoding: xchunked"), REFUSED | {501}),
    "an empty coding": (alone("Transfer-Encoding:"), REFUSED),
    "chunked in capitals": (alone("Transfer-Encoding: CHUNKED"), SERVED),
    "chunked behind a tab": (alone("Transfer-Encoding:\tchunked"), SERVED | REFUSED),
    "chunked in HTTP/1.0": (
        head(CHUNKED, request=f"POST {CHAT} HTTP/1.0") + chunked(BODY) + SMUGGLED,
        REFUSED,
    ),
    "another name with an underscore": (head(LENGTH, "Transfer_Encoding: chunked") + BODY, SERVED | REFUSED),
    "two lengths": (head(LENGTH, "Content-Length: 5") + BODY + SMUGGLED, REFUSED),
    "two lengths, the first short": (head("Content-Length: 5", LENGTH) + BODY + SMUGGLED, REFUSED),
    "the same length twice": (head(LENGTH, LENGTH) + BODY, SERVED | REFUSED),
    "a list of lengths": (body_of(f"{len(BODY)}, {len(BODY)}"), REFUSED),
    "a list of different lengths": (body_of(f"{len(BODY)}, 0"), REFUSED),
    "a signed length": (body_of(f"+{len(BODY)}"), REFUSED),
    "a negative length": (body_of("-1"), REFUSED),
    "minus zero": (body_of("-0"), REFUSED),
    "a hexadecimal length": (body_of("0x10"), REFUSED),
    "a length with an underscore": (body_of("1_0"), REFUSED),
    "a length with a space in it": (body_of("1 0"), REFUSED),
    "a length with a point": (body_of("10.0"), REFUSED),
    "a length with an exponent": (body_of("1e1"), REFUSED),
    "a length with a digit of another script": (body_of("\xb2"), REFUSED),
    "a length of null bytes": (body_of("\x00"), REFUSED),
    "an empty length": (body_of(""), REFUSED),
    "a length of words": (body_of("many"), REFUSED),
    "a length above 64 bits": (body_of("18446744073709551617"), REFUSED | {413}),
    "a length of forty digits": (body_of("9" * 40), REFUSED | {413}),
    "a length above the limit": (head(f"Content-Length: {1 << 40}"), {413}),
    "leading zeros": (head(f"Content-Length: 000{len(BODY)}") + BODY, SERVED | REFUSED),
}
CHUNKS: dict[str, tuple[bytes, Outcomes]] = {
    "an extension": (pieces(b"%x;a=b\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)), SERVED | REFUSED),
    "an extension with a bare LF": (pieces(b"%x;a\nb\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)), REFUSED),
    "an extension with a bare CR": (pieces(b"%x;a\rb\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)), REFUSED),
    "a huge extension": (pieces(b"1;" + b"a" * 4 * MIB + b"\r\n{\r\n0\r\n\r\n"), {400, 413, 431, CLOSED}),
    "thousands of extensions": (pieces(b"1;a=b\r\n \r\n" * 20_000 + b"0\r\n\r\n"), {400, 413, 431, CLOSED}),
    "a size with 0x": (pieces(b"0x%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)), REFUSED),
    "a signed size": (pieces(b"+%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)), REFUSED),
    "a negative size": (pieces(b"-1\r\n" + BODY), REFUSED),
    "no size": (pieces(b"\r\n%b\r\n0\r\n\r\n" % BODY), REFUSED),
    "a size of words": (pieces(b"many\r\n%b\r\n0\r\n\r\n" % BODY), REFUSED),
    "a size with an underscore": (pieces(b"1_0\r\n%b\r\n0\r\n\r\n" % BODY), REFUSED),
    "a size above 64 bits": (pieces(b"1" + b"0" * 16 + b"\r\n" + BODY), REFUSED | {413}),
    "a size of forty digits": (pieces(b"f" * 40 + b"\r\n" + BODY), REFUSED | {413}),
    "a size above the limit": (pieces(b"7fffffffffffffff\r\n" + b"a" * 2 * MIB), REFUSED | {413}),
    "a size that ends with a bare LF": (pieces(b"%x\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)), REFUSED),
    "a size that ends with a bare CR": (pieces(b"%x\r%b\r\n0\r\n\r\n" % (len(BODY), BODY)), REFUSED),
    "a chunk longer than its size": (pieces(b"2\r\n%b\r\n0\r\n\r\n" % BODY + SMUGGLED), REFUSED),
    "a chunk that ends with a bare LF": (pieces(b"%x\r\n%b\n0\r\n\r\n" % (len(BODY), BODY)), REFUSED),
    "a trailer": (pieces(b"%x\r\n%b\r\n0\r\nX-Y: z\r\n\r\n" % (len(BODY), BODY)), SERVED | REFUSED),
    "a trailer with a length": (
        pieces(b"%x\r\n%b\r\n0\r\nContent-Length: 5\r\n\r\n" % (len(BODY), BODY)),
        SERVED | REFUSED,
    ),
    "a huge trailer": (
        pieces(b"%x\r\n%b\r\n0\r\nX: %b\r\n\r\n" % (len(BODY), BODY, b"a" * MIB)),
        {400, 413, 431, CLOSED},
    ),
    "chunks of one byte": (pieces(chunked(*(bytes([byte]) for byte in BODY))), SERVED),
    "a body that does not end": (pieces(b"10000\r\n%b\r\n" % (b"a" * 65536) * 64), {413}),
}
HEADS: dict[str, tuple[bytes, Outcomes]] = {
    "lines that end with a bare LF": (head(LENGTH).replace(b"\r\n", b"\n") + BODY, REFUSED),
    "a head that ends with a bare LF": (head(LENGTH)[:-4] + b"\n\n" + BODY, REFUSED),
    "a bare CR in a value": (line("X-Y: a\rb"), REFUSED),
    "a null byte in a value": (line("X-Y: a\x00b"), REFUSED),
    "a null byte in a name": (line("X\x00Y: a"), REFUSED),
    "a control character in a value": (line("X-Y: a\x01b"), REFUSED | SERVED),
    "a space in a name": (line("X Y: a"), REFUSED),
    "no name": (line(": a"), REFUSED),
    "no colon": (line("X-Y"), REFUSED),
    "a folded line": (line("X-Y: a\r\n b"), REFUSED),
    "a name of another script": (line("X-\xe9: a"), REFUSED),
    "a value of another script": (line("X-Y: \xe9"), SERVED | REFUSED),
    "two hosts": (line("Host: elsewhere"), REFUSED),
    "no host": (b"GET /v1/models HTTP/1.1\r\n\r\n", REFUSED),
    "an unknown expectation": (line("Expect: the-unexpected"), {200, 400, 417}),
    "an upgrade": (line("Connection: Upgrade\r\nUpgrade: websocket"), SERVED | REFUSED),
    "an upgrade to HTTP/2": (line("Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA"), SERVED),
    "hop-by-hop names in Connection": (line("Connection: content-length, host, content-type"), {200, 400, 415}),
    "a huge value": (line("X-Y: " + "a" * MIB), {400, 431}),
    "a huge name": (line("X" * MIB + ": a"), {400, 431}),
    "thousands of headers": (line("\r\n".join(f"X-{number}: a" for number in range(10_000))), {400, 431}),
    "an id with a line break": (head(LENGTH, request_id="a\nX-Y: b") + BODY, REFUSED),
    "an id that is no id": (head(LENGTH, request_id="<script>\xff") + BODY, SERVED | REFUSED),
}
TARGETS: dict[str, tuple[bytes, Outcomes]] = {
    "absolute form": (get("http://localhost/v1/models"), SERVED | REFUSED),
    "absolute form of another host": (get("http://elsewhere/v1/models"), SERVED | REFUSED | {421}),
    "absolute form of another scheme": (get("ftp://elsewhere/v1/models"), SERVED | REFUSED | {404, 421}),
    "no path": (get("http://elsewhere"), {400, 404}),
    "two slashes": (get("//v1/models"), {400, 404}),
    "steps upwards": (get("/v1/../v1/models"), {400, 404}),
    "an asterisk": (get("*"), {400, 404}),
    "a relative path": (get("v1/models"), {400, 404}),
    "a fragment": (get("/v1/models#part"), {200, 400, 404}),
    "a null byte": (get("/v1/models\x00"), REFUSED),
    "an encoded null byte": (get("/v1/models/%00"), {400, 404}),
    "a target of another script": (get("/v1/mod\xe9ls"), {400, 404}),
    "a tab": (get("/v1/models\t"), REFUSED),
    "a space": (get("/v1/models /x"), REFUSED),
    "a backslash": (get("\\v1\\models"), {400, 404}),
    "an encoded line break": (get("/v1/models/a%0d%0aX-Y:%20b"), {400, 404}),
    "a huge target": (get("/" + "a" * MIB), {400, 414, 431}),
    "a huge query": (get("/v1/models?" + "a" * MIB), {400, 414, 431}),
    "a tunnel": (head(request="CONNECT elsewhere:443 HTTP/1.1"), {400, 404, 405}),
    "a trace": (head(request="TRACE /v1/models HTTP/1.1"), {400, 405, 501}),
    "an unknown method": (head(request="FROBNICATE /v1/models HTTP/1.1"), {400, 405, 501}),
    "a method in small letters": (head(request="get /v1/models HTTP/1.1"), {400, 405, 501}),
    "no method": (b" /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", REFUSED),
    "no target": (b"GET HTTP/1.1\r\nHost: localhost\r\n\r\n", REFUSED),
    "HTTP/0.9": (b"GET /v1/models\r\n\r\n", {400, CLOSED}),
    "HTTP/1.2": (get("/v1/models", version="HTTP/1.2"), {200, 400, 505}),
    "HTTP/2.0": (get("/v1/models", version="HTTP/2.0"), {400, 505}),
    "HTTP in small letters": (get("/v1/models", version="http/1.1"), REFUSED),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 505, CLOSED}),
    "a TLS handshake": (bytes.fromhex("16030100f8010000f40303") + bytes(200), {400, CLOSED}),
    "noise": (bytes(range(256)) * 16, {400, CLOSED}),
    "an empty line, then a request": (b"\r\n" + get("/v1/models"), SERVED | REFUSED),
}
CORPUS = {
    f"{name}: {kind}": case
    for name, cases in (("length", LENGTHS), ("chunk", CHUNKS), ("head", HEADS), ("target", TARGETS))
    for kind, case in cases.items()
}
# Requests that are refused for what they ask, not for how they are written.
KEPT = {
    "chunk: thousands of extensions",
    *(f"target: {kind}" for kind in TARGETS),
    *(f"head: {kind}" for kind in HEADS),
}
# Other spellings of a route that needs the control token.
ADMIN = [
    *("/busy_threshold", "/busy_threshold/", "//busy_threshold", "/v1/../busy_threshold", "/./busy_threshold"),
    *(
        "/%62usy_threshold",
        "/busy_threshold%00",
        "/busy_threshold?",
        "/BUSY_THRESHOLD",
        "/v1/models/../../busy_threshold",
    ),
    *(
        "http://localhost/busy_threshold",
        "/v1/models/%2e%2e/%2e%2e/busy_threshold",
        "/busy_threshold;x",
        "/busy_threshold#",
    ),
]
