"""The snippets answer as vLLM did, but for the differences on purpose."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.once import once
from tests.vllm_answers import weights
from tests.vllm_answers.compare import RECORDED, Answers, differences, read
from tests.vllm_answers.record import GROUPS

DIFFERENT_ON_PURPOSE = {
    "chat.content_format_openai": "templates see message contents as text",
    "chat.message_without_role": "a ValueError that names the message, where vLLM has a KeyError",
    "chat.messages_are_not_changed": "vLLM parses arguments of tool calls in the caller's messages",
    "engine.beam_search": "beam search is not supported",
    "llm_calls.of_earlier_versions": "arguments of earlier versions are accepted",
    "llm_calls.with_a_seed_of_none": "None stands for the default",
    "llm_calls.with_a_slow_tokenizer": "arguments of earlier versions are accepted",
    "llm_calls.with_another_config": "another config than the checkpoint's is not supported",
    "llm_calls.with_lora": "LoRA adapters are not supported",
    "llm_calls.with_no_such_model": "a ValueError that says what was looked for",
    "llm_calls.with_raw_logits": "logits instead of log-probabilities are not supported",
    "logprobs.of_chosen_tokens": "log-probabilities of chosen tokens are not supported",
    "outputs.completion_is_a_dataclass": "both kinds of results are dataclasses",
    "outputs.metrics_without_statistics": "a request's times are always there",
    "params.by_position": "nano-vLLM's order of the fields is another: they are given by name",
    "params.guided_decoding_keyword": "arguments of earlier versions are accepted",
    "params.logits_processors_keyword": "arguments of earlier versions are accepted",
    "params.n_as_float": "a value of the wrong type is a TypeError",
    "params.stop_token_ids_of_text": "a value of the wrong type is a TypeError",
    "params.temperature_above_two": "any temperature is supported",
    "params.temperature_close_to_zero": "any temperature is supported",
    "params.top_k_as_float": "a value of the wrong type is a TypeError",
    "prompts.dict_without_prompt": "a dict without a prompt is a ValueError",
    "prompts.guided_keyword": "arguments of earlier versions are accepted",
}


@pytest.fixture(scope="module")
def recorded() -> Answers:
    return read(RECORDED)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Runs all snippets once, in a process of its own, in which ``import vllm`` is ours."""
    folder = tmp_path_factory.mktemp("weights")

    def root(name: str) -> Path:
        return weights.cache() if (weights.cache() / name).exists() else folder

    folders = ["--smollm2", str(weights.smollm2(root("smollm2-fp32")))]
    folders += ["--tiny", str(weights.tiny_llama(root("tiny-llama")))]

    def compute() -> Answers:
        out = tmp_path_factory.mktemp("answers") / "ours.json"
        command = [sys.executable, "-m", "tests.vllm_answers.record", "--engine", "nanovllm"]
        result = subprocess.run(
            [*command, *folders, "--out", str(out), "--groups", *GROUPS],
            cwd=Path(__file__).parents[2],
            # Recorded on a CPU, in float32.
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr[-4000:]
        return read(out)

    return once(tmp_path_factory, "answers", compute)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("group", GROUPS)
def test_answers_as_vllm(group: str, recorded: Answers, ours: Answers) -> None:
    """Each snippet gives vLLM's answer, and each difference on purpose is one."""
    expected = {name: a for name, a in recorded.items() if name.startswith(f"{group}.")}
    given = {name: a for name, a in ours.items() if name.startswith(f"{group}.")}
    assert expected.keys() == given.keys(), "record vLLM's answers to new snippets"
    found = differences(expected, given)
    wrong = [f"{n}: {line}" for n, line in found.items() if n not in DIFFERENT_ON_PURPOSE]
    equal = [f"{n}: equal now" for n in expected if n in DIFFERENT_ON_PURPOSE and n not in found]
    assert not wrong + equal, "\n".join([f"of {len(expected)} answers:", *wrong, *equal])


def test_differences_on_purpose_are_few(recorded: Answers) -> None:
    assert DIFFERENT_ON_PURPOSE.keys() <= recorded.keys()
    assert len(DIFFERENT_ON_PURPOSE) <= 0.05 * len(recorded)
