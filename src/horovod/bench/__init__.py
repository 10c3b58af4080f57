"""``horovod bench``: measures allreduce on a user's machine against what its memory allows."""
