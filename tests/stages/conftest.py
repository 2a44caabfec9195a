import pytest
import torch


@pytest.fixture(autouse=True)
def no_grad():
    """Stages run without gradients, as in pipelines."""
    with torch.no_grad():
        yield
