"""Where the tests find the scope command ($SCOPE_COMMAND) and the tool that trained the bundled model."""

import os
import pathlib
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPOSITORY / "tools" / "tiny_video"))
COMMAND = os.environ.get("SCOPE_COMMAND", str(REPOSITORY / "build" / "release" / "bin" / "scope"))


@pytest.fixture(scope="session")
def bundled():
    return REPOSITORY / "models" / "tiny-wan"


@pytest.fixture
def generate(tmp_path):
    """generate(tensors, *flags) -> the latents that `scope generate` writes, batch dimension added."""

    def run(tensors, *flags):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "in.safetensors")
        command = [COMMAND, "generate", "-o", tmp_path / "out", "--latents", "--noise", tmp_path / "in.safetensors", *map(str, flags)]
        if "--condition" not in flags:
            command += ["--condition", tmp_path / "in.safetensors"]
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return load_file(tmp_path / "out" / "latents.safetensors")["latents"][None]

    return run
