"""What we touch of TensorFlow that isn't its public API; must not know horovod.

Each function says what is lost where a later TensorFlow lacks what it uses.
"""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph
from tensorflow.python.util import tf_stack

_GENERATED = re.compile(r"^__(forward|backward|inference)_(.*)_\d+$")


def run_independently(operation: Any) -> None:
    """Lets an operation of a traced function run at once, though it is stateful.

    It still must run. Without the manager, as in TensorFlow 1's graphs, nothing is ordered anyway.
    """
    manager = getattr(operation.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(operation)


def traced_function(graph: Any) -> Any:
    """The graph of the function that is being traced, whatever branch or loop of it this is."""
    while isinstance(graph, ControlFlowFuncGraph) and graph.outer_graph is not None:
        graph = graph.outer_graph
    return graph


def function_name(graph: Any) -> str:
    """The name of a traced function, without the numbers that tell its traces apart."""
    name = str(getattr(graph, "name", "graph"))
    generated = _GENERATED.match(name)
    if generated is None:
        return name
    direction, inner = generated.groups()
    return inner if direction == "inference" else f"{inner}.{direction}"


def is_compiling() -> bool:
    """Whether what is traced now will be compiled by XLA (``jit_compile=True``)."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def stack() -> Any:
    """The frames of this call, outermost first, at the user's lines instead of AutoGraph's."""
    return tf_stack.extract_stack(2)
