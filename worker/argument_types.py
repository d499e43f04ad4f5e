"""Types of command line arguments, by the names that argparse gives them in its messages."""


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
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


seconds.__name__ = "number of seconds above 0"
share.__name__ = "number from 0 to 1"
fraction.__name__ = "number above 0 and at most 1"
positive.__name__ = "positive number"  # argparse names the type in its message
