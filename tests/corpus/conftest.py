import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors are slower on several threads; give torch its threads back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
