"""A job with its store, and settings of made-up ranks."""

from __future__ import annotations

import dataclasses

import pytest

from horovod.common import config
from horovod.common.store import StoreServer, make_job

from .ranks import Ranks


@pytest.fixture
def job(tmp_path):
    job = make_job(tmp_path)
    yield job
    job.remove()


@pytest.fixture
def server(job):
    with StoreServer(job.directory, job.key, job.job_id) as server:
        yield server


@pytest.fixture
def settings(job):
    """Makes the settings of one rank of the job."""

    def make(rank: int, size: int, **changes) -> config.Settings:
        return dataclasses.replace(
            config.from_environ({}),
            **{
                "rank": rank,
                "size": size,
                "hostname": "here",
                "start_timeout_s": 10.0,
                "store": job.address,
                "job_key_file": str(job.key_file),
                "job_id": job.job_id,
                **changes,
            },
        )

    return make


@pytest.fixture
def ranks(job, server):
    """Runs scripts as the ranks of a job."""
    ranks = Ranks(job, server)
    yield ranks
    ranks.kill()
