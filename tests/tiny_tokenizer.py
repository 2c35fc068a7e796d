"""A tokenizer of the tiny models' vocabulary: every text has tokens, and most tokens are text."""

from pathlib import Path
from string import ascii_lowercase

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import VOCAB_SIZE

BOS, EOS = 1, 2
# A token for each byte, in GPT-2's printable form, and for pairs of letters.
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
PAIRS = [(a, b) for a in ascii_lowercase for b in ascii_lowercase][: VOCAB_SIZE - 3 - len(BYTES)]
WORDS = ["<unk>", "<s>", "</s>", *BYTES, *(a + b for a, b in PAIRS)]
# What is drawn from these alone is readable text.
LETTERS = [i for i, word in enumerate(WORDS) if set(word) <= set(ascii_lowercase)]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{tools:{% for t in tools %} {{ t['function']['name'] }}"
    "{% endfor %}}{% endif %}{% for m in messages %}{% if m['role'] == 'nobody' %}"
    "{{ raise_exception('no such role') }}{% endif %}[{{ m['role'] }}]{{ m['content'] }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{{ '(thinking)' if enable_thinking is defined and enable_thinking }}{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """Adds a BOS before each text."""
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, PAIRS))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
