"""What the tests of the package share; SCOPE_TEST_DEVICE=cuda runs them on a GPU."""
import os

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # graphs of an earlier version of the operators answer nothing
import pytest
import torch


@pytest.fixture(scope="session")
def device():
    return torch.device(os.environ.get("SCOPE_TEST_DEVICE", "cpu"))


@pytest.fixture
def dtype(device):
    return torch.float32 if device.type == "cpu" else torch.bfloat16


@pytest.fixture
def qkv(device, dtype):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 3, 280, 64, generator=generator).to(device, dtype) for _ in range(3)]
