"""What this build brings and what a run uses; must not know whether anything runs."""

from __future__ import annotations


def mpi_enabled() -> bool:
    """Whether MPI is used in this run: no."""
    return False


def mpi_built() -> bool:
    """Whether MPI can be used: no."""
    return False


def gloo_enabled() -> bool:
    """Whether the library's own control and data plane is used in this run: yes.

    The name is the one that scripts ask for; no code of Gloo is involved.
    """
    return True


def gloo_built() -> bool:
    """Whether the library's own control and data plane can be used: yes."""
    return True


def nccl_built() -> int:
    """The version code of NCCL, 0 if it can't be used."""
    return 0


def ddl_built() -> bool:
    """Whether IBM DDL can be used: no."""
    return False


def ccl_built() -> bool:
    """Whether oneCCL can be used: no."""
    return False


def cuda_built() -> bool:
    """Whether CUDA devices reduce by themselves: no, their tensors travel through host memory."""
    return False


def rocm_built() -> bool:
    """Whether ROCm devices reduce by themselves: no, their tensors travel through host memory."""
    return False
