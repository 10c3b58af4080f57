"""The session hook that makes the ranks of a TF1 program start equal."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod.common.process_sets import global_process_set
from horovod.tensorflow.functions import broadcast_global_variables, compare


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Writes the root's values into all global variables once a session is there.

    For `tf.compat.v1.train.MonitoredTrainingSession` and its like, on all ranks. Variables that
    were restored from a checkpoint are sent with the values they have then.

    Args:
        root_rank: global rank of the one whose values count.
        device: where values are sent from; empty for TensorFlow's own choice.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Makes the operation, in the graph that is the default now."""
        graph = tf.compat.v1.get_default_graph()
        if self.bcast_op is None or self.bcast_op.graph is not graph:
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Compares what ranks have, then runs the operation. Blocks until all have come here.

        Raises:
            tf.errors.FailedPreconditionError: on every rank: they disagree about a variable.
        """
        with self.bcast_op.graph.as_default():
            compare(tf.compat.v1.global_variables(), global_process_set)
        session.run(self.bcast_op)
