"""logprobs_mode="processed_logprobs": log-probabilities of what was sampled from."""

import math

from vllm import SamplingParams

PROMPT = "The capital of France is"


def _rows(out):
    return [sorted([lp.logprob, lp.rank] for lp in row.values()) for row in out.logprobs]


def _first(llm, **settings):
    settings = {"max_tokens": 1, "logprobs": 4, "seed": 1, **settings}
    row = llm.generate(PROMPT, SamplingParams(**settings))[0].outputs[0].logprobs[0]
    return sorted(
        [lp.logprob, token] for token, lp in row.items() if lp.rank <= settings["logprobs"]
    )


def plain(processed_llm):
    return _first(processed_llm, temperature=1.0)


def of_a_temperature(processed_llm):
    return _first(processed_llm, temperature=0.5)


def of_a_high_temperature(processed_llm):
    return _first(processed_llm, temperature=1.8)


def of_greedy_sampling(processed_llm):
    return _first(processed_llm, temperature=0)


def of_top_k(processed_llm):
    return _first(processed_llm, temperature=0.8, top_k=4)


def of_top_k_the_rest_is_impossible(processed_llm):
    params = SamplingParams(temperature=1.0, top_k=2, max_tokens=1, logprobs=4, seed=1)
    row = processed_llm.generate(PROMPT, params)[0].outputs[0].logprobs[0]
    return sum(lp.logprob == -math.inf for lp in row.values())


def of_top_p(processed_llm):
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=1, logprobs=-1, seed=1)
    row = processed_llm.generate(PROMPT, params)[0].outputs[0].logprobs[0]
    return sorted(lp.logprob for lp in row.values() if lp.logprob > -math.inf)


def of_min_p(processed_llm):
    params = SamplingParams(temperature=1.0, min_p=0.05, max_tokens=1, logprobs=-1, seed=1)
    row = processed_llm.generate(PROMPT, params)[0].outputs[0].logprobs[0]
    return sorted(lp.logprob for lp in row.values() if lp.logprob > -math.inf)


def of_a_repetition_penalty(processed_llm):
    return _first(processed_llm, temperature=1.0, repetition_penalty=1.5)


def of_penalties_on_a_longer_text(processed_llm):
    params = SamplingParams(
        temperature=0, presence_penalty=0.5, frequency_penalty=0.5, max_tokens=6, logprobs=1
    )
    out = processed_llm.generate("One two one two one two", params)[0].outputs[0]
    return [list(out.token_ids), _rows(out)]


def of_a_bias(processed_llm):
    return _first(processed_llm, temperature=1.0, logit_bias={260: 3.0, 7042: -2.0})


def of_allowed_tokens(processed_llm):
    return _first(processed_llm, temperature=1.0, logprobs=2, allowed_token_ids=[260, 7042])


def of_bad_words(processed_llm):
    return _first(processed_llm, temperature=1.0, bad_words=["Paris"])


def of_min_tokens(processed_llm):
    params = SamplingParams(temperature=1.0, min_tokens=1, max_tokens=1, logprobs=-1, seed=1)
    row = processed_llm.generate(PROMPT, params)[0].outputs[0].logprobs[0]
    return [row[2].logprob, row[0].logprob]


def sums_to_one(processed_llm):
    params = SamplingParams(temperature=0.7, top_k=10, max_tokens=3, logprobs=-1, seed=2)
    rows = processed_llm.generate(PROMPT, params)[0].outputs[0].logprobs
    return [math.fsum(math.exp(lp.logprob) for lp in row.values()) for row in rows]


def of_the_prompt(processed_llm):
    params = SamplingParams(temperature=0.5, top_k=3, max_tokens=1, prompt_logprobs=0, seed=1)
    out = processed_llm.generate(PROMPT, params)[0]
    rows = zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True)
    return [row[token].logprob for token, row in rows]
