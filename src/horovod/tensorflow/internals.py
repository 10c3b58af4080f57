"""What we touch of TensorFlow that isn't its public API; must not know horovod.

Each function says what is lost where a later TensorFlow lacks what it uses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph
from tensorflow.python.ops.parallel_for import pfor
from tensorflow.python.util import tf_stack

Function = TypeVar("Function", bound=Callable[..., Any])

_GENERATED = re.compile(r"^__(forward|backward|inference)_(.*)_\d+$")


def unconverted(function: Function) -> Function:
    """Keeps AutoGraph from rewriting a function of ours, and all that it calls, at each trace.

    The mark is that of AutoGraph's own products. ``tf.autograph.experimental.do_not_convert`` would
    do as well, and cost each eager call 5 us.
    """
    function.autograph_info__ = {}  # type: ignore[attr-defined]
    return function


def run_independently(operation: Any) -> None:
    """Lets an operation of a traced function run at once, though it is stateful.

    It still must run. Without the manager, as in TensorFlow 1's graphs, nothing is ordered anyway.
    """
    manager = getattr(operation.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(operation)


def take_turns(graph: Any) -> None:
    """Lets a function that is being traced run one after the other with all of which this is said.

    TensorFlow orders calls of functions by the variables that they write, so each of these writes
    one. What is in a function isn't ordered by it. Without the manager nothing is ordered anyway.

    Args:
        graph: the function's, and not that of a branch or a loop, whose gradients can't have this.
    """
    if getattr(graph, "experimental_acd_manager", None) is None:
        return
    with tf.init_scope():
        if not tf.executing_eagerly():
            return
        if not _turn:
            with tf.device("/CPU:0"):  # a bare one, which a tf.distribute strategy doesn't copy
                turn = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name="horovod_turn")
                tf.raw_ops.AssignVariableOp(resource=turn, value=tf.constant(0, tf.int64))
            _turn.append(turn)
    with graph.as_default():
        tf.raw_ops.AssignAddVariableOp(resource=_turn[0], value=tf.constant(0, tf.int64))


_turn: list[tf.Tensor] = []


def never_vectorize(operator: str) -> None:
    """Makes `tf.vectorized_map`, and jacobians by way of it, fail while they trace the operator.

    Without this TensorFlow would make a loop, and run the operator once more outside of it.
    """

    @pfor.RegisterPFor(operator)
    def refuse(_: Any) -> None:
        raise ValueError(
            f"{operator} can't be vectorized: use tf.map_fn in place of tf.vectorized_map, and "
            "experimental_use_pfor=False for jacobians"
        )


def enclosing_graphs(graph: Any) -> Iterator[Any]:
    """The graph, if it is a branch or a loop the one around it, and so on up to the function's."""
    yield graph
    while isinstance(graph, ControlFlowFuncGraph) and graph.outer_graph is not None:
        graph = graph.outer_graph
        yield graph


def traced_function(graph: Any) -> Any:
    """The graph of the function that is being traced, whatever branch or loop of it this is."""
    *_, outermost = enclosing_graphs(graph)
    return outermost


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


def device() -> str:
    """The name of the device that ``tf.device`` has set, also where a traced function is called.

    Empty if there is none: TensorFlow chooses.
    """
    return str(context.context().device_name or "")


def call_module(
    module: str, operands: Sequence[tf.Tensor], results: Sequence[tuple[tf.DType, Any]]
) -> list[tf.Tensor]:
    """The node of a program in StableHLO's text, which XLA compiles into the function around it.

    The program is for processors: on other devices the compilation fails.

    Args:
        module: the text, whose ``main`` takes the operands and gives the results.
        operands: of any shapes.
        results: at least two, by type and shape.

    Raises:
        ImportError: this TensorFlow doesn't have it.
    """
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    outputs = gen_xla_ops.xla_call_module(
        operands,
        version=_CALL_MODULE_VERSION,
        module=module,
        Tout=[dtype for dtype, _ in results],
        Sout=[shape for _, shape in results],
        platforms=["CPU"],
    )
    return list(outputs)


_CALL_MODULE_VERSION = 9  # TensorFlow 2.21 knows up to 10; what changed since 4 isn't used here


def stack() -> Any:
    """The frames of this call, outermost first, at the user's lines instead of AutoGraph's."""
    return tf_stack.extract_stack(2)
