"""docs/vllm.md names the versions that the slow tests install and run."""

import tomllib
from pathlib import Path

from nanovllm.vllm_arguments import load_table
from tests.compat import test_clients

ROOT = Path(__file__).parents[2]


def test_docs_name_the_versions_that_were_tried():
    page = (ROOT / "docs" / "vllm.md").read_text("utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    clients = project["optional-dependencies"]["clients"]
    for client in clients:
        name, version = client.split("==")
        assert f"| {name.partition('[')[0]} {version} |" in page
    assert f"| vLLM {test_clients.VLLM_VERSION} " in page
    assert load_table()["vllm"] == test_clients.VLLM_VERSION
