"""What `stemserve` runs."""

from stemserve.leaving import leaves_quietly


def main() -> None:
    with leaves_quietly():
        from stemserve.service.commands.process import run  # seconds on a slow disk
    run()
