"""Grids and pools rendered as text. Whole outputs are compared."""

from textwrap import dedent

from hypothesis import given
from hypothesis import strategies as st

from baton.router.grid import AXES, Axis, Grid
from baton.router.plan import Override, Pool, RolePlan
from baton.router.render import WIDTH, format_number, render_role

POOLS = (
    Pool(name="short", path="a.prefill.generate", priority=0, queue_limit=32, spread="kv"),
    Pool(name="long", path="bb.prefill.generate", priority=10),
)
LEGEND = """
  pool   endpoint             priority  queue  spread
  short  a.prefill.generate          0     32  kv
  long   bb.prefill.generate        10      -  round-robin"""
LENGTH, TTFT = Axis("length", 0, 2048, 2), Axis("ttft_ms", 50, 2050, 2)


def expect(text: str) -> str:
    return dedent(text).strip("\n")


def test_two_axes_are_a_table_with_the_marked_cell_between_arrows() -> None:
    plan = RolePlan(pools=POOLS, grid=Grid((LENGTH, TTFT), (0, 0, 1, 0)), overrides=(Override(5, 10, 0),))
    table = expect(
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
    rest = f"\n{LEGEND}\n  priority 5 to 10 always goes to short"
    assert render_role("prefill", plan, (1, 0)) == table + rest
    assert render_role("prefill", plan) == table.replace("▶ long ◀", "  long  ") + rest


def test_one_axis_is_one_row() -> None:
    plan = RolePlan(pools=POOLS, grid=Grid((Axis("itl_ms", 0, 1, 4),), (0, 1, 1, 1)))
    expected = """
        decode: 2 pools, by itl_ms

          itl_ms →
           0         0.25         0.5        0.75          1
           ┌───────────┬───────────┬───────────┬───────────┐
           │   short   │    long   │    long   │    long   │
           └───────────┴───────────┴───────────┴───────────┘
        """
    assert render_role("decode", plan) == expect(expected) + "\n" + LEGEND


def test_three_axes_are_a_table_for_each_bucket_of_the_first() -> None:
    plan = RolePlan(pools=POOLS, grid=Grid((LENGTH, TTFT, Axis("itl_ms", 5, 10, 1)), (0, 1, 1, 1)))
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
    assert render_role("aggregated", plan, (1, 1, 0)) == expect(expected) + "\n" + LEGEND


def test_without_axes_there_is_no_table() -> None:
    plan = RolePlan(pools=POOLS, grid=Grid((), (1,)))
    assert render_role("prefill", plan, ()) == "prefill: 2 pools, all requests go to long\n" + LEGEND
    alone = RolePlan(pools=POOLS[:1], grid=Grid((), (0,)))
    assert render_role("prefill", alone).startswith("prefill: 1 pool, all requests go to short\n")


def test_wide_table_is_split() -> None:
    plan = RolePlan(pools=POOLS, grid=Grid((LENGTH, Axis("ttft_ms", 0, 1200, 12)), (0,) * 24))
    lines = render_role("prefill", plan).splitlines()
    rulers = [line.split() for line in lines if line.strip()[:1].isdigit() and "─" not in line]
    assert rulers == [[str(n * 100) for n in range(8)], [str(n * 100) for n in range(7, 13)]]
    assert max(map(len, lines)) <= WIDTH


def test_numbers_have_no_exponent_or_trailing_zeros() -> None:
    numbers = [0, 1048576.0, 22.5, 32768 / 3, 1e12, 0.1 + 0.2]
    assert [format_number(number) for number in numbers] == ["0", "1048576", "22.5", "10922.7", "1000000000000", "0.3"]


@st.composite
def role_plans(draw: st.DrawFn) -> RolePlan:
    names = draw(st.lists(st.sampled_from(AXES), unique=True, max_size=4))
    axes = tuple(Axis(name, 3, draw(st.integers(4, 10**7)), draw(st.integers(1, 9))) for name in names)
    size = 1
    for axis in axes:
        size *= axis.buckets
    pools = tuple(Pool(name=f"pool-{n}", path=f"n{n}.c.e", priority=n) for n in range(3))
    return RolePlan(pools=pools, grid=Grid(axes, tuple(n % 3 for n in range(size))))


@given(role_plans())
def test_every_cell_is_rendered_once_in_a_closed_frame(plan: RolePlan) -> None:
    lines = render_role("aggregated", plan).splitlines()
    rows = [line for line in lines if "│" in line]
    rendered = [cell.strip() for line in rows for cell in line.split("│")[1:-1]]
    assert sorted(rendered) == sorted(plan.pools[n].name for n in plan.grid.cells if plan.grid.axes)
    assert max(map(len, lines)) <= WIDTH
    for above, line, below in zip(lines, lines[1:], lines[2:], strict=False):
        if "│" in line:
            walls = [n for n, letter in enumerate(line) if letter == "│"]
            assert all(above[n] in "┌┬┐├┼┤" and below[n] in "├┼┤└┴┘" for n in walls)
