"""``llm.llm_engine``: what harnesses do with vLLM's engine object."""

import gc
import weakref
from itertools import pairwise

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.compat.engine import LLMEngine
from nanovllm.compat.engine_args import EngineArgs
from nanovllm.sampling_params import RequestOutputKind

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
FINAL = SamplingParams(
    temperature=0, max_tokens=6, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
)


@pytest.fixture(scope="module")
def llm(model_path):
    with LLM(model_path, max_model_len=64, block_size=16, device="cpu", dtype="float32") as llm:
        yield llm


def run(engine):
    """Every result of every step, by request id."""
    results = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            results.setdefault(output.request_id, []).append(output)
    return results


def test_a_loop_over_steps_gives_generates_results_under_the_callers_ids(llm):
    prompts = ["ab", "xyz"]
    expected = llm.generate(prompts, GREEDY, use_tqdm=False)
    engine = llm.llm_engine
    assert engine.add_request("first", prompts[0], GREEDY) == "first"
    engine.add_request("second", {"prompt": prompts[1]}, FINAL)
    assert engine.get_num_unfinished_requests() == 2
    results = run(engine)
    assert engine.get_num_unfinished_requests() == 0 and engine.step() == []
    assert {name: outputs[-1]["token_ids"] for name, outputs in results.items()} == {
        "first": expected[0]["token_ids"],
        "second": expected[1]["token_ids"],
    }
    # As in vLLM, results hold all tokens so far, unless only the last is asked for.
    assert [len(output["token_ids"]) for output in results["first"]] == [1, 2, 3, 4, 5, 6]
    assert [output.finished for output in results["first"]] == [False] * 5 + [True]
    texts = [output["text"] for output in results["first"]]
    assert all(later.startswith(text) for text, later in pairwise(texts))
    assert len(results["second"]) == 1 and results["second"][0].finished


def test_queued_prompts_have_generates_results_in_their_order(llm, capsys):
    prompts = ["ab", {"prompt_token_ids": [5, 6, 7]}, "xyz", "z"]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (6, 2, 9, 1)]
    expected = [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]
    ids = llm.enqueue(prompts[:2], params[:2]) + llm.enqueue(prompts[2:], params[2:])
    assert llm.num_unfinished_requests == len(ids) == len(set(ids)) == 4
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == expected
    assert [output.request_id for output in outputs] == ids and not capsys.readouterr().err
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_queued_conversations_have_chats_results(llm):
    chats = [[{"role": "user", "content": text}] for text in ("ab", "xyz")]
    options = {"chat_template": "{{ messages[0]['content'] }}"}
    expected = llm.chat(chats, GREEDY, use_tqdm=False, **options)
    assert len(llm.enqueue_chat(chats, GREEDY, **options)) == 2
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output["text"] for output in outputs] == [output["text"] for output in expected]


def test_of_invalid_prompts_none_is_queued(llm):
    for error, match, args, kwargs in (
        (TypeError, r"prompts\[1\]", (["ab", 5.5], GREEDY), {}),
        (ValueError, "2 prompts but 1", (["ab", "c"], [GREEDY]), {}),
        (TypeError, "set it in SamplingParams", ("ab",), {"temperature": 1}),
        (ValueError, "LoRA", ("ab",), {"lora_request": object()}),
        (ValueError, "priority must be a list of 1", ("ab",), {"priority": [1, 2]}),
    ):
        with pytest.raises(error, match=match):
            llm.enqueue(*args, **kwargs)
    chat = [{"role": "user", "content": "ab"}]
    with pytest.raises(TypeError, match="set it in SamplingParams"):
        llm.enqueue_chat(chat, temperature=1)
    with pytest.raises(ValueError, match="priority must be a list of 1"):
        llm.enqueue_chat(chat, priority=[1, 2])
    with pytest.raises(ValueError, match="LoRA"):
        llm.enqueue_chat(chat, lora_request=object())
    assert llm.is_finished()


def test_queued_prompts_without_special_tokens(llm):
    options = {"tokenization_kwargs": {"add_special_tokens": False}}
    expected = llm.generate("ab", GREEDY, use_tqdm=False, **options)
    llm.enqueue("ab", GREEDY, **options)
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert output.prompt_token_ids == expected[0].prompt_token_ids


def test_requests_with_several_completions_and_log_probabilities(llm):
    params = SamplingParams(n=2, seed=1, max_tokens=3, logprobs=1, ignore_eos=True)
    llm.llm_engine.add_request("a", [5, 6, 7], params)
    outputs = run(llm.llm_engine)["a"]
    assert outputs[-1].finished and not outputs[0].finished
    assert [len(completion.logprobs) for completion in outputs[-1].outputs] == [3, 3]


def test_abort_drops_the_named_and_ignores_others(llm):
    engine = llm.llm_engine
    for name in "abc":
        engine.add_request(name, "ab", GREEDY)
    engine.abort_request(["a", "unknown"])
    engine.abort_request("b")
    assert engine.get_num_unfinished_requests() == 1
    assert list(run(engine)) == ["c"]


def test_bad_requests_are_refused_and_disturb_nobody(llm):
    engine = llm.llm_engine
    engine.add_request("good", "ab", GREEDY)
    with pytest.raises(TypeError, match="request_id must be a string"):
        engine.add_request(1, "ab", GREEDY)
    with pytest.raises(ValueError, match="`lora_request` is not supported"):
        engine.add_request("x", "ab", GREEDY, lora_request=object())
    with pytest.raises(ValueError, match="has 100 tokens"):
        engine.add_request("x", [5] * 100, GREEDY)
    assert run(engine)["good"][-1].finished


def test_facts_about_the_model_and_the_settings(llm):
    config = llm.llm_engine.model_config
    assert config.max_model_len == 64
    assert config.get_vocab_size() == 512
    assert config.dtype is torch.float32
    assert config.model == config.tokenizer == llm.config.model
    assert config.hf_config.hidden_size == 64
    assert llm.model_config == llm.llm_engine.vllm_config.model_config == config
    assert llm.llm_engine.vllm_config.cache_config.block_size == 16
    assert llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size == 1
    assert llm.llm_engine.tokenizer is llm.llm_engine.get_tokenizer() is llm.get_tokenizer()
    assert llm.llm_engine.tokenizer.tokenizer is llm.get_tokenizer()


def test_an_engine_of_its_own(model_path):
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(model_path), max_model_len=64))
    engine.add_request("0", "ab", GREEDY)
    assert run(engine)["0"][-1].finished
    engine.llm.close()
    with pytest.raises(ValueError, match="this engine is closed"):
        _ = engine.llm.llm_engine


def test_the_engine_object_does_not_keep_the_llm_alive(model_path):
    """An LLM that holds an object that holds the LLM would wait for the garbage collector."""
    llm = LLM(model_path, max_model_len=64, device="cpu")
    engine = llm.llm_engine
    del engine.model_executor  # as distilabel does before it deletes the LLM
    ref = weakref.ref(llm)
    gc.disable()
    try:
        del llm, engine
        assert ref() is None
    finally:
        gc.enable()
