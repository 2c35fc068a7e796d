"""Structured outputs."""

import json
import re
from enum import StrEnum

from pydantic import BaseModel
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def _text(llm, question, max_tokens=40, **constraint):
    params = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        structured_outputs=StructuredOutputsParams(**constraint),
    )
    messages = [{"role": "user", "content": question}]
    return llm.chat(messages, params, use_tqdm=False)[0].outputs[0]


def choice(llm):
    return _text(
        llm, "Is vLLM wonderful? Positive or negative?", choice=["Positive", "Negative"]
    ).text


def choice_ends_with_stop(llm):
    out = _text(llm, "Answer yes or no: is water wet?", choice=["yes", "no"])
    return [out.text in ("yes", "no"), out.finish_reason]


def choice_with_a_common_beginning(llm):
    out = _text(llm, "Pick one.", choice=["red apple", "red", "red apples"])
    return out.text in ("red apple", "red", "red apples")


def choice_empty(llm):
    return _text(llm, "Pick one.", choice=[]).text


def regex(llm):
    out = _text(llm, "Write an e-mail address.", regex=r"[a-z]{3,8}@[a-z]{3,8}\.com")
    return bool(re.fullmatch(r"[a-z]{3,8}@[a-z]{3,8}\.com", out.text))


def regex_of_digits(llm):
    out = _text(llm, "What is 12 + 30?", regex=r"\d{2}")
    return [out.text, out.finish_reason]


def regex_date(llm):
    out = _text(llm, "When did the second world war end?", regex=r"\d{4}-\d{2}-\d{2}")
    return bool(re.fullmatch(r"\d{4}-\d{2}-\d{2}", out.text))


def json_schema(llm):
    row = json.loads(_text(llm, "Describe Ann, aged 30, in JSON.", json=PERSON).text)
    return [sorted(row), type(row["name"]).__name__, type(row["age"]).__name__]


def json_schema_as_text(llm):
    row = json.loads(_text(llm, "Describe Ann, aged 30, in JSON.", json=json.dumps(PERSON)).text)
    return sorted(row)


class Colour(StrEnum):
    red = "red"
    blue = "blue"


class Car(BaseModel):
    brand: str
    colour: Colour


def json_of_a_pydantic_class(llm):
    question = "Describe a red car in JSON with its brand and colour."
    text = _text(llm, question, max_tokens=60, json=Car.model_json_schema()).text
    return [sorted(json.loads(text)), Car.model_validate_json(text).colour.value in ("red", "blue")]


def json_of_an_enum(llm):
    schema = {"enum": ["cat", "dog", "bird"]}
    return json.loads(_text(llm, "Which animal barks?", json=schema).text) in ("cat", "dog", "bird")


def json_of_an_array(llm):
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}
    row = json.loads(_text(llm, "Two numbers in a JSON list.", json=schema).text)
    return [isinstance(row, list), 2 <= len(row) <= 3, all(isinstance(x, int) for x in row)]


def json_of_a_number_alone(llm):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
    }
    schema["required"] = ["n"]
    row = json.loads(_text(llm, "A digit in JSON.", json=schema).text)
    return [list(row), 1 <= row["n"] <= 9]


def json_that_is_none(llm):
    return _text(llm, "Hello", json="{not json").text


def json_cut_off(llm):
    out = _text(llm, "Describe Ann in JSON.", max_tokens=3, json=PERSON)
    return [out.finish_reason, len(out.token_ids)]


def grammar(llm):
    rules = """
        root ::= "SELECT " column " FROM " table
        column ::= "name" | "age"
        table ::= "users" | "cars"
    """
    out = _text(llm, "Write SQL that shows the name column of users.", grammar=rules)
    return bool(re.fullmatch("SELECT (name|age) FROM (users|cars)", out.text))


def grammar_without_sense(llm):
    return _text(llm, "Hello", grammar="root ::= ((").text


def regex_without_sense(llm):
    return _text(llm, "Hello", regex="(((").text


def json_object(llm):
    out = _text(llm, "Describe Ann in JSON.", max_tokens=8, json_object=True)
    return out.text.lstrip()[0]


def beside_free_prompts(llm):
    constraint = StructuredOutputsParams(choice=["yes", "no"])
    params = [
        SamplingParams(temperature=0, max_tokens=4, structured_outputs=constraint),
        SamplingParams(temperature=0, max_tokens=4),
    ]
    out = llm.generate(["Is water wet? Answer:", "The capital of France is"], params)
    return [out[0].outputs[0].text in ("yes", "no"), out[1].outputs[0].text]


def params_kept_between_calls(llm):
    constraint = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(temperature=0, max_tokens=4, structured_outputs=constraint)
    texts = [llm.generate("Is water wet?", params)[0].outputs[0].text for _ in range(2)]
    return texts[0] == texts[1]


def choice_as_text(llm):
    return _text(llm, "Is the sky green? Answer yes or no.", choice=["yes", "no"]).text


def regex_exact_text(llm):
    return _text(llm, "Write the number seven.", regex="(one|seven|ten)").text


def json_with_references(llm):
    schema = {
        "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "integer"}}}},
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Point"}},
        "required": ["at"],
    }
    row = json.loads(_text(llm, "A point in JSON.", json=schema, max_tokens=60).text)
    return [list(row), isinstance(row["at"], dict)]


def json_with_a_const(llm):
    schema = {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]}
    return json.loads(_text(llm, "Some JSON.", json=schema).text)


def json_of_booleans(llm):
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    return [type(x).__name__ for x in json.loads(_text(llm, "Two truths.", json=schema).text)]


def json_of_a_pattern(llm):
    schema = {"type": "string", "pattern": "^[A-Z]{3}$"}
    return bool(re.fullmatch("[A-Z]{3}", json.loads(_text(llm, "A code.", json=schema).text)))


def with_logprobs(llm):
    constraint = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, structured_outputs=constraint)
    out = llm.generate("Is water wet? Answer:", params)[0].outputs[0]
    return [out.text, len(out.logprobs) == len(out.token_ids)]


def two_completions(llm):
    constraint = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(n=2, seed=1, max_tokens=4, structured_outputs=constraint)
    out = llm.generate("Is water wet? Answer:", params)[0]
    return all(o.text in ("yes", "no") for o in out.outputs)
