"""Says why there is no ``horovod.mxnet``; must not import anything."""

raise ImportError(
    "horovod.mxnet does not exist: Apache MXNet was retired in 2023 and no longer installs on the "
    "Python versions that horovod supports. Use horovod.torch instead."
)
