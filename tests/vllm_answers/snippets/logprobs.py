"""Log-probabilities of sampled tokens and of prompts."""

import math

from vllm import SamplingParams

PROMPT = "The capital of France is"


def _greedy(llm, prompt=PROMPT, **settings):
    settings = {"temperature": 0, "max_tokens": 4, **settings}
    return llm.generate(prompt, SamplingParams(**settings))[0]


def _rows(logprobs):
    return [
        {str(token): [lp.logprob, lp.rank, lp.decoded_token] for token, lp in row.items()}
        for row in logprobs
    ]


def none_of_the_others(llm):
    return _rows(_greedy(llm, logprobs=0).outputs[0].logprobs)


def one_most_likely(llm):
    return _rows(_greedy(llm, logprobs=1).outputs[0].logprobs)


def five_most_likely(llm):
    return _rows(_greedy(llm, logprobs=5).outputs[0].logprobs)


def true_is_one(llm):
    return _rows(_greedy(llm, logprobs=True).outputs[0].logprobs)


def as_many_as_allowed(llm):
    return [len(row) for row in _greedy(llm, logprobs=20).outputs[0].logprobs]


def more_than_allowed(llm):
    return len(_greedy(llm, logprobs=21).outputs[0].logprobs[0])


def all_of_them_when_not_allowed(llm):
    return len(_greedy(llm, logprobs=-1).outputs[0].logprobs[0])


def all_of_them(processed_llm):
    rows = _greedy(processed_llm, logprobs=-1, max_tokens=2).outputs[0].logprobs
    return [len(rows[0]), math.fsum(math.exp(lp.logprob) for lp in rows[1].values())]


def types(llm):
    logprobs = _greedy(llm, logprobs=1).outputs[0].logprobs
    token, lp = next(iter(logprobs[0].items()))
    names = [type(x).__name__ for x in (logprobs, logprobs[0], token, lp, lp.logprob, lp.rank)]
    return names


def list_is_a_list(llm):
    logprobs = _greedy(llm, logprobs=1).outputs[0].logprobs
    return [isinstance(logprobs, list), isinstance(logprobs[0], dict), len(logprobs + logprobs)]


def sampled_token_comes_first(llm):
    params = SamplingParams(temperature=1.5, max_tokens=6, logprobs=2, seed=11)
    out = llm.generate(PROMPT, params)[0].outputs[0]
    firsts = [next(iter(row)) for row in out.logprobs]
    return firsts == list(out.token_ids)


def sampled_token_is_extra(llm):
    params = SamplingParams(temperature=2.0, max_tokens=8, logprobs=2, seed=11)
    out = llm.generate(PROMPT, params)[0].outputs[0]
    return all(
        len(row) == (2 if row[token].rank <= 2 else 3)
        for token, row in zip(out.token_ids, out.logprobs, strict=True)
    )


def order_by_rank(llm):
    row = _greedy(llm, logprobs=5).outputs[0].logprobs[0]
    return [lp.rank for lp in row.values()]


def chosen_logprob(llm):
    out = _greedy(llm, logprobs=0).outputs[0]
    return [row[t].logprob for t, row in zip(out.token_ids, out.logprobs, strict=True)]


def cumulative_logprob(llm):
    return _greedy(llm, logprobs=0).outputs[0].cumulative_logprob


def cumulative_logprob_of_longer_text(llm):
    return _greedy(llm, "Water boils at", logprobs=2, max_tokens=10).outputs[0].cumulative_logprob


def decoded_tokens(llm):
    out = _greedy(llm, "1, 2, 3, 4,", logprobs=0, max_tokens=6).outputs[0]
    return [row[t].decoded_token for t, row in zip(out.token_ids, out.logprobs, strict=True)]


def decoded_tokens_join_to_the_text(llm):
    out = _greedy(llm, "1, 2, 3, 4,", logprobs=0, max_tokens=6).outputs[0]
    rows = zip(out.token_ids, out.logprobs, strict=True)
    return "".join(row[t].decoded_token for t, row in rows) == out.text


def decoded_tokens_without_text(llm):
    out = _greedy(llm, logprobs=1, detokenize=False).outputs[0]
    return [lp.decoded_token for lp in out.logprobs[0].values()]


def decoded_tokens_of_part_of_a_character(llm):
    part = llm.get_tokenizer().encode("\U0001f600", add_special_tokens=False)[0]
    params = SamplingParams(
        temperature=0, max_tokens=2, logprobs=0, allowed_token_ids=[part], ignore_eos=True
    )
    out = llm.generate(PROMPT, params)[0].outputs[0]
    return [row[part].decoded_token for row in out.logprobs]


def raw_whatever_the_temperature(llm):
    params = SamplingParams(temperature=0.3, max_tokens=1, logprobs=3, seed=1)
    row = llm.generate(PROMPT, params)[0].outputs[0].logprobs[0]
    return sorted([lp.rank, lp.logprob] for lp in row.values() if lp.rank <= 3)


def raw_whatever_the_bias(llm):
    out = _greedy(llm, logprobs=1, max_tokens=1, logit_bias={260: 100.0}).outputs[0]
    return [list(out.token_ids), _rows(out.logprobs)]


def raw_whatever_is_allowed(llm):
    out = _greedy(llm, logprobs=1, max_tokens=1, allowed_token_ids=[260, 253]).outputs[0]
    return [list(out.token_ids), _rows(out.logprobs)]


def of_several_completions(llm):
    params = SamplingParams(n=2, temperature=1.0, max_tokens=3, logprobs=2, seed=4)
    out = llm.generate(PROMPT, params)[0]
    return [len(o.logprobs) for o in out.outputs]


def prompt_of_one_most_likely(llm):
    rows = _greedy(llm, prompt_logprobs=1, max_tokens=1).prompt_logprobs
    return [rows[0], _rows(rows[1:])]


def prompt_of_none_of_the_others(llm):
    rows = _greedy(llm, prompt_logprobs=0, max_tokens=1).prompt_logprobs
    return [len(rows), rows[0], _rows(rows[1:])]


def prompt_of_three(llm):
    rows = _greedy(llm, "The sky is blue because", prompt_logprobs=3, max_tokens=1).prompt_logprobs
    return _rows(rows[1:])


def prompt_types(llm):
    out = _greedy(llm, prompt_logprobs=1, max_tokens=1)
    rows = out.prompt_logprobs
    return [isinstance(rows, list), len(rows) == len(out.prompt_token_ids), type(rows[1]).__name__]


def prompt_tokens_come_first(llm):
    out = _greedy(llm, prompt_logprobs=2, max_tokens=1)
    firsts = [next(iter(row)) for row in out.prompt_logprobs[1:]]
    return firsts == out.prompt_token_ids[1:]


def prompt_score(llm):
    out = _greedy(llm, "Paris is the capital of France.", prompt_logprobs=0, max_tokens=1)
    rows = zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True)
    return sum(row[token].logprob for token, row in rows)


def prompt_ranks(llm):
    out = _greedy(llm, "Paris is the capital of France.", prompt_logprobs=0, max_tokens=1)
    rows = zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True)
    return [row[token].rank for token, row in rows]


def prompt_more_than_allowed(llm):
    return len(_greedy(llm, prompt_logprobs=21).prompt_logprobs)


def prompt_and_completion(llm):
    out = _greedy(llm, prompt_logprobs=1, logprobs=2, max_tokens=3)
    return [len(out.prompt_logprobs), len(out.outputs[0].logprobs)]


def prompt_asked_for_twice(llm):
    one, other = (_greedy(llm, prompt_logprobs=0, max_tokens=1).prompt_logprobs for _ in range(2))
    return len(one) == len(other)


def prompt_of_one_token(llm):
    out = _greedy(llm, {"prompt_token_ids": [504]}, prompt_logprobs=1, max_tokens=1)
    return out.prompt_logprobs


def continuation_score(llm):
    tokenizer = llm.get_tokenizer()
    context = tokenizer.encode("The capital of France is")
    whole = context + tokenizer.encode(" Paris", add_special_tokens=False)
    out = _greedy(llm, {"prompt_token_ids": whole}, prompt_logprobs=1, max_tokens=1)
    rows = zip(whole[len(context) :], out.prompt_logprobs[len(context) :], strict=True)
    return [[row[t].logprob, row[t].rank == 1] for t, row in rows]


def of_chosen_tokens(llm):
    out = _greedy(llm, logprob_token_ids=[260, 4528], max_tokens=1).outputs[0]
    return _rows(out.logprobs)


def length_with_a_stop_string(llm):
    out = _greedy(llm, logprobs=1, stop=["."]).outputs[0]
    return [len(out.logprobs), len(out.token_ids), out.cumulative_logprob]


def of_an_end_token(llm):
    out = _greedy(llm, logprobs=1, logit_bias={2: 100.0}).outputs[0]
    return _rows(out.logprobs)


def prompt_all_of_them(processed_llm):
    rows = _greedy(processed_llm, "Hello there", prompt_logprobs=-1, max_tokens=1).prompt_logprobs
    return [len(row) for row in rows[1:]]


def of_mixed_requests(llm):
    params = [SamplingParams(temperature=0, max_tokens=1, logprobs=k) for k in (None, 0, 3)]
    out = llm.generate([PROMPT] * 3, params)
    return [o.outputs[0].logprobs and len(o.outputs[0].logprobs[0]) for o in out]


def prompt_of_text_with_special_tokens(llm):
    text = "<|im_start|>user\nHi<|im_end|>"
    rows = _greedy(llm, text, prompt_logprobs=0, max_tokens=1).prompt_logprobs
    return [lp.decoded_token for row in rows[1:] for lp in row.values()]


def most_likely_token_by_text(llm):
    row = _greedy(llm, logprobs=5, max_tokens=1).outputs[0].logprobs[0]
    best = max(row.values(), key=lambda lp: lp.logprob)
    return best.decoded_token


def yes_or_no_probabilities(llm):
    question = "Is the sky blue? Answer yes or no. Answer:"
    row = _greedy(llm, question, logprobs=20, max_tokens=1).outputs[0].logprobs[0]
    found = {lp.decoded_token: math.exp(lp.logprob) for lp in row.values()}
    return [round(found.get(" Yes", 0), 3), round(found.get(" No", 0), 3)]
