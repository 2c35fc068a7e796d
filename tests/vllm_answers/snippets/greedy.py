"""Greedy texts, limits, stops, and settings that move the choice of tokens."""

from vllm import SamplingParams

FRANCE = "The capital of France is"


def _complete(llm, prompt=FRANCE, **settings):
    settings = {"temperature": 0, "max_tokens": 8, **settings}
    return llm.generate(prompt, SamplingParams(**settings))[0].outputs[0]


def _ending(out):
    return [out.text, out.finish_reason, out.stop_reason, len(out.token_ids)]


def texts(llm):
    prompts = ["Hello, my name is", "The president of the United States is", FRANCE]
    out = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    return [o.outputs[0].text for o in out]


def text_of_code(llm):
    return _complete(llm, "def fibonacci(n):\n    if n <= 1:\n", max_tokens=12).text


def text_of_other_scripts(llm):
    return _complete(llm, "日本の首都は", max_tokens=6).text


def token_ids(llm):
    return list(_complete(llm, "The quick brown fox").token_ids)


def max_tokens_one(llm):
    return _ending(_complete(llm, max_tokens=1))


def max_tokens_none_ends_at_the_models_length(llm):
    prompt = {"prompt_token_ids": [504] * 250}
    out = _complete(llm, prompt, max_tokens=None, ignore_eos=True)
    return [len(out.token_ids), out.finish_reason]


def max_tokens_beyond_the_models_length(llm):
    prompt = {"prompt_token_ids": [504] * 252}
    out = _complete(llm, prompt, max_tokens=100, ignore_eos=True)
    return [len(out.token_ids), out.finish_reason]


def stop_string(llm):
    return _ending(_complete(llm, stop="."))


def stop_string_kept(llm):
    return _ending(_complete(llm, stop=["."], include_stop_str_in_output=True))


def stop_string_within_a_token(llm):
    return _ending(_complete(llm, stop=["ari"]))


def stop_string_within_a_token_kept(llm):
    return _ending(_complete(llm, stop=["ari"], include_stop_str_in_output=True))


def stop_string_over_several_tokens(llm):
    return _ending(_complete(llm, "1, 2, 3, 4,", stop=["6, 7"], max_tokens=16))


def stop_string_that_never_comes(llm):
    return _ending(_complete(llm, stop=["###"]))


def several_stop_strings(llm):
    return _ending(_complete(llm, stop=["\n\n", ".", "Paris"]))


def stop_token(llm):
    return _ending(_complete(llm, stop_token_ids=[30]))


def stop_token_kept(llm):
    return _ending(_complete(llm, stop_token_ids=[30], include_stop_str_in_output=True))


def stop_token_out_of_vocabulary(llm):
    return _ending(_complete(llm, stop_token_ids=[1_000_000]))


def stop_string_and_token(llm):
    return _ending(_complete(llm, stop=["Paris"], stop_token_ids=[30]))


def stop_before_min_tokens(llm):
    return _ending(_complete(llm, stop=["."], min_tokens=4))


def stop_token_before_min_tokens(llm):
    return _ending(_complete(llm, stop_token_ids=[30], min_tokens=4))


def end_of_turn(llm):
    prompt = "<|im_start|>user\nSay only: hi<|im_end|>\n<|im_start|>assistant\nhi"
    out = _complete(llm, prompt, logit_bias={2: 100.0})
    return [*_ending(out), list(out.token_ids)]


def end_of_turn_ignored(llm):
    out = _complete(llm, logit_bias={2: 100.0}, ignore_eos=True, max_tokens=3)
    return [*_ending(out), list(out.token_ids)]


def end_of_turn_shown(llm):
    settings = {"logit_bias": {2: 100.0}, "skip_special_tokens": False}
    return _ending(_complete(llm, **settings))


def end_of_turn_shown_when_ignored(llm):
    settings = {"logit_bias": {2: 100.0}, "skip_special_tokens": False, "ignore_eos": True}
    return _ending(_complete(llm, max_tokens=2, **settings))


def end_of_text_is_a_further_end(llm):
    out = _complete(llm, logit_bias={0: 100.0})
    return [*_ending(out), list(out.token_ids)]


def end_of_text_before_min_tokens(llm):
    out = _complete(llm, logit_bias={0: 50.0, 2: 50.0}, min_tokens=3, max_tokens=6)
    return [out.finish_reason, len(out.token_ids)]


def min_tokens_equal_to_max_tokens(llm):
    return _ending(_complete(llm, logit_bias={2: 50.0}, min_tokens=4, max_tokens=4))


def bad_word(llm):
    return _complete(llm, bad_words=["Paris"]).text


def bad_words(llm):
    return _complete(llm, bad_words=["Paris", "the", "located"]).text


def bad_word_of_several_tokens(llm):
    return _complete(llm, "1, 2, 3, 4,", bad_words=["5, 6"], max_tokens=8).text


def bias_towards_a_token(llm):
    return list(_complete(llm, logit_bias={260: 50.0}, max_tokens=3).token_ids)


def bias_against_a_token(llm):
    return list(_complete(llm, logit_bias={7042: -100.0}, max_tokens=3).token_ids)


def bias_out_of_vocabulary(llm):
    return list(_complete(llm, logit_bias={1_000_000: 1.0}).token_ids)


def allowed_tokens(llm):
    return list(_complete(llm, allowed_token_ids=[260, 253, 314], max_tokens=4).token_ids)


def allowed_tokens_empty(llm):
    return list(_complete(llm, allowed_token_ids=[]).token_ids)


def allowed_tokens_out_of_vocabulary(llm):
    return list(_complete(llm, allowed_token_ids=[1_000_000]).token_ids)


def repetition_penalty(llm):
    return _complete(llm, "a b a b a b a b", repetition_penalty=1.5).text


def presence_penalty(llm):
    return _complete(llm, "a b a b a b a b", presence_penalty=2.0, max_tokens=10).text


def frequency_penalty(llm):
    return _complete(llm, "a b a b a b a b", frequency_penalty=1.5, max_tokens=10).text


def frequency_penalty_negative(llm):
    return _complete(llm, "Tell me:", frequency_penalty=-2.0, max_tokens=8).text


def all_penalties(llm):
    settings = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    return _complete(llm, "Roses are red, violets are", max_tokens=12, **settings).text


def without_text(llm):
    out = _complete(llm, detokenize=False)
    return [out.text, list(out.token_ids)]


def top_k_one_is_greedy(llm):
    settings = {"temperature": 1.0, "top_k": 1, "seed": 0}
    return _complete(llm, **settings).text == _complete(llm).text


def tiny_top_p_is_greedy(llm):
    settings = {"temperature": 1.0, "top_p": 1e-6, "seed": 0}
    return _complete(llm, **settings).text == _complete(llm).text


def min_p_one_is_greedy(llm):
    settings = {"temperature": 1.0, "min_p": 1.0, "seed": 0}
    return _complete(llm, **settings).text == _complete(llm).text


def batch_equals_one_by_one(llm):
    prompts = ["Hello, my name is", FRANCE, "The future of AI is"]
    params = SamplingParams(temperature=0, max_tokens=6)
    batch = [o.outputs[0].text for o in llm.generate(prompts, params)]
    return batch == [llm.generate(p, params)[0].outputs[0].text for p in prompts]
