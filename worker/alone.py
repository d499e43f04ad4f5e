"""What `stemserve worker` runs: the worker process, under the name by which it was called."""

import sys

from stemserve.leaving import leaves_quietly

if __name__ == "__main__":
    with leaves_quietly():
        from stemserve.worker.main import main  # torch takes seconds
    sys.exit(main(sys.argv[1:], program="stemserve worker"))
