"""Text to train on: where it comes from, how it becomes tokens, and which batch belongs to which step.

``load`` reads a text file, a folder or JSONL and gives a ``Corpus`` of tokens, cut by document into a part to
train on and a held-out part. Tokens are bytes (vocabulary 256), so any text trains any model and no tokenizer
is needed, or those of a Hugging Face ``tokenizer.json``. ``Batches`` says what each step trains on and
``validation_batches`` what it is validated with.
"""

from __future__ import annotations

from octavo.trainer.data.corpus import Corpus, load
from octavo.trainer.data.documents import standard_library
from octavo.trainer.data.packing import Batches, validation_batches
from octavo.trainer.data.tokens import VOCAB_SIZE, Bytes, TokenizerFile, read_tokenizer, tokenizer_files

__all__ = [
    "VOCAB_SIZE",
    "Batches",
    "Bytes",
    "Corpus",
    "TokenizerFile",
    "load",
    "read_tokenizer",
    "standard_library",
    "tokenizer_files",
    "validation_batches",
]
