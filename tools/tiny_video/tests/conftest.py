"""Lets the tests import the tool's modules and find the repository's files."""

import pathlib
import sys

import pytest

TOOL = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TOOL))


@pytest.fixture(scope="session")
def tool():
    return TOOL


@pytest.fixture(scope="session")
def repository():
    return TOOL.parents[1]


@pytest.fixture(scope="session")
def model(repository):
    return repository / "models" / "tiny-wan"
