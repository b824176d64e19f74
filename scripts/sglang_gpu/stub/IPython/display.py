"""See the package."""


class HTML:
    """Accepts anything and shows nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        """Keep nothing."""


def display(*_: object, **__: object) -> None:
    """Show nothing."""
