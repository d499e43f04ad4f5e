"""What `stemserve worker` runs: the worker process, under the name by which it was called."""

import sys

from stemserve.worker.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="stemserve worker"))
