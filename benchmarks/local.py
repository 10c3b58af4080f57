"""Starts a program as ranks of this host, with RANK and WORLD_SIZE set, and waits for all of them.

python local.py SIZE PROGRAM [ARGUMENT ...]
"""

import os
import subprocess
import sys

if __name__ == "__main__":
    size, program = sys.argv[1], sys.argv[2:]
    ranks = [
        subprocess.Popen(program, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": size})
        for rank in range(int(size))
    ]
    sys.exit(max(abs(rank.wait()) for rank in ranks))
