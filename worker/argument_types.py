"""Types of command line arguments, by the names that argparse gives them in its messages."""

from collections.abc import Callable

MOST = 1e12


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def up_to(most: int) -> Callable[[str], int]:
    def bounded(text: str) -> int:
        value = int(text)
        if not 1 <= value <= most:
            raise ValueError(text)
        return value

    bounded.__name__ = f"number from 1 to {most}"
    return bounded


def amount(text: str) -> float:
    value = float(text)
    if not 0 <= value <= MOST:
        raise ValueError(text)
    return value


def fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError(text)
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError(text)
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


amount.__name__ = f"number from 0 to {MOST:.0f}"
seconds.__name__ = "number of seconds above 0"
share.__name__ = "number from 0 to 1"
fraction.__name__ = "number above 0 and at most 1"
positive.__name__ = "positive number"  # argparse names the type in its message
