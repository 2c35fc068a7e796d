"""``nanovllm.LLM``: the public class, with vLLM's arguments and attributes."""

import os
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm.auto import tqdm

from nanovllm.checkpoints.checkpoint import (
    GENERATION_FIELDS,
    at_revision,
    open_checkpoint,
    sampling_fields,
)
from nanovllm.compat.engine import EngineConfig, LLMEngine
from nanovllm.config import Config
from nanovllm.engine.llm_engine import STREAM_OPEN
from nanovllm.engine.request import PreparedRequest, make_outputs
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.text.prompts import Message, Prompt, TokensPrompt, as_prompt_list
from nanovllm.utils.panics import as_value_error
from nanovllm.utils.progress import bar_maker, closing_bar
from nanovllm.utils.validation import boolean, check_names, choice, optional
from nanovllm.vllm_arguments import CACHE_DTYPES, DECLARED_METHODS, load_table, translate

if TYPE_CHECKING:
    import torch

    from nanovllm.rl.llm import LLM as BaseLLM
else:
    try:
        from nanovllm.rl.llm import LLM as BaseLLM
    except ModuleNotFoundError as error:  # this package works without nanovllm/rl
        if error.name not in ("nanovllm.rl", "nanovllm.rl.llm"):
            raise
        from nanovllm.llm import LLM as BaseLLM

ENGINE_ARGUMENTS = {field.name for field in fields(Config)} - {"model"}
# Arguments that belong elsewhere.
SAMPLING_HINTS = {field.name: "set it in SamplingParams" for field in fields(SamplingParams)}
# vLLM's methods that are not here, with what to do instead.
MISSING = {
    "apply_model": "Use load_weights to change the weights",
    "beam_search": "Use n completions of one prompt",
    "get_metrics": "Use metrics",
    "set_tokenizer": "Use LLM(tokenizer=...)",
    "start_profile": "Use bench.py --profile",
    "stop_profile": "Use bench.py --profile",
}


class LLM(BaseLLM):
    """Loads a model and generates completions for lists of prompts.

    Examples:
        >>> with LLM("path/to/model") as llm:
        ...     outputs = llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=32))
        ...     print(outputs[0].outputs[0].text)  # or outputs[0]["text"]

    ``close()``, leaving the ``with`` block or deleting the object frees its memory. A process can
    have several ``LLM`` objects at the same time.

    Args:
        model: a local checkpoint directory, a ``.gguf`` file, or a hub id.
        chat_template: the default chat template of ``chat``: a Jinja template, or the path of a
            file with one.
        generation_config: "auto" takes default sampling parameters from the checkpoint's
            generation_config.json, "vllm" uses vLLM's defaults.
        override_generation_config: values that override fields of generation_config.json: those
            that are sampling parameters.
        hf_token: the token for downloads from the hub, by default that of ``HF_TOKEN`` or of
            ``hf auth login``.
        revision: the branch, tag or commit of a model on the hub.
        tokenizer_revision: that of its tokenizer, by default ``revision``.
        vllm_arguments: vLLM's other arguments. Those that are supported here under another name
            are translated, hints that do not affect results are ignored, and unsupported arguments
            are accepted only at values that have no effect.

    The other arguments are the fields of ``nanovllm.config.Config``, which describes them. None
    stands for an argument's default.

    Raises:
        TypeError: an argument is unknown or has the wrong type.
        ValueError: a setting or the checkpoint is invalid or not supported.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        max_num_batched_tokens: int = 16384,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.9,
        tensor_parallel_size: int = 1,
        enforce_eager: bool = False,
        kvcache_block_size: int | None = None,
        kv_cache_dtype: str = "auto",
        num_kvcache_blocks: int = -1,
        device: str = "auto",
        dtype: "str | torch.dtype" = "auto",
        attention_backend: str = "auto",
        enable_prefix_caching: bool = True,
        enable_reordering: bool = True,
        enable_sleep_mode: bool = False,
        batch_invariant: bool = False,
        quantization: str | None = None,
        load_format: str = "auto",
        seed: int = 0,
        tokenizer: str | os.PathLike[str] | None = None,
        skip_tokenizer_init: bool = False,
        max_logprobs: int = 20,
        logprobs_mode: str = "raw_logprobs",
        chat_template: str | os.PathLike[str] | None = None,
        generation_config: str | None = None,
        override_generation_config: dict[str, Any] | None = None,
        hf_token: str | bool | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **vllm_arguments: Any,
    ) -> None:
        if max_model_len in (-1, "auto"):
            max_model_len = None  # the largest that the model and the KV cache allow
        defaults = LLM.__init__.__kwdefaults__ or {}
        given = {  # without defaults, so that an argument can be given by its vLLM name instead
            name: value
            for name, value in locals().items()
            if name in ENGINE_ARGUMENTS and value is not defaults[name]
        }
        names = vllm_arguments.keys() & SAMPLING_HINTS
        check_names(names, [*load_table()["LLM"]], SAMPLING_HINTS)
        optional(choice("auto", "vllm"))("generation_config", generation_config)
        _check_launcher(vllm_arguments.get("distributed_executor_backend"), tensor_parallel_size)
        if quantization in DECLARED_METHODS:
            del given["quantization"]
        elif isinstance(quantization, str) and quantization != "fp8":
            raise ValueError(
                f"quantization={quantization!r} is not supported: use an unquantised or FP8 "
                f"checkpoint, or quantization='fp8'"
            )
        if kv_cache_dtype in CACHE_DTYPES:
            del given["kv_cache_dtype"]
        self._caller_ids: dict[str, str] = {}  # internal request id -> the caller's request id
        overrides = _sampling_overrides(override_generation_config)
        self.default_chat_template = _read_template(chat_template)
        with _hub_token(hf_token):
            tokenizer_revision = tokenizer_revision or revision
            has_own = tokenizer is not None or tokenizer_revision != revision
            if tokenizer_revision is not None and has_own:
                path = os.fspath(model if tokenizer is None else tokenizer)
                given["tokenizer"] = at_revision(path, tokenizer_revision, only_tokenizer=True)
            if revision is not None:
                model = at_revision(os.fspath(model), revision)
            if quantization in DECLARED_METHODS:
                _check_method(os.fspath(model), quantization)
            super().__init__(model, **translate("LLM", {**given, **vllm_arguments}))
        # For ``reload_weights``, when the working directory may be another.
        path = os.path.expanduser(self.config.model)
        self.model_path = os.path.abspath(path) if os.path.exists(path) else path
        dtype = str(self.model_runner.dtype).removeprefix("torch.")
        if kv_cache_dtype in CACHE_DTYPES and kv_cache_dtype != dtype:
            self.close()
            raise ValueError(
                f"kv_cache_dtype={kv_cache_dtype!r} is not supported for a model that runs in "
                f"{dtype}: keys and values have the model's dtype, or fp8"
            )
        if generation_config == "vllm":
            self.recommended_sampling = {}
        self.recommended_sampling |= overrides

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> "LLM":
        """Creates an LLM with the arguments in an ``EngineArgs``."""
        return cls(**vars(engine_args))

    @property
    def llm_engine(self) -> LLMEngine:
        """This engine as an object with the methods of vLLM's ``LLMEngine``."""
        self.turns.check_open()
        return LLMEngine(self)

    @llm_engine.deleter
    def llm_engine(self) -> None:
        """Closes the engine, which is what programs for vLLM delete it for."""
        self.close()

    @property
    def model_config(self) -> EngineConfig:
        """The settings, with vLLM's attribute names."""
        return self.llm_engine.model_config

    @property
    def num_unfinished_requests(self) -> int:
        return len(self.requests)

    def get_tokenizer(self) -> Any:
        """Returns the transformers tokenizer, or None if the engine has none."""
        return self.tokenizer

    def get_world_size(self, include_dp: bool = True) -> int:
        """Returns the number of ranks."""
        return self.config.tensor_parallel_size

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method on all ranks, as ``LLMEngine.collective_rpc`` does."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def _refuse_pooling(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ValueError, because pooling models are not supported."""
        raise ValueError("embed, encode, classify, score and reward are not supported: use vLLM")

    embed = encode = classify = score = reward = _refuse_pooling

    if not TYPE_CHECKING:  # else type checkers would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            if name in MISSING:
                raise AttributeError(f"vLLM's method {name!r} is not supported. {MISSING[name]}")
            return object.__getattribute__(self, name)  # raises; in a property, its own error

    def generate(
        self,
        prompts: Prompt | Seq[Prompt] = None,  # type: ignore[assignment]  # refused with advice
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        *,
        on_error: str = "raise",
        **kwargs: Any,
    ) -> list[RequestOutput]:
        prompts = self._read_prompts(prompts, kwargs)
        return super().generate(prompts, sampling_params, use_tqdm, on_error=on_error)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        lora_request: Any = None,
        priority: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        *,
        on_error: str = "raise",
        **unknown: Any,
    ) -> list[RequestOutput]:
        options = {
            "lora_request": lora_request,
            "priority": priority,
            "chat_template": chat_template,
            "chat_template_content_format": chat_template_content_format,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
            "tokenization_kwargs": tokenization_kwargs,
            "mm_processor_kwargs": mm_processor_kwargs,
        }
        options = self._read_chat_options(messages, options | unknown)
        return super().chat(messages, sampling_params, use_tqdm, on_error=on_error, **options)

    def enqueue(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        **kwargs: Any,
    ) -> list[str]:
        """Queues prompts, and returns their request ids. ``wait_for_completion`` runs them. The
        arguments are those of ``generate``.

        Raises:
            TypeError, ValueError: an invalid argument. No prompt was queued.
        """
        prompts = as_prompt_list(self._read_prompts(prompts, kwargs))
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        with self.turns.until_closed():
            make_bar = bar_maker(use_tqdm)
            ready = self.preparer.prepare_all(prompts, sampling_params, "prompts", make_bar)
        return [self.add_request(each, may_reorder=True) for each in ready]

    def enqueue_chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        **kwargs: Any,
    ) -> list[str]:
        """Queues conversations, as ``enqueue`` queues prompts. The arguments are those of
        ``chat``."""
        options = self._read_chat_options(messages, kwargs)
        return self.enqueue(self.render_chat(messages, **options), sampling_params, use_tqdm)

    def wait_for_completion(
        self, output_type: Any = None, *, use_tqdm: bool | Callable[..., tqdm] = True
    ) -> list[RequestOutput]:
        """Runs all queued requests. Returns their outputs, in the order in which they were queued.

        Args:
            output_type: ignored.
            use_tqdm: as in ``generate``.
        """
        outputs: list[RequestOutput] = []
        progress = bar_maker(use_tqdm)(total=len(self.requests), desc="Generating")
        with closing_bar(progress):
            while not self.is_finished():
                finished = self.step()
                outputs += finished
                progress.update(len(finished))
        return sorted(outputs, key=lambda output: int(output.request_id))

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empties the prefix cache. Raises ValueError with ``reset_running_requests``."""
        if reset_running_requests:
            raise ValueError("reset_running_requests is not supported: abort the requests first")
        return super().reset_prefix_cache()

    def render_chat(
        self, messages: Seq[Message] | Seq[Seq[Message]], **template_options: Any
    ) -> list[TokensPrompt]:
        template = template_options.pop("chat_template", None) or self.default_chat_template
        return super().render_chat(messages, chat_template=template, **template_options)

    def _read_prompts(self, prompts: Any, arguments: dict[str, Any]) -> Any:
        """Checks the other arguments of ``generate``, and returns the prompts that they ask for:
        token ids without special tokens, or the given prompts."""
        if prompts is None and arguments.get("prompt_token_ids") is not None:
            raise TypeError("prompts must be given; token ids, too: pass them as prompts")
        adds_special_tokens = True
        if (arguments.get("tokenization_kwargs") or {}).keys() == {"add_special_tokens"}:
            given = arguments.pop("tokenization_kwargs")["add_special_tokens"]
            adds_special_tokens = boolean("add_special_tokens", given)
        translated = translate("generate", arguments)
        check_names(translated, [*load_table()["generate"], "on_error"], SAMPLING_HINTS)
        if (priority := arguments.get("priority")) is not None:
            prompts = as_prompt_list(prompts)
            _check_priority(priority, len(prompts))
        if adds_special_tokens:
            return prompts
        return self.preparer.encoder.encode_texts(as_prompt_list(prompts))

    def _read_chat_options(self, messages: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        """Checks the other arguments of ``chat``, and returns those of ``render_chat``."""
        options = translate("chat", arguments)
        check_names(options, [*load_table()["chat"], "on_error"], SAMPLING_HINTS)
        if (priority := arguments.get("priority")) is not None:
            from nanovllm.text.chat_renderer import as_conversations

            _check_priority(priority, len(as_conversations(messages)))
        options["chat_template"] = options.get("chat_template") or self.default_chat_template
        return options

    def _add_with_id(self, caller_id: str, prompt: Prompt, params: SamplingParams | None) -> None:
        """Adds a request under the caller's request id. ``_step_with_ids`` returns its outputs."""
        prepared = self.prepare(prompt, params)
        with self.acquire(STREAM_OPEN, alone=False):
            request = self.add_prepared(prepared, streams=_streams(prepared))
            request.is_stream = False  # its outputs come from ``_step_with_ids``
            self._caller_ids[request.request_id] = caller_id

    def _step_with_ids(self) -> list[RequestOutput]:
        """Runs one step. Returns the outputs of requests that finished, and of streaming requests
        that have a new token."""
        with self.acquire(STREAM_OPEN, alone=False):
            if self.is_finished():
                self._caller_ids.clear()
                return []
            with self.reset_on_error():
                sampled, finished = self.run_step()
                requests = {seq.request_id: self.requests.get(seq.request_id) for seq in sampled}
                updated = [each for each in requests.values() if each and _streams(each.prepared)]
                outputs = make_outputs([*finished, *updated], self.preparer.encoder)
            for output in outputs:
                caller_ids = self._caller_ids
                take = caller_ids.pop if output.finished else caller_ids.get
                output.request_id = take(output.request_id, output.request_id)
            return outputs

    def _abort_with_ids(self, caller_ids: set[str]) -> None:
        for request_id, caller_id in [*self._caller_ids.items()]:
            if caller_id in caller_ids:
                del self._caller_ids[request_id]
                with suppress(ValueError):  # an error has already ended the request
                    self.abort_request(request_id)


def _check_method(model: str, method: str) -> None:
    """Raises ValueError if a checkpoint is not quantised by ``method``."""
    found = open_checkpoint(model).quant_method
    if found != method:
        raise ValueError(
            f"quantization={method!r} is not the checkpoint's, which is {found!r}: leave it out, "
            f"because the format of a checkpoint is recognised, or use 'fp8' to quantise weights "
            f"as they are loaded"
        )


@contextmanager
def _hub_token(token: str | bool | None) -> Iterator[None]:
    """Makes the hub's library use a token in a ``with`` block, if it is a string."""
    if not isinstance(token, str):
        yield
        return
    before = os.environ.get("HF_TOKEN")
    os.environ["HF_TOKEN"] = token
    try:
        yield
    finally:
        del os.environ["HF_TOKEN"]
        if before is not None:
            os.environ["HF_TOKEN"] = before


def _sampling_overrides(generation: Any) -> dict[str, Any]:
    """Returns the sampling parameters in an ``override_generation_config``, under our names."""
    if generation is None:
        return {}
    if not isinstance(generation, dict):
        raise TypeError(f"override_generation_config must be a dict, got {generation!r:.80}")
    hints = {"do_sample": "temperature=0 is greedy", "eos_token_id": "use stop_token_ids"}
    overrides = sampling_fields(generation)
    with as_value_error("override_generation_config:"):
        check_names(generation, [*GENERATION_FIELDS], hints)
        SamplingParams(**overrides)
    return overrides


def _check_priority(priority: Any, num_prompts: int) -> None:
    """Raises ValueError if ``priority`` is not a list with an integer for each prompt."""
    is_list = isinstance(priority, list) and all(isinstance(value, int) for value in priority)
    if not is_list or len(priority) != num_prompts:
        raise ValueError(
            f"priority must be a list of {num_prompts} integers, one for each prompt, got "
            f"{priority!r:.80}"
        )


def _check_launcher(executor_backend: Any, num_ranks: int | None) -> None:
    """Raises ValueError if processes that torchrun or the like has started should be ranks."""
    if executor_backend == "external_launcher" and num_ranks not in (None, 1):
        raise ValueError(
            f"distributed_executor_backend='external_launcher' with tensor_parallel_size="
            f"{num_ranks} is not supported, because an engine starts its other ranks itself. Use "
            f"tensor_parallel_size=1, for an engine in each process, or create the LLM in a single "
            f"process without external_launcher"
        )


def _streams(prepared: PreparedRequest) -> bool:
    """Whether the request's outputs are returned while it runs."""
    return prepared.sampling.params.output_kind is not RequestOutputKind.FINAL_ONLY


def _read_template(template: str | os.PathLike[str] | None) -> str | None:
    """Returns a chat template, which is given as text or as the path of a file."""
    if template is None or (isinstance(template, str) and set(template) & set("{}\n")):
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"chat_template is neither a template nor a file: {error}") from error
