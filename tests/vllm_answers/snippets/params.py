"""SamplingParams: construction, defaults, assignment, refusals, copies."""

import copy
import pickle

import numpy as np
from vllm import SamplingParams


def numbers_by_default():
    p = SamplingParams()
    return [p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.max_tokens, p.min_tokens]


def penalties_by_default():
    p = SamplingParams()
    return [p.presence_penalty, p.frequency_penalty, p.repetition_penalty]


def lists_by_default():
    p = SamplingParams()
    return [p.stop, p.stop_token_ids, p.bad_words]


def nones_by_default():
    p = SamplingParams()
    return [p.seed, p.logprobs, p.prompt_logprobs, p.logit_bias, p.allowed_token_ids]


def flags_by_default():
    p = SamplingParams()
    return [p.ignore_eos, p.detokenize, p.skip_special_tokens, p.include_stop_str_in_output]


def further_fields_by_default():
    p = SamplingParams()
    return [p.spaces_between_special_tokens, p.structured_outputs, p.extra_args]


def output_kind_by_default():
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams().output_kind == RequestOutputKind.CUMULATIVE


def one_stop_string_becomes_a_list():
    return SamplingParams(stop="\n").stop


def stop_strings():
    return SamplingParams(stop=["\n", "###", "</s>"]).stop


def stop_strings_repeated():
    return SamplingParams(stop=["a", "b", "a"]).stop


def stop_none():
    return SamplingParams(stop=None).stop


def stop_empty_string():
    return SamplingParams(stop="").stop


def stop_list_with_empty_string():
    return SamplingParams(stop=["a", ""]).stop


def stop_token_ids_of_a_list():
    return SamplingParams(stop_token_ids=[2, 0]).stop_token_ids


def stop_token_ids_of_a_set():
    return sorted(SamplingParams(stop_token_ids={0, 2}).stop_token_ids)


def stop_token_ids_repeated():
    return SamplingParams(stop_token_ids=[2, 0, 2]).stop_token_ids


def bad_words_repeated():
    return SamplingParams(bad_words=["no", "never", "no"]).bad_words


def bad_words_empty():
    return SamplingParams(bad_words=[""]).bad_words


def temperature_zero_resets_truncation():
    p = SamplingParams(temperature=0.0, top_p=0.5, top_k=10, min_p=0.2)
    return [p.temperature, p.top_p, p.top_k, p.min_p]


def temperature_as_int():
    return SamplingParams(temperature=1).temperature


def temperature_close_to_zero():
    return SamplingParams(temperature=0.001).temperature


def temperature_negative():
    return SamplingParams(temperature=-0.1).temperature


def temperature_nan():
    return SamplingParams(temperature=float("nan")).temperature


def temperature_two():
    return SamplingParams(temperature=2.0).temperature


def temperature_above_two():
    return SamplingParams(temperature=2.5).temperature


def top_p_zero():
    return SamplingParams(top_p=0).top_p


def top_p_above_one():
    return SamplingParams(top_p=1.01).top_p


def top_k_minus_one():
    return SamplingParams(top_k=-1).top_k


def top_k_minus_two():
    return SamplingParams(top_k=-2).top_k


def top_k_as_float():
    return SamplingParams(top_k=5.0).top_k


def min_p_above_one():
    return SamplingParams(min_p=1.5).min_p


def presence_penalty_too_large():
    return SamplingParams(presence_penalty=2.5).presence_penalty


def frequency_penalty_negative():
    return SamplingParams(frequency_penalty=-2.0).frequency_penalty


def repetition_penalty_zero():
    return SamplingParams(repetition_penalty=0.0).repetition_penalty


def repetition_penalty_above_two():
    return SamplingParams(repetition_penalty=3.0).repetition_penalty


def n_zero():
    return SamplingParams(n=0).n


def n_greedy():
    return SamplingParams(n=2, temperature=0).n


def max_tokens_none():
    return SamplingParams(max_tokens=None).max_tokens


def max_tokens_zero():
    return SamplingParams(max_tokens=0).max_tokens


def min_tokens_negative():
    return SamplingParams(min_tokens=-1).min_tokens


def min_tokens_above_max_tokens():
    return SamplingParams(min_tokens=32, max_tokens=16).min_tokens


def min_tokens_without_limit():
    return SamplingParams(min_tokens=32, max_tokens=None).min_tokens


def logprobs_true():
    p = SamplingParams(logprobs=True, prompt_logprobs=True)
    return [p.logprobs, p.prompt_logprobs]


def logprobs_zero():
    return SamplingParams(logprobs=0).logprobs


def logprobs_minus_one():
    return SamplingParams(logprobs=-1, prompt_logprobs=-1).logprobs


def logprobs_minus_two():
    return SamplingParams(logprobs=-2).logprobs


def prompt_logprobs_minus_two():
    return SamplingParams(prompt_logprobs=-2).prompt_logprobs


def stop_string_without_text():
    return SamplingParams(stop=["a"], detokenize=False).stop


def seed_minus_one():
    return SamplingParams(seed=-1).seed


def seed_zero():
    return SamplingParams(seed=0).seed


def numpy_numbers():
    p = SamplingParams(temperature=np.float64(0.5), top_p=np.float64(0.9))
    return [float(p.temperature), float(p.top_p)]


def unknown_keyword():
    return SamplingParams(temprature=0.5).temperature


def removed_keyword():
    return SamplingParams(best_of=2).n


def structured_outputs_without_constraint():
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams().json


def structured_outputs_with_two_constraints():
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(regex="a", choice=["a"]).regex


def structured_outputs_fields():
    from vllm.sampling_params import StructuredOutputsParams

    p = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    return [p.structured_outputs.choice, p.structured_outputs.json, p.structured_outputs.regex]


def assigning_max_tokens():
    p = SamplingParams()
    p.max_tokens = 64
    return p.max_tokens


def assigning_temperature_and_top_p():
    p = SamplingParams(temperature=0.0)
    p.temperature = 0.7
    p.top_p = 0.95
    return [p.temperature, p.top_p]


def assigning_in_a_loop():
    p = SamplingParams()
    for name, value in {"n": 3, "seed": 7, "logprobs": 2, "ignore_eos": True}.items():
        setattr(p, name, value)
    return [p.n, p.seed, p.logprobs, p.ignore_eos]


def appending_to_stop():
    p = SamplingParams()
    p.stop.append("\n")
    return [p.stop, SamplingParams().stop]


def extending_stop_token_ids():
    p = SamplingParams(stop_token_ids=[1])
    p.stop_token_ids += [2]
    return p.stop_token_ids


def clone_is_independent():
    p = SamplingParams(stop=["a"], max_tokens=5)
    q = p.clone()
    q.stop.append("b")
    q.max_tokens = 6
    return [p.stop, p.max_tokens, q.stop, q.max_tokens]


def deepcopy_is_equal():
    p = SamplingParams(temperature=0.3, stop=["x"], logit_bias={5: 1.0})
    return copy.deepcopy(p) == p


def equality():
    one, other = SamplingParams(temperature=0.3), SamplingParams(temperature=0.4)
    return [one == SamplingParams(temperature=0.3), one == other]


def pickling():
    p = SamplingParams(temperature=0.3, stop=["x"], max_tokens=7)
    return pickle.loads(pickle.dumps(p)) == p


def from_optional_of_nones():
    p = SamplingParams.from_optional(n=None, temperature=None, top_p=None, presence_penalty=None)
    return [p.n, p.temperature, p.top_p, p.presence_penalty]


def from_optional_keeps_no_limit():
    return SamplingParams.from_optional(max_tokens=None).max_tokens


def from_optional_logit_bias():
    p = SamplingParams.from_optional(logit_bias={"5": 200, "6": -3.5})
    return [[token, bias] for token, bias in p.logit_bias.items()]


def from_optional_bad_logit_bias():
    return SamplingParams.from_optional(logit_bias={"five": 1.0}).logit_bias


def logit_bias_kept():
    return [[k, v] for k, v in SamplingParams(logit_bias={3: 1.5}).logit_bias.items()]


def allowed_token_ids_kept():
    return SamplingParams(allowed_token_ids=[5, 6, 7]).allowed_token_ids


def extra_args_kept():
    return SamplingParams(extra_args={"request": "a"}).extra_args


def skip_clone_flag():
    return SamplingParams(skip_clone=True).skip_clone


def repr_names_the_settings():
    text = repr(SamplingParams(temperature=0.25, max_tokens=7))
    return [text.startswith("SamplingParams("), "temperature=0.25" in text, "max_tokens=7" in text]


def by_position():
    p = SamplingParams(2, 0.5)
    return [p.n, p.presence_penalty]


def from_a_dict():
    p = SamplingParams(**{"temperature": 0.8, "top_p": 0.95, "max_tokens": 100})
    return [p.temperature, p.top_p, p.max_tokens]


def shallow_copy():
    p = SamplingParams(temperature=0.3)
    q = copy.copy(p)
    q.temperature = 0.6
    return [p.temperature, q.temperature]


def temperature_as_text():
    return SamplingParams(temperature="0.7").temperature


def n_as_float():
    return SamplingParams(n=2.0).n


def large_seed():
    return SamplingParams(seed=2**40).seed


def large_logit_bias():
    return list(SamplingParams(logit_bias={5: 1000.0}).logit_bias.values())


def numpy_penalty():
    return float(SamplingParams(presence_penalty=np.float32(0.5)).presence_penalty)


def numpy_seed():
    return int(SamplingParams(seed=np.int64(7)).seed)


def numpy_max_tokens():
    return int(SamplingParams(max_tokens=np.int64(7)).max_tokens)


def logits_processors_keyword():
    return SamplingParams(logits_processors=[]).n


def guided_decoding_keyword():
    return SamplingParams(guided_decoding=None).n


def truncate_prompt_tokens_keyword():
    return SamplingParams(truncate_prompt_tokens=10).n


def output_kind_assigned():
    from vllm.sampling_params import RequestOutputKind

    p = SamplingParams()
    p.output_kind = RequestOutputKind.FINAL_ONLY
    return [p.output_kind.name, [kind.name for kind in RequestOutputKind]]


def bad_words_kept():
    return SamplingParams(bad_words=["no", "never"]).bad_words


def stop_token_ids_of_text():
    return SamplingParams(stop_token_ids=["2"]).stop_token_ids


def several_params_from_one():
    base = SamplingParams(temperature=0.8, max_tokens=32)
    params = [base.clone() for _ in range(3)]
    for seed, p in enumerate(params):
        p.seed = seed
    return [[p.seed for p in params], base.seed]
