"""Shrink SGLang's FlashAttention 3 library to what it runs on a Hopper GPU in bfloat16 with heads of 128.

Usage: keep_hopper_kernels.py LIBRARY OUTPUT

The library holds GPU code for several architectures, types and head sizes, over a gigabyte. What is not kept becomes a
hole in the output: offsets stay, and holes take no space on disk and none to speak of in an archive. A kernel that is
left out fails when it is first launched.
"""

import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

CONTAINER_MAGIC = 0xBA55ED50
SM90 = 90
# Mangled names: the size of the value's head and the type of the main loop, and two kernels that have neither. Kernels
# that SGLang does not launch for such a model have the type abbreviated, NS_10bfloat16_t, and are left out.
KEPT = re.compile(rb"Li128EN7cutlass10bfloat16_tEf|FlashAttnFwdCombine|prepare_varlen_num_blocks")


def section_range(elf: bytes, name: bytes) -> range:
    """Return the bytes of a section of a little-endian 64-bit ELF file."""
    (headers_at,) = struct.unpack_from("<Q", elf, 40)
    size, count, names_index = struct.unpack_from("<3H", elf, 58)
    headers = [struct.unpack_from("<2I4Q", elf, headers_at + size * index) for index in range(count)]
    names_at = headers[names_index][4]
    for name_offset, _, _, _, start, length in headers:
        text = elf[names_at + name_offset : elf.index(b"\0", names_at + name_offset)]
        if text == name:
            return range(start, start + length)
    raise SystemExit(f"there is no section {name.decode()}")


def code_ranges(data: bytes, section: range) -> Iterator[tuple[int, range]]:
    """Yield the architecture and the bytes of every entry of the fat binaries in a section."""
    at = section.start
    while at < section.stop:
        magic, _, header_size, body_size = struct.unpack_from("<I2HQ", data, at)
        if magic != CONTAINER_MAGIC:
            at += 8  # containers are aligned, with padding between them
            continue
        entry, end = at + header_size, at + header_size + body_size
        while entry < end:
            _, _, entry_header, code_size = struct.unpack_from("<2HIQ", data, entry)
            (architecture,) = struct.unpack_from("<I", data, entry + 28)
            code = range(entry + entry_header, entry + entry_header + code_size)
            yield architecture, code
            entry = code.stop
        at = end


def main(library: Path, output: Path) -> None:
    """Write `output`."""
    data = library.read_bytes()
    dropped = [
        code
        for architecture, code in code_ranges(data, section_range(data, b".nv_fatbin"))
        if architecture != SM90 or not KEPT.search(data, code.start, code.stop)
    ]
    with output.open("wb") as file:
        done = 0
        for hole in dropped:
            file.write(data[done : hole.start])
            file.seek(len(hole), 1)
            done = hole.stop
        file.write(data[done:])
        file.truncate(len(data))
    print(f"kept {(len(data) - sum(map(len, dropped))) >> 20} of {len(data) >> 20} MiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
