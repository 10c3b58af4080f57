"""Says that there is no MXNet front end; knows nothing else."""

raise ImportError(
    "horovod.mxnet does not exist: Apache MXNet was retired in 2023 and its last release does not "
    "run on the Python and NumPy that horovod supports. Use horovod.torch instead"
)
