"""Hostile requests, lines and files, made when they are needed: tables of what to send, and what
must become of it. Nothing here may end a job, or change what another request gets."""

from tests.data.hostile import grammars, lines, prompts, sampling
from tests.data.hostile.case import EITHER, ERROR, RESULT, Case
from tests.data.hostile.prompts import TRUSTED

CASES = [*lines.CASES, *sampling.CASES, *prompts.CASES, *grammars.CASES]
__all__ = ["CASES", "EITHER", "ERROR", "RESULT", "TRUSTED", "Case"]
