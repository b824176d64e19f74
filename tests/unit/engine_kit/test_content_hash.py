"""Content hashes of rows: everything that decides on rows is in them, and nothing can be taken for something else."""

from baton.engine_kit.content_hash import rows_hash


def test_a_hash_has_32_hexadecimal_digits_and_is_always_the_same() -> None:
    assert rows_hash("model", b"file", "image") == rows_hash("model", b"file", "image")
    assert len(rows_hash("model", b"")) == 32
    assert int(rows_hash("model", b""), 16)


def test_every_part_counts_and_none_runs_into_another() -> None:
    cases = [
        ("model", b"file"),
        ("model", b"file", "image"),
        ("model", b"file", "video"),
        ("model", b"file", "im", "age"),
        ("model", b"file", "image", ""),
        ("model", b"filE", "image"),
        ("model2", b"file", "image"),
        ("modeli", b"file", "mage"),
        ("model", b"\xff" * 8 + b"file"),
        ("model", b"imagefile"),
    ]
    assert len({rows_hash(*case) for case in cases}) == len(cases)  # type: ignore[arg-type]
