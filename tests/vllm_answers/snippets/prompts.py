"""What generate takes: prompts, sampling parameters, progress bars."""

import contextlib
from functools import partial

import numpy as np
from tqdm import tqdm
from vllm import SamplingParams, TextPrompt, TokensPrompt

GREEDY = SamplingParams(temperature=0, max_tokens=3)
FRANCE = "The capital of France is"
FRANCE_IDS = [504, 3575, 282, 4649, 314]


def _texts(outputs):
    return [o.outputs[0].text for o in outputs]


def one_string(llm):
    return _texts(llm.generate(FRANCE, GREEDY))


def list_of_strings(llm):
    return _texts(llm.generate([FRANCE, "One, two,"], GREEDY))


def tuple_of_strings(llm):
    return _texts(llm.generate((FRANCE, "One, two,"), GREEDY))


def generator_of_strings(llm):
    return _texts(llm.generate((p for p in [FRANCE, "One, two,"]), GREEDY))


def token_ids(llm):
    out = llm.generate(FRANCE_IDS, GREEDY)
    return [len(out), out[0].prompt, out[0].prompt_token_ids, *_texts(out)]


def list_of_token_ids(llm):
    out = llm.generate([FRANCE_IDS, FRANCE_IDS[:2]], GREEDY)
    return [[o.prompt, o.prompt_token_ids] for o in out]


def dict_with_text(llm):
    out = llm.generate({"prompt": FRANCE}, GREEDY)
    return [out[0].prompt, *_texts(out)]


def dict_with_token_ids(llm):
    out = llm.generate({"prompt_token_ids": FRANCE_IDS}, GREEDY)
    return [out[0].prompt, out[0].prompt_token_ids, *_texts(out)]


def dict_with_both(llm):
    out = llm.generate({"prompt": "shown", "prompt_token_ids": FRANCE_IDS}, GREEDY)
    return [out[0].prompt, out[0].prompt_token_ids, *_texts(out)]


def typed_prompts(llm):
    prompts = [TextPrompt(prompt=FRANCE), TokensPrompt(prompt_token_ids=FRANCE_IDS)]
    return _texts(llm.generate(prompts, GREEDY))


def typed_prompts_of_inputs(llm):
    from vllm.inputs import TextPrompt, TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=FRANCE_IDS), TextPrompt(prompt="One, two,")]
    return [o.prompt_token_ids for o in llm.generate(prompts, GREEDY)]


def mixed_forms(llm):
    prompts = [FRANCE, FRANCE_IDS, {"prompt": FRANCE}, {"prompt_token_ids": FRANCE_IDS}]
    return _texts(llm.generate(prompts, GREEDY))


def empty_list(llm):
    return llm.generate([], GREEDY)


def empty_string(llm):
    return _texts(llm.generate("", GREEDY))


def empty_string_among_others(llm):
    return _texts(llm.generate([FRANCE, ""], GREEDY))


def works_after_a_refusal(llm):
    with contextlib.suppress(Exception):  # vLLM's own class of errors
        llm.generate([FRANCE, ""], GREEDY)
    out = llm.generate(FRANCE, GREEDY)
    return [len(out), *_texts(out)]


def empty_token_ids(llm):
    return _texts(llm.generate({"prompt_token_ids": []}, GREEDY))


def token_id_out_of_vocabulary(llm):
    return _texts(llm.generate({"prompt_token_ids": [1_000_000]}, GREEDY))


def token_id_negative(llm):
    return _texts(llm.generate({"prompt_token_ids": [-1]}, GREEDY))


def dict_without_prompt(llm):
    return _texts(llm.generate({"text": FRANCE}, GREEDY))


def number_as_prompt(llm):
    return _texts(llm.generate([42.5], GREEDY))


def prompt_too_long(llm):
    return _texts(llm.generate({"prompt_token_ids": [504] * 300}, GREEDY))


def prompt_as_long_as_the_model(llm):
    return _texts(llm.generate({"prompt_token_ids": [504] * 256}, GREEDY))


def prompt_one_shorter_than_the_model(llm):
    out = llm.generate({"prompt_token_ids": [504] * 255}, GREEDY)[0].outputs[0]
    return [len(out.token_ids), out.finish_reason]


def special_tokens_in_text(llm):
    out = llm.generate("<|im_start|>user\nHi<|im_end|>\n", GREEDY)[0]
    return out.prompt_token_ids


def surrounding_spaces(llm):
    return llm.generate("  two  spaces  ", GREEDY)[0].prompt_token_ids


def emoji(llm):
    out = llm.generate("I am happy \U0001f600 today", GREEDY)[0]
    return [out.prompt, len(out.prompt_token_ids)]


def params_by_position_and_keyword(llm):
    one, other = llm.generate(FRANCE, GREEDY), llm.generate(prompts=FRANCE, sampling_params=GREEDY)
    return _texts(one) == _texts(other)


def one_params_each(llm):
    params = [SamplingParams(temperature=0, max_tokens=k) for k in (1, 2, 3)]
    out = llm.generate(["One", "Two", "Three"], params)
    return [len(o.outputs[0].token_ids) for o in out]


def params_of_another_length(llm):
    return _texts(llm.generate(["One", "Two"], [GREEDY]))


def params_as_tuple(llm):
    out = llm.generate(["One", "Two"], (GREEDY, SamplingParams(temperature=0, max_tokens=1)))
    return [len(o.outputs[0].token_ids) for o in out]


def params_none(llm):
    out = llm.generate({"prompt_token_ids": [504] * 253}, None)[0].outputs[0]
    return 1 <= len(out.token_ids) <= 3


def params_left_as_they_were(llm):
    params = SamplingParams(temperature=0, max_tokens=2, stop="x", stop_token_ids=[5])
    llm.generate("One", params)
    return [params.max_tokens, params.stop, params.stop_token_ids[-1], params.temperature]


def params_changed_between_calls(llm):
    params, lengths = SamplingParams(temperature=0), []
    for k in (1, 2):
        params.max_tokens = k
        lengths.append(len(llm.generate("One", params)[0].outputs[0].token_ids))
    return lengths


def default_params_changed(llm):
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature = 2, 0
    return len(llm.generate("One", params)[0].outputs[0].token_ids)


def without_progress_bar(llm):
    return _texts(llm.generate(FRANCE, GREEDY, use_tqdm=False))


def own_progress_bar(llm):
    return _texts(llm.generate(FRANCE, GREEDY, use_tqdm=partial(tqdm, leave=False)))


def lora_request_none(llm):
    return _texts(llm.generate(FRANCE, GREEDY, lora_request=None))


def priority_none(llm):
    return _texts(llm.generate(FRANCE, GREEDY, priority=None))


def numpy_strings(llm):
    return _texts(llm.generate(np.array([FRANCE, "One, two,"]).tolist(), GREEDY))


def order_is_kept(llm):
    prompts = [f"Number {i}:" for i in range(12)]
    out = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2))
    return [o.prompt for o in out] == prompts


def same_prompt_twice(llm):
    one, other = llm.generate([FRANCE, FRANCE], GREEDY)
    return one.outputs[0].text == other.outputs[0].text


def guided_keyword(llm):
    return _texts(llm.generate(FRANCE, GREEDY, guided_options_request=None))


def prompt_token_ids_keyword(llm):
    return _texts(llm.generate(prompt_token_ids=[FRANCE_IDS], sampling_params=GREEDY))


def dict_with_cache_salt(llm):
    return _texts(llm.generate({"prompt": FRANCE, "cache_salt": "a"}, GREEDY))


def dict_with_images(llm):
    prompt = {"prompt": FRANCE, "multi_modal_data": {"image": [[0, 0, 0]]}}
    return _texts(llm.generate(prompt, GREEDY))


def numpy_token_ids(llm):
    prompts = [{"prompt_token_ids": ids.tolist()} for ids in np.array([FRANCE_IDS, FRANCE_IDS])]
    return _texts(llm.generate(prompts, GREEDY))


def priority_of_zero(llm):
    return _texts(llm.generate([FRANCE, "One, two,"], GREEDY, priority=[0, 0]))


def tokenization_without_special_tokens(llm):
    options = {"add_special_tokens": False}
    return llm.generate(FRANCE, GREEDY, tokenization_kwargs=options)[0].prompt_token_ids


def unknown_keyword(llm):
    return _texts(llm.generate(FRANCE, GREEDY, temperature=0))


def prompt_none(llm):
    return _texts(llm.generate(None, GREEDY))


def no_prompts_at_all(llm):
    return _texts(llm.generate(sampling_params=GREEDY))


def batches_by_slices(llm):
    prompts, texts = [f"{i} plus {i} is" for i in range(5)], []
    for start in range(0, len(prompts), 2):
        texts += _texts(llm.generate(prompts[start : start + 2], GREEDY, use_tqdm=False))
    return texts


def pairs_of_prompts_and_params(llm):
    pairs = [
        (FRANCE, SamplingParams(temperature=0.0, max_tokens=2)),
        ("One, two,", SamplingParams(temperature=0.0, logprobs=1, max_tokens=1)),
    ]
    out = llm.generate([p for p, _ in pairs], [s for _, s in pairs])
    return [[o.outputs[0].text, o.outputs[0].logprobs is None] for o in out]


def enqueued(llm):
    ids = llm.enqueue([FRANCE, "One, two,"], GREEDY)
    return [len(ids), *_texts(llm.wait_for_completion())]
