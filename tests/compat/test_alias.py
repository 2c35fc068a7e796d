"""``import vllm`` is ours: in a process, in the processes that it starts, and nowhere else."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import nanovllm
from nanovllm.compat import __main__ as command
from nanovllm.compat import alias
from nanovllm.compat.alias import STARTUP_DIR

# A development installation finds nanovllm's modules wherever the package itself was found.
NO_EDITABLE_INSTALLS = (
    "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in f.__module__]"
)


def python(*args, **env):
    """What a new Python prints. It does not look for modules in the current folder."""
    result = subprocess.run(
        [sys.executable, *args],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1", **env},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def run(code, **env):
    return python("-c", textwrap.dedent(code), **env)


def child(code):
    """As ``run``, in a Python that inherits the alias; nothing is imported but by ``code``."""
    return run(code, PYTHONPATH=STARTUP_DIR)


def test_names_of_the_vllm_package_can_be_imported_from_nanovllm():
    from nanovllm import EngineArgs, LLMEngine, PoolingParams, PromptType

    assert LLMEngine is nanovllm.compat.engine.LLMEngine
    assert EngineArgs(model="x").model == "x" and PromptType is nanovllm.compat.names.PromptType
    with pytest.raises(ValueError):
        PoolingParams()
    with pytest.raises(ImportError, match="no AsyncLLMEngine: use LLM"):
        from nanovllm import AsyncLLMEngine  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        from nanovllm import nonsense  # noqa: F401
    assert not hasattr(nanovllm, "nonsense")


def test_the_modules_are_there_with_all_their_names():
    run("""
    from nanovllm.compat import register_as_vllm
    register_as_vllm()
    register_as_vllm()  # changes nothing
    import importlib, sys
    from nanovllm.compat.alias import MODULES
    for name in MODULES:
        module = importlib.import_module(name)
        assert module is sys.modules[name] and module.__name__ == name
        assert set(module.__all__) <= set(dir(module))
        for attribute in module.__all__:
            getattr(module, attribute)
    import nanovllm, vllm
    assert vllm.LLM is nanovllm.LLM and vllm.SamplingParams is nanovllm.SamplingParams
    assert vllm.sampling_params.SamplingParams is nanovllm.SamplingParams
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.entrypoints.llm import LLM as same
    assert same is LLM and TokensPrompt(prompt_token_ids=[1]) == {"prompt_token_ids": [1]}
    namespace = {}
    exec("from vllm import *", namespace)
    assert namespace["LLM"] is LLM
    """)


def test_questions_about_the_package_are_answered():
    out = child("""
    import importlib.metadata as metadata, importlib.util, sys
    spec = importlib.util.find_spec("vllm")
    print(spec.name, metadata.version("vllm"), metadata.packages_distributions()["vllm"])
    import vllm
    print(vllm.__file__, "torch" in sys.modules)
    print([d.metadata["Name"] for d in metadata.distributions(path=["/nowhere"])])
    print(vllm.__version__, vllm.__version_tuple__)
    """)
    assert out.splitlines() == [
        "vllm 0.32.0 ['vllm']",
        f"{alias.__file__} False",
        "[]",
        "0.32.0 (0, 32, 0)",
    ]


def test_random_numbers_are_seeded():
    """Where scripts for this and for older releases of vLLM find the function."""
    out = child("""
    import random
    import numpy, torch
    from vllm.model_executor import set_random_seed
    from vllm.model_executor.utils import set_random_seed as same
    from vllm.utils.torch_utils import set_random_seed as same_too
    assert set_random_seed is same is same_too
    for seed in (1, 1, None, 2):
        set_random_seed(seed)
        print(random.random(), numpy.random.rand(), torch.rand(()).item())
    """)
    first, again, unseeded, other = out.splitlines()
    assert first == again and len({first, unseeded, other}) == 3


def test_a_name_that_is_not_served_is_an_error_that_says_so():
    out = child("""
    import vllm
    def message(statement):
        try:
            exec(statement)
        except (ImportError, AttributeError) as error:
            print(type(error).__name__, error)
    message("from vllm import AsyncLLMEngine")
    message("from vllm.sampling_params import SamplingType")
    message("import vllm.multimodal")
    message("vllm.profiler")
    print(hasattr(vllm, "AsyncLLMEngine"), getattr(vllm, "AsyncLLMEngine", None))
    """)
    has_no = "nanovllm's vllm alias has no vllm"
    assert out.splitlines() == [
        f"ModuleNotFoundError {has_no}.AsyncLLMEngine: use LLM.generate_stream, or "
        "LLM.add_request and LLM.step",
        f"ModuleNotFoundError {has_no}.sampling_params.SamplingType",
        f"ModuleNotFoundError {has_no}.multimodal: images, audio and video are not supported",
        f"AttributeError {has_no}.profiler",
        "False None",
    ]


def test_it_refuses_where_the_real_vllm_is_imported(tmp_path):
    (tmp_path / "vllm.py").touch()
    out = run(
        """
        import os, sys, vllm
        from nanovllm.compat import register_as_vllm
        try:
            register_as_vllm()
        except RuntimeError as error:
            print(error)
        print(sys.modules["vllm"] is vllm, "startup" in os.environ["PYTHONPATH"])
        """,
        PYTHONPATH=str(tmp_path),
    )
    assert out.startswith("vllm has already been imported: ") and out.endswith("True False\n")


def test_it_hides_a_vllm_that_is_only_installed(tmp_path):
    (tmp_path / "vllm.py").write_text("raise SystemExit('the other one')")
    path = os.pathsep.join([STARTUP_DIR, str(tmp_path)])
    assert run("import vllm; print(vllm.__file__)", PYTHONPATH=path) == f"{alias.__file__}\n"


def test_child_processes_inherit_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import multiprocessing, os, subprocess, sys
        QUESTION = "import vllm.lora.request, sys; print(vllm.__file__, 'torch' in sys.modules)"

        def ask(queue):
            import vllm
            queue.put(vllm.__file__)

        if __name__ == "__main__":
            from nanovllm.compat import register_as_vllm
            register_as_vllm()
            assert os.environ["PYTHONPATH"].endswith(os.pathsep + "/somewhere")
            subprocess.run([sys.executable, "-c", QUESTION], check=True)
            for method in ("spawn", "forkserver", "fork"):
                context = multiprocessing.get_context(method)
                queue = context.Queue()
                process = context.Process(target=ask, args=(queue,))
                process.start()
                print(method, queue.get(timeout=60))
                process.join()
        """)
    )
    out = python(str(script), PYTHONPATH="/somewhere").splitlines()
    # A child that does not use the alias does not pay for it: PyTorch is not imported.
    assert out[0] == f"{alias.__file__} False"
    assert out[1:] == [f"{method} {alias.__file__}" for method in ("spawn", "forkserver", "fork")]


def test_another_sitecustomize_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('the other one')")
    path = os.pathsep.join([STARTUP_DIR, str(tmp_path)])
    out = run("import vllm, sitecustomize; print(sitecustomize.__file__)", PYTHONPATH=path)
    assert out.splitlines() == ["the other one", str(tmp_path / "sitecustomize.py")]


def test_a_python_without_nanovllm_is_left_alone():
    """A program may start another Python, where vllm is another package or none."""
    code = f"""
    {NO_EDITABLE_INSTALLS}
    import os
    sys.path = [path for path in sys.path if not os.path.isdir(os.path.join(path, "nanovllm"))]
    import runpy
    runpy.run_path("{STARTUP_DIR}/sitecustomize.py")
    print("nanovllm.compat.alias" in sys.modules)
    """
    assert run(code, PYTHONPATH="") == "False\n"


REPORT = """
import os, sys, vllm
main = sys.modules["__main__"]
print(sys.argv, sys.path[0], __name__, __package__, main.__dict__ is globals())
print(__file__, (__spec__ and __spec__.name), vllm.__name__)
"""


@pytest.mark.parametrize("form", ["script", "module", "package"])
def test_programs_run_as_python_runs_them(form, tmp_path):
    """A program under ``python -m nanovllm.compat`` sees the same arguments, paths and names as
    under ``python``."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for name in ("module.py", "__main__.py"):
        (folder / name).write_text(REPORT)
    (tmp_path / "link.py").symlink_to(folder / "module.py")
    program = {
        "script": ["link.py"],
        "module": ["-m", "package.module"],
        "package": ["-m", "package"],
    }[form]
    outs = []
    for start in (program, ["-m", "nanovllm.compat", *program]):
        result = subprocess.run(
            [sys.executable, *start, "--flag", "-m", "x"],
            check=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": STARTUP_DIR},
            stdout=subprocess.PIPE,
        )
        outs.append(result.stdout)
    assert outs[0] == outs[1] != b""


def test_a_programs_exit_status_is_the_commands(tmp_path):
    (tmp_path / "seven.py").write_text("raise SystemExit(7)")
    program = [sys.executable, "-m", "nanovllm.compat", str(tmp_path / "seven.py")]
    assert subprocess.run(program, check=False).returncode == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "python -m nanovllm.compat script.py"),
        (["-m"], "python -m nanovllm.compat script.py"),
        (["--help"], "python -m nanovllm.compat script.py"),
        (["missing.py"], "cannot open missing.py: No such file or directory"),
    ],
    ids=str,
)
def test_commands_that_name_no_program_say_so(arguments, message, monkeypatch):
    monkeypatch.setattr(command, "register_as_vllm", lambda: None)
    monkeypatch.setattr(sys, "argv", ["nanovllm.compat", *arguments])
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert message in caught.value.code


def test_the_engine_works_without_the_folder(tmp_path):
    """nanovllm.LLM is the engine's own class where nanovllm/compat is deleted."""
    copy = tmp_path / "nanovllm"
    ignore = shutil.ignore_patterns("compat", "__pycache__")
    shutil.copytree(Path(nanovllm.__file__).parent, copy, ignore=ignore)
    code = f"""
    {NO_EDITABLE_INSTALLS}
    import nanovllm, nanovllm.llm
    print(nanovllm.__file__, nanovllm.LLM.__module__)
    """
    out = run(code, PYTHONPATH=str(tmp_path))
    assert out.split() == [str(copy / "__init__.py"), "nanovllm.llm"]
