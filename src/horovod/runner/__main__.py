"""``python -m horovod.runner`` is ``horovodrun``; knows only where the command is."""

import sys

from horovod.runner.launch import run_commandline

sys.exit(run_commandline())
