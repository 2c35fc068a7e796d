"""RequestOutput and CompletionOutput: attributes, types, copies."""

import copy
import dataclasses
import json
import pickle

from vllm import CompletionOutput, RequestOutput, SamplingParams
from vllm.logprobs import Logprob

GREEDY = SamplingParams(temperature=0, max_tokens=4)
SEVERAL = SamplingParams(n=3, temperature=0.8, max_tokens=4, seed=1)


def types(llm):
    out = llm.generate("Hello, my name is", GREEDY)
    return [type(out).__name__, type(out[0]).__name__, type(out[0].outputs[0]).__name__]


def instances(llm):
    out = llm.generate("Hello, my name is", GREEDY)[0]
    return [isinstance(out, RequestOutput), isinstance(out.outputs[0], CompletionOutput)]


def printing_as_the_quickstart_does(llm):
    prompts = ["Hello, my name is", "The capital of France is"]
    lines = []
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4)):
        lines.append(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
    return lines


def prompt_attributes(llm):
    out = llm.generate("The capital of France is", GREEDY)[0]
    return [out.prompt, out.prompt_token_ids, type(out.prompt_token_ids).__name__]


def completion_attributes(llm):
    out = llm.generate("The capital of France is", GREEDY)[0].outputs[0]
    return [out.index, out.text, list(out.token_ids), out.finish_reason, out.stop_reason]


def token_ids_is_a_list(llm):
    out = llm.generate("The capital of France is", GREEDY)[0].outputs[0]
    return [isinstance(out.token_ids, list), type(out.token_ids[0]).__name__, len(out.token_ids)]


def token_ids_add_up(llm):
    out = llm.generate("The capital of France is", GREEDY)[0]
    return out.prompt_token_ids + list(out.outputs[0].token_ids)


def what_was_not_asked_for(llm):
    out = llm.generate("The capital of France is", GREEDY)[0]
    return [out.prompt_logprobs, out.outputs[0].logprobs, out.outputs[0].cumulative_logprob]


def finished_flags(llm):
    out = llm.generate("The capital of France is", GREEDY)[0]
    return [out.finished, out.outputs[0].finished()]


def request_ids(llm):
    out = llm.generate(["One", "Two", "Three"], GREEDY)
    ids = [o.request_id for o in out]
    return [isinstance(ids[0], str), len(set(ids)), int(ids[1]) - int(ids[0])]


def further_attributes(llm):
    out = llm.generate("One", GREEDY)[0]
    return [out.lora_request, out.encoder_prompt, out.encoder_prompt_token_ids]


def completion_lora_request(llm):
    return llm.generate("One", GREEDY)[0].outputs[0].lora_request


def metrics_attribute(llm):
    return hasattr(llm.generate("One", GREEDY)[0], "metrics")


def num_cached_tokens_of_a_new_prompt(llm):
    return llm.generate("Quokkas are rarely seen in", GREEDY)[0].num_cached_tokens


def kv_transfer_params(llm):
    return llm.generate("One", GREEDY)[0].kv_transfer_params


def setting_text(llm):
    out = llm.generate("One", GREEDY)[0]
    out.outputs[0].text = out.outputs[0].text.upper().strip()
    return out.outputs[0].text


def setting_prompt(llm):
    out = llm.generate("One", GREEDY)[0]
    out.prompt = "Two"
    return out.prompt


def setting_token_ids(llm):
    out = llm.generate("One", GREEDY)[0]
    out.outputs[0].token_ids = out.outputs[0].token_ids[:2]
    return len(out.outputs[0].token_ids)


def setting_another_attribute(llm):
    out = llm.generate("One", GREEDY)[0]
    out.label = "mine"
    out.outputs[0].score = 0.5
    return [out.label, out.outputs[0].score]


def pickled(llm):
    out = llm.generate("The capital of France is", GREEDY)[0]
    back = pickle.loads(pickle.dumps(out))
    return [back.prompt, back.outputs[0].text, back.outputs[0].finish_reason]


def deep_copied(llm):
    out = llm.generate("The capital of France is", GREEDY)[0]
    return copy.deepcopy(out).outputs[0] == out.outputs[0]


def completion_is_a_dataclass(llm):
    out = llm.generate("One", GREEDY)[0]
    return [dataclasses.is_dataclass(out.outputs[0]), dataclasses.is_dataclass(out)]


def completion_as_json(llm):
    out = llm.generate("The capital of France is", GREEDY)[0].outputs[0]
    row = json.loads(json.dumps(dataclasses.asdict(out)))
    names = ["index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason"]
    return {name: row[name] for name in names}


def completion_with_logprobs_as_json(llm):
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1)
    out = llm.generate("The capital of France is", params)[0].outputs[0]
    return json.loads(json.dumps(dataclasses.asdict(out)))["logprobs"]


def results_sort_by_text(llm):
    out = llm.generate(["One", "Two", "Three"], GREEDY)
    return [o.prompt for o in sorted(out, key=lambda o: o.prompt)]


def several_completions(llm):
    out = llm.generate("Once upon a time", SEVERAL)[0]
    return [len(out.outputs), [o.index for o in out.outputs], len(out.outputs[2].token_ids)]


def several_completions_differ(llm):
    params = SamplingParams(n=4, temperature=1.5, max_tokens=8, seed=3)
    out = llm.generate("Once upon a time", params)[0]
    return len({o.text for o in out.outputs}) > 1


def several_completions_of_several_prompts(llm):
    out = llm.generate(["One", "Two"], SEVERAL)
    return [[o.prompt, len(o.outputs)] for o in out]


def choosing_the_best(llm):
    params = SamplingParams(n=3, temperature=1.0, max_tokens=4, logprobs=0, seed=5)
    out = llm.generate("Once upon a time", params)[0]
    best = max(out.outputs, key=lambda o: o.cumulative_logprob)
    return [isinstance(best.cumulative_logprob, float), best.cumulative_logprob < 0]


def constructing_a_completion():
    out = CompletionOutput(index=0, text="a", token_ids=[1], cumulative_logprob=-0.5, logprobs=None)
    return [out.text, out.finish_reason, out.stop_reason, out.finished()]


def constructing_a_request_output():
    done = CompletionOutput(0, "a", [1], None, None, finish_reason="stop")
    out = RequestOutput(
        request_id="7",
        prompt="x",
        prompt_token_ids=[5],
        prompt_logprobs=None,
        outputs=[done],
        finished=True,
    )
    return [out.request_id, out.outputs[0].text, out.num_cached_tokens, out.metrics]


def constructing_a_logprob():
    one, full = Logprob(-0.1), Logprob(logprob=-0.5, rank=2, decoded_token="a")
    return [one.logprob, one.rank, one.decoded_token, full.rank, full.decoded_token]


def seeded_twice(llm):
    params = SamplingParams(temperature=1.0, max_tokens=6, seed=42)
    one, other = (llm.generate("Once upon a time", params)[0].outputs[0] for _ in range(2))
    return one.token_ids == other.token_ids


def repr_names_the_text(llm):
    out = llm.generate("The capital of France is", GREEDY)[0]
    text = repr(out)
    return [text.startswith("RequestOutput("), "text=' Paris" in text, "finished=True" in text]


def all_texts(llm):
    out = llm.generate(["One", "Two"], GREEDY)
    return [completion.text for o in out for completion in o.outputs]


def replacing_a_field(llm):
    out = llm.generate("One", GREEDY)[0].outputs[0]
    return dataclasses.replace(out, text="other").text


def adding_a_completion(llm):
    out = llm.generate("One", GREEDY)[0]
    out.outputs.append(copy.copy(out.outputs[0]))
    return len(out.outputs)


def metrics_without_statistics(llm):
    return llm.generate("One", GREEDY)[0].metrics


def num_cached_tokens_of_a_prompt_again(llm):
    prompt = {"prompt_token_ids": [5000 + i for i in range(100)]}
    params = SamplingParams(temperature=0, max_tokens=1)
    return [llm.generate(prompt, params)[0].num_cached_tokens for _ in range(2)]


def num_cached_tokens_of_a_shared_prefix(llm):
    shared, params = [6000 + i for i in range(70)], SamplingParams(temperature=0, max_tokens=1)
    llm.generate({"prompt_token_ids": [*shared, 504]}, params)
    out = llm.generate({"prompt_token_ids": [*shared, 253, 260]}, params)
    return out[0].num_cached_tokens


def names_of_attributes(llm):
    out = llm.generate("One", GREEDY)[0]
    names = ["request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "outputs", "finished"]
    names += ["metrics", "lora_request", "encoder_prompt", "num_cached_tokens"]
    return [name for name in names if not hasattr(out, name)]


def names_of_completion_attributes():
    names = [field.name for field in dataclasses.fields(CompletionOutput)]
    return names[:5]


def logprob_as_dict():
    return dataclasses.asdict(Logprob(-0.5, 1, "a"))


def logprob_equality():
    return [Logprob(-0.5, 1, "a") == Logprob(-0.5, 1, "a"), Logprob(-0.5) == Logprob(-0.6)]
