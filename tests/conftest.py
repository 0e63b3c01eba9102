"""What every test leaves as it found it."""

import os

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True)
def restored_process_state():
    """No process group, environment variable or thread count of one test reaches the next."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    torch.set_num_threads(threads)
