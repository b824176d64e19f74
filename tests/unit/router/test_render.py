"""Grids drawn as text: what is where, how wide, and what is said of pools. The pictures are compared whole."""

from textwrap import dedent

from hypothesis import given
from hypothesis import strategies as st

from baton.router.grid import AXES, Axis, Grid
from baton.router.plan import Override, Part, Pool
from baton.router.render import WIDTH, amount, draw_part

POOLS = (
    Pool(name="short", path="a.prefill.generate", priority=0, queue_limit=32, spread="kv"),
    Pool(name="long", path="bb.prefill.generate", priority=10),
)
LEGEND = """
  pool   at                   priority  queue  spread
  short  a.prefill.generate          0     32  kv
  long   bb.prefill.generate        10      -  round-robin"""
LENGTH, TTFT = Axis("length", 0, 2048, 2), Axis("ttft_ms", 50, 2050, 2)


def picture(text: str) -> str:
    return dedent(text).strip("\n")


def test_two_axes_are_a_table_with_the_cell_that_was_asked_for_between_arrows() -> None:
    part = Part(pools=POOLS, grid=Grid((LENGTH, TTFT), (0, 0, 1, 0)), overrides=(Override(5, 10, 0),))
    table = picture(
        """
        prefill: 2 pools, by length and ttft_ms

          length ↓  ttft_ms →
              50         1050        2050
             0 ┌───────────┬───────────┐
               │   short   │   short   │
          1024 ├───────────┼───────────┤
               │  ▶ long ◀ │   short   │
          2048 └───────────┴───────────┘
        """
    )
    rest = f"\n{LEGEND}\n  priority 5 to 10 goes to short wherever it lies"
    assert draw_part("prefill", part, (1, 0)) == table + rest
    assert draw_part("prefill", part) == table.replace("▶ long ◀", "  long  ") + rest


def test_one_axis_is_one_row() -> None:
    part = Part(pools=POOLS, grid=Grid((Axis("itl_ms", 0, 1, 4),), (0, 1, 1, 1)))
    expected = """
        decode: 2 pools, by itl_ms

          itl_ms →
           0         0.25         0.5        0.75          1
           ┌───────────┬───────────┬───────────┬───────────┐
           │   short   │    long   │    long   │    long   │
           └───────────┴───────────┴───────────┴───────────┘
        """
    assert draw_part("decode", part) == picture(expected) + "\n" + LEGEND


def test_three_axes_are_a_table_for_each_bucket_of_the_first() -> None:
    part = Part(pools=POOLS, grid=Grid((LENGTH, TTFT, Axis("itl_ms", 5, 10, 1)), (0, 1, 1, 1)))
    expected = """
        aggregated: 2 pools, by length, ttft_ms and itl_ms

          length 0 to 1024
          ttft_ms ↓  itl_ms →
               5          10
            50 ┌───────────┐
               │   short   │
          1050 ├───────────┤
               │    long   │
          2050 └───────────┘

          length 1024 to 2048
          ttft_ms ↓  itl_ms →
               5          10
            50 ┌───────────┐
               │    long   │
          1050 ├───────────┤
               │  ▶ long ◀ │
          2050 └───────────┘
        """
    assert draw_part("aggregated", part, (1, 1, 0)) == picture(expected) + "\n" + LEGEND


def test_without_axes_there_is_no_table() -> None:
    part = Part(pools=POOLS, grid=Grid((), (1,)))
    assert draw_part("prefill", part, ()) == "prefill: 2 pools, requests go to long\n" + LEGEND
    alone = Part(pools=POOLS[:1], grid=Grid((), (0,)))
    assert draw_part("prefill", alone).startswith("prefill: 1 pool, requests go to short\n")


def test_a_table_that_is_too_wide_goes_on_below() -> None:
    part = Part(pools=POOLS, grid=Grid((LENGTH, Axis("ttft_ms", 0, 1200, 12)), (0,) * 24))
    lines = draw_part("prefill", part).splitlines()
    rulers = [line.split() for line in lines if line.strip()[:1].isdigit() and "─" not in line]
    assert rulers == [[str(n * 100) for n in range(8)], [str(n * 100) for n in range(7, 13)]]
    assert max(map(len, lines)) <= WIDTH


def test_numbers_are_written_as_people_do() -> None:
    numbers = [0, 1048576.0, 22.5, 32768 / 3, 1e12, 0.1 + 0.2]
    assert [amount(number) for number in numbers] == ["0", "1048576", "22.5", "10922.7", "1000000000000", "0.3"]


@st.composite
def parts(draw: st.DrawFn) -> Part:
    names = draw(st.lists(st.sampled_from(AXES), unique=True, max_size=4))
    axes = tuple(Axis(name, 3, draw(st.integers(4, 10**7)), draw(st.integers(1, 9))) for name in names)
    size = 1
    for axis in axes:
        size *= axis.buckets
    pools = tuple(Pool(name=f"pool-{n}", path=f"n{n}.c.e", priority=n) for n in range(3))
    return Part(pools=pools, grid=Grid(axes, tuple(n % 3 for n in range(size))))


@given(parts())
def test_every_cell_is_drawn_once_in_a_frame_that_closes(part: Part) -> None:
    lines = draw_part("aggregated", part).splitlines()
    rows = [line for line in lines if "│" in line]
    drawn = [cell.strip() for line in rows for cell in line.split("│")[1:-1]]
    assert sorted(drawn) == sorted(part.pools[n].name for n in part.grid.cells if part.grid.axes)
    assert max(map(len, lines)) <= WIDTH
    for above, line, below in zip(lines, lines[1:], lines[2:], strict=False):
        if "│" in line:
            walls = [n for n, letter in enumerate(line) if letter == "│"]
            assert all(above[n] in "┌┬┐├┼┤" and below[n] in "├┼┤└┴┘" for n in walls)
