"""How the tokens of one request are drawn, and when it stops."""

from dataclasses import dataclass

MAX_TEMPERATURE = 1e30  # well within fp32


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request; immutable, so one object can serve many.

    Attributes:
        temperature: divides the logits before sampling; 0 takes the most likely token.
        max_tokens: most tokens to generate; None for as many as the model's length allows.
        ignore_eos: go on after an end-of-sequence token.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a temperature that is negative, NaN or infinite; max_tokens below 1.
    """

    temperature: float = 1.0
    max_tokens: int | None = 16
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, (int, float)):
            raise TypeError(f"temperature must be a number, got {self.temperature!r}")
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"temperature must be a finite number of at least 0 (0 is greedy), "
                f"got {self.temperature!r:.40}"
            )
        if self.max_tokens is not None:
            if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int):
                raise TypeError(f"max_tokens must be an int or None, got {self.max_tokens!r}")
            if self.max_tokens < 1:
                raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
