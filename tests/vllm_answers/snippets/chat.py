"""LLM.chat."""

from vllm import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# Shows everything that a template can see of a conversation.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}:"
    "{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def _prompt(llm, messages, **options):
    params = SamplingParams(temperature=0, max_tokens=1)
    return llm.chat(messages, params, use_tqdm=False, **options)[0].prompt


def one_conversation(llm):
    out = llm.chat(QUESTION, GREEDY)
    return [len(out), out[0].outputs[0].text]


def prompt_of_a_conversation(llm):
    return _prompt(llm, QUESTION)


def prompt_token_ids(llm):
    return llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=1))[0].prompt_token_ids


def several_conversations(llm):
    other = [{"role": "user", "content": "Name a colour."}]
    return [o.outputs[0].text for o in llm.chat([QUESTION, other], GREEDY)]


def system_message(llm):
    return _prompt(llm, [{"role": "system", "content": "Be brief."}, *QUESTION])


def longer_conversation(llm):
    messages = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "Write an essay about the importance of higher education."},
    ]
    out = llm.chat(messages, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    return [out[0].prompt, out[0].outputs[0].text]


def params_by_keyword(llm):
    return llm.chat(messages=QUESTION, sampling_params=GREEDY)[0].outputs[0].text


def params_one_each(llm):
    params = [SamplingParams(temperature=0, max_tokens=k) for k in (1, 3)]
    return [len(o.outputs[0].token_ids) for o in llm.chat([QUESTION, QUESTION], params)]


def params_of_another_length(llm):
    return len(llm.chat([QUESTION, QUESTION], [GREEDY]))


def several_completions(llm):
    params = SamplingParams(n=2, temperature=1.0, max_tokens=2, seed=1)
    return len(llm.chat(QUESTION, params)[0].outputs)


def with_stop_string(llm):
    out = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=8, stop="France"))
    return [out[0].outputs[0].text, out[0].outputs[0].stop_reason]


def with_logprobs(llm):
    out = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=2, logprobs=1))[0].outputs[0]
    return [row[t].logprob for t, row in zip(out.token_ids, out.logprobs, strict=True)]


def without_generation_prompt(llm):
    return _prompt(llm, QUESTION, add_generation_prompt=False)


def continue_final_message(llm):
    messages = [*QUESTION, {"role": "assistant", "content": "The capital is"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    out = llm.chat(messages, GREEDY, **options)[0]
    return [out.prompt, out.outputs[0].text]


def continue_and_open_a_turn(llm):
    messages = [*QUESTION, {"role": "assistant", "content": "The capital is"}]
    return _prompt(llm, messages, continue_final_message=True)


def own_template(llm):
    return _prompt(llm, QUESTION, chat_template=TEMPLATE)


def template_arguments(llm):
    template = "{{ messages[0].content }}{% if loud %}!{% endif %}"
    options = {"chat_template": template, "chat_template_kwargs": {"loud": True}}
    return _prompt(llm, QUESTION, **options)


def enable_thinking(llm):
    return _prompt(llm, QUESTION, chat_template_kwargs={"enable_thinking": False})


def tools(llm):
    return _prompt(llm, QUESTION, chat_template=TEMPLATE, tools=[WEATHER])


def tools_empty(llm):
    return _prompt(llm, QUESTION, chat_template=TEMPLATE, tools=[])


def _call(arguments):
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [*QUESTION, answer, {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}]


def tool_call_with_arguments_as_json(llm):
    return _prompt(llm, _call('{"city": "Paris", "days": 2}'), chat_template=TEMPLATE)


def tool_call_with_arguments_as_dict(llm):
    return _prompt(llm, _call({"city": "Paris"}), chat_template=TEMPLATE)


def tool_call_without_arguments(llm):
    return _prompt(llm, _call(""), chat_template=TEMPLATE)


def content_none(llm):
    messages = [*QUESTION, {"role": "assistant", "content": None}, *QUESTION]
    return _prompt(llm, messages)


def content_absent(llm):
    messages = [*QUESTION, {"role": "assistant"}, *QUESTION]
    return _prompt(llm, messages)


def content_of_one_part(llm):
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    return _prompt(llm, messages)


def content_of_two_parts(llm):
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]
    return _prompt(llm, [{"role": "user", "content": parts}])


def content_of_input_text(llm):
    return _prompt(llm, [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}])


def content_of_a_refusal(llm):
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}
    return _prompt(llm, [*QUESTION, refusal, *QUESTION])


def content_of_strings(llm):
    return _prompt(llm, [{"role": "user", "content": ["Hello", "you"]}])


def content_empty(llm):
    return _prompt(llm, [{"role": "user", "content": ""}])


def conversations_empty(llm):
    return llm.chat([], GREEDY)


def message_without_role(llm):
    return _prompt(llm, [{"content": "Hello"}])


def template_that_refuses(llm):
    return _prompt(llm, QUESTION, chat_template="{{ raise_exception('no') }}")


def content_format_string(llm):
    return _prompt(llm, QUESTION, chat_template_content_format="string")


def as_the_tokenizer_renders(llm):
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    return text == _prompt(llm, QUESTION)


def rendered_then_generated(llm):
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    one, other = llm.generate([text], GREEDY), llm.chat([QUESTION], GREEDY)
    return one[0].outputs[0].text == other[0].outputs[0].text


def messages_are_not_changed(llm):
    messages = _call('{"city": "Paris"}')
    _prompt(llm, messages, chat_template=TEMPLATE)
    return messages[1]["tool_calls"][0]["function"]["arguments"]


def conversations_as_tuple(llm):
    return len(llm.chat((QUESTION, QUESTION), GREEDY))


def image_refused(llm):
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    return _prompt(llm, [{"role": "user", "content": parts}])


def part_of_unknown_type(llm):
    return _prompt(llm, [{"role": "user", "content": [{"type": "song", "song": "la"}]}])


def content_format_openai(llm):
    template = "{{ messages[0].content[0].text }}!"
    options = {"chat_template": template, "chat_template_content_format": "openai"}
    return _prompt(llm, QUESTION, **options)


def template_that_loops_over_parts(llm):
    parts = "{% for part in message['content'] %}<{{ part['text'] }}>{% endfor %}"
    template = "{% for message in messages %}" + parts + "{% endfor %}"
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]
    return _prompt(llm, [{"role": "user", "content": parts}], chat_template=template)


def message_with_a_name(llm):
    template = "{{ messages[0].name }}: {{ messages[0].content }}"
    messages = [{"role": "user", "name": "Ann", "content": "Hello"}]
    return _prompt(llm, messages, chat_template=template)


def role_of_a_developer(llm):
    return _prompt(llm, [{"role": "developer", "content": "Be brief."}, *QUESTION])


def content_with_surrounding_spaces(llm):
    return _prompt(llm, [{"role": "user", "content": "  Hello \n"}])


def default_params(llm):
    messages = [{"role": "user", "content": "word " * 215}]
    return 1 <= len(llm.chat(messages)[0].outputs[0].token_ids) <= 10


def conversation_too_long(llm):
    return len(llm.chat([{"role": "user", "content": "word " * 400}], GREEDY))


def turn_by_turn(llm):
    messages = [{"role": "user", "content": "Name a colour."}]
    for _ in range(2):
        text = llm.chat(messages, GREEDY, use_tqdm=False)[0].outputs[0].text
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "Another."},
        ]
    return [m["content"] for m in messages if m["role"] == "assistant"]


def system_prompt_for_each(llm):
    questions = ["What is 2+2?", "What is the capital of Italy?"]
    system = {"role": "system", "content": "Answer with one word."}
    chats = [[system, {"role": "user", "content": q}] for q in questions]
    return [o.outputs[0].text for o in llm.chat(chats, SamplingParams(temperature=0, max_tokens=4))]


def with_structured_outputs(llm):
    from vllm.sampling_params import StructuredOutputsParams

    constraint = StructuredOutputsParams(choice=["Paris", "London"])
    params = SamplingParams(temperature=0, max_tokens=4, structured_outputs=constraint)
    return llm.chat(QUESTION, params)[0].outputs[0].text
