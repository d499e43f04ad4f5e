"""`python -m stemserve.worker`."""

import sys

from stemserve.leaving import leaves_quietly

if __name__ == "__main__":
    with leaves_quietly():
        from stemserve.worker.main import main  # torch takes seconds
    sys.exit(main(sys.argv[1:]))
