"""Streams the outputs of requests while they run."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from nanovllm.engine.llm_engine import NOT_ALONE, LLMEngine
from nanovllm.engine.request import make_outputs
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt, as_prompt_list


def stream_outputs(
    engine: LLMEngine,
    prompts: Prompt | Seq[Prompt],
    sampling_params: SamplingParams | Seq[SamplingParams] | None,
) -> Iterator[RequestOutput]:
    """Runs requests, and yields the output of each that has new tokens. Other calls can run
    between two steps. See ``LLMEngine.generate_stream``."""
    turns = engine.turns
    with turns.until_closed():
        if sampling_params is None:
            sampling_params = engine.get_default_sampling_params()
        ready = engine.preparer.prepare_all(as_prompt_list(prompts), sampling_params, "prompts")
    with engine.acquire(NOT_ALONE.format("generate_stream")), engine.reset_on_error():
        requests = [engine.add_prepared(item, streams=True) for item in ready]
    own = {request.request_id: request for request in requests}
    try:
        while not own.keys().isdisjoint(engine.requests):
            with turns.turn(), engine.reset_on_error():
                sampled, _ = engine.run_step()
                advanced = dict.fromkeys(seq.request_id for seq in sampled)
                updated = [own[request_id] for request_id in advanced if request_id in own]
                outputs = make_outputs(updated, engine.preparer.encoder)
            yield from outputs
        if not all(request.is_finished for request in requests):
            turns.check_still_open()
    finally:
        with turns.turn(), engine.reset_on_error():
            for request_id in own.keys() & engine.requests.keys():
                engine.abort_request(request_id)
