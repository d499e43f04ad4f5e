"""`python -m stemserve.worker`."""

import sys

from stemserve.worker.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
