"""The shape that the design promises: imports point down, and the spine is small and knows
capabilities only through their seams."""

import ast
import gc
import io
import json
import os
import re
import subprocess
import sys
import tokenize
import traceback
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nanovllm"
LEAVES = ("config", "sampling_params", "outputs")
LAYERS = (
    "utils",
    "structured_outputs",
    "vllm_fields",
    "vllm_arguments",
    "vllm_flags",
    "leaves",
    "kernels",
    "quantization",
    "layers",
    "models",
    "checkpoints",
    "text",
    "engine",
    "llm",
    "rl",
    "compat",
)  # lowest first
# What every request passes through, but for the capabilities.
SPINE = (
    "engine/*.py",
    "layers/*.py",
    "models/decoder.py",
    "models/model_config.py",
    "llm.py",
    "config.py",
    "sampling_params.py",
    "outputs.py",
)
MAX_SPINE_LINES, MAX_FILE_LINES = 2260, 350
# What could be deleted without touching the spine: by path or glob, the seam behind which it is.
CAPABILITIES = {
    "engine/cuda_graphs.py": "On a GPU, start-up replaces a runner's CapturedSteps by StepGraphs.",
    "engine/kv_cache.py": "On a GPU, or without num_kvcache_blocks, start-up calls "
    "measure_kv_cache.",
    "engine/kv_layout.py": "Start-up gives a runner what it returns.",
    "engine/startup.py": "LLMEngine is made with what start_up returns.",
    "engine/recovery.py": "The loop calls it for a step that runs out of memory or has no token.",
    "engine/metrics.py": "LLMEngine.metrics returns what read_metrics does.",
    "engine/prefix_cache.py": "With enable_prefix_caching, BlockManager makes a PrefixCache "
    "instead of a BlockCache.",
    "engine/offline_order.py": "With enable_reordering, the scheduler's policy is an OfflineOrder.",
    "engine/shared_prefixes.py": "Start-up makes a PrefixFinder if attention can share prefixes.",
    "engine/parallel_sampling.py": "The scheduler calls start_siblings for a prompt with siblings.",
    "engine/logit_edits.py": "A SamplingState has a list of edits, empty for plain sampling.",
    "engine/logprobs.py": "The loop and the runner call it for sequences that ask for logprobs.",
    "engine/streaming.py": "LLMEngine.generate_stream returns stream_outputs.",
    "engine/tensor_parallel.py": "With several ranks, start_ranks makes a MainRunner instead of a "
    "ModelRunner.",
    "engine/workers.py": "Only MainRunner and WorkerRunner know it.",
    "engine/warmup.py": "On a GPU, start-up calls compile_kernels, and measure_kv_cache calls "
    "warmup_model.",
    "kernels/sampling/logit_edits.py": "Only LogitEdit's classes and grammars know it.",
    "kernels/sampling/logprobs.py": "sample_with_logprobs calls pack_logprobs.",
    "kernels/sampling/processed_logits.py": "sample_with_logprobs calls processed_logits.",
    "text/structured.py": "Grammars makes a GrammarCompiler for the first grammar.",
    "text/chat.py": "Only ChatRenderer knows it.",
    "text/chat_renderer.py": "LLM makes a ChatRenderer for the first conversation.",
    "text/template_process.py": "Only ChatRenderer knows it.",
    "structured_outputs.py": "SamplingParams checks that structured_outputs is of its class.",
    "layers/parallel_sampler.py": "With several ranks, start-up makes it instead of a Sampler.",
    "layers/all_heads_norm.py": "A LayerSpec whose qk_norm is over all heads is built with it.",
    "layers/moe.py": "The decoder builds a MoE for a LayerSpec whose mlp is a MoESpec.",
    "kernels/moe/*.py": "Only experts' weights and layers/moe.py know it.",
    "quantization/experts.py": "Only layers/moe.py knows it.",
    "quantization/fp8.py": "For quantization='fp8', new_linear_weight makes its class.",
    "quantization/fp8_experts.py": "For FP8 weights, new_expert_weights makes its classes.",
    "kernels/gemm/fp8.py": "Only quantization/fp8.py knows it.",
    "quantization/batch_invariant.py": "With batch_invariant, new_linear_weight makes its class.",
    "kernels/attention/torch_invariant.py": "With batch_invariant, select_attention_backend makes "
    "its class.",
    "kernels/comm/*.py": "RankRunner puts its all-reduces into TPGroup.one_shots.",
    "checkpoints/fp8.py": "For an FP8 config, SafetensorsCheckpoint makes an Fp8Weights.",
    "checkpoints/gguf*.py": "open_checkpoint opens a .gguf file with GGUFCheckpoint.",
    "compat/**/*.py": "nanovllm.LLM is its subclass of LLM, or without it that class itself.",
    "rl/*.py": "compat's LLM is a subclass of its LLM, or without it of nanovllm.llm.LLM.",
    "run_batch/*.py": "It stands on compat's LLM: its methods, requests and scheduler.",
}
# Without them the spine imports, but no engine starts.
STARTS_ENGINES = "engine/startup.py", "engine/kv_layout.py"
NO_CAPABILITY = "engine/scheduler.py"
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
FILES = sorted(PACKAGE.rglob("*.py"))
NOT_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rank(part: str) -> int:
    """A part not named here is built on top; only the package's own __init__ is above it."""
    if part in LEAVES:
        part = "leaves"
    return LAYERS.index(part) if part in LAYERS else len(LAYERS) + (part == "__init__")


def imported_parts(path: Path) -> list[str]:
    """The parts that a file imports from, also within functions."""
    names = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    paths = [name.split(".") for name in names]
    return [(*path, "__init__")[1] for path in paths if path[0] == "nanovllm"]


def test_imports_point_down():
    for path in FILES:
        own = part_of(path)
        for other in imported_parts(path):
            inside = own == other and (PACKAGE / own).is_dir()
            assert inside or rank(other) < rank(own), f"{path} imports {other}"


def code_lines(path: Path) -> int:
    """Lines of a file without blanks, comments and docstrings."""
    source = path.read_text("utf-8")
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def files(globs: Iterable[str]) -> set[Path]:
    return {path for glob in globs for path in PACKAGE.glob(glob)}


def spine_files() -> list[Path]:
    return sorted(files(SPINE) - files(CAPABILITIES))


def spine_lines() -> dict[str, int]:
    """The code lines of each of the spine's files."""
    return {str(path.relative_to(PACKAGE)): code_lines(path) for path in spine_files()}


def test_code_lines_are_counted_without_blanks_comments_and_docstrings(tmp_path: Path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""Doc\n\nstring."""\n\n# comment\nx = 1  # comment\n\n\ndef f(\n    a,\n):\n'
        '    """Doc."""\n    # comment\n    return """two\n\nlines"""\n'
    )
    assert code_lines(path) == 1 + 3 + 3


def test_the_spine_is_small():
    spine, total = spine_lines(), sum(map(code_lines, FILES))
    print(f"the spine has {sum(spine.values())} lines of code, the package {total}: {spine}")
    assert 1000 < sum(spine.values()) <= MAX_SPINE_LINES
    assert max(spine.values()) <= MAX_FILE_LINES


def test_readme_states_the_sizes():
    """Guards a claim that drifts: it must hold, and by no more than a hundred lines."""
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    claim = re.search(r"spine\b[^.]* under ([\d,]+) lines of code[^.]* under ([\d,]+)", text)
    assert claim is not None
    actual = sum(spine_lines().values()), sum(map(code_lines, FILES))
    for claimed, lines in zip(claim.groups(), actual, strict=True):
        assert 0 <= int(claimed.replace(",", "")) - lines <= 100


class Without(MetaPathFinder):
    """Finds modules of some names not to be there."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in self.names:
            raise ModuleNotFoundError(f"no module {name}", name=name)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def run_without(globs: list[str], model: str) -> list[list[int]]:
    """Imports the spine and generates, in a process that has not imported the package yet."""
    names = {module_name(path) for path in files(globs)}
    sys.meta_path.insert(0, Without(names))
    for path in spine_files():
        import_module(module_name(path))
    from nanovllm import LLM, SamplingParams

    if any(glob in globs for glob in STARTS_ENGINES):
        return []
    settings: dict[str, Any] = {"device": "cpu", "load_format": "dummy"}
    settings |= {"num_kvcache_blocks": 8, "enable_prefix_caching": False}
    settings |= {"enable_reordering": False}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(model, skip_tokenizer_init=True, **settings) as llm:
        outputs = llm.generate([[1, 2, 3], [4]], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def run_without_each(model: str) -> None:
    """Prints what ``run_without`` returns, or why it fails: without a glob, with each and with all
    of them. Each runs in a fork of this process, which has imported what is slow to import."""
    import torch

    for name in ("psutil", "safetensors.torch", "tqdm.auto", "triton", "xxhash"):
        with suppress(ModuleNotFoundError):
            import_module(name)
    torch.set_num_threads(1)  # threads would not survive a fork
    gc.freeze()  # closing an engine collects garbage, and would copy what the forks share
    cases = {"none": [], "all": [glob for glob in CAPABILITIES if glob not in STARTS_ENGINES]}
    for name, globs in (cases | {glob: [glob] for glob in (*CAPABILITIES, NO_CAPABILITY)}).items():
        if os.fork() == 0:
            try:
                result: Any = run_without(globs, model)
            except BaseException:
                result = traceback.format_exc()
            print(json.dumps([name, result]), flush=True)
            os._exit(0)
        os.wait()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(TINY))
    code = "import sys; from tests.test_layering import *; run_without_each(sys.argv[1])"
    result = subprocess.run(
        [sys.executable, "-c", code, str(model)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    return dict(map(json.loads, result.stdout.splitlines()))


@pytest.mark.parametrize("glob", [*CAPABILITIES, "all"])
def test_the_spine_runs_without_a_capability(glob: str, results: dict[str, Any]):
    assert glob == "all" or files([glob]), f"{glob} matches no file"
    assert isinstance(results[glob], list), results[glob]
    assert results[glob] == results["none"] or glob in STARTS_ENGINES


def test_the_spine_does_not_run_without_a_file_of_its_own(results: dict[str, Any]):
    """Else the test above could not fail."""
    assert f"no module {module_name(PACKAGE / NO_CAPABILITY)}" in results[NO_CAPABILITY]


def test_the_reading_order_names_files_as_long_as_they_are():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", page, re.MULTILINE)
    assert len(rows) > 15
    for name, stated in rows:
        num_lines = len((PACKAGE / name).read_text("utf-8").splitlines())
        assert abs(num_lines - int(stated)) <= num_lines / 10, name


def test_the_architecture_names_every_file_and_no_other():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    files = {str(path.relative_to(PACKAGE)) for path in FILES if path.stat().st_size}
    tables = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
    named = re.findall(r"`([\w/]+\.py)`", tables)
    assert set(named) == files


def test_identifiers_have_the_spelling_of_pytorch():
    """quantize, not quantise, so that a search finds all of them."""
    for path in FILES:
        tokens = tokenize.generate_tokens(StringIO(path.read_text("utf-8")).readline)
        names = {token.string for token in tokens if token.type == tokenize.NAME}
        assert not {name for name in names if re.search("(quanti|normali|tokeni)s", name.lower())}
