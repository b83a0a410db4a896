# SPDX-License-Identifier: Apache-2.0
"""What core's conformance suite is told of this backend."""

from bigram_backend.worker import BigramTeacher

from nemo_rl_core.data.tokenizers import build_tokenizer
from nemo_rl_core.protocols.settings import GenerationSettings, ModelSettings, TokenizerSettings
from nemo_rl_core.testing.conformance import Subject, installed_worker


def subject():
    """The backend as its entry point names it."""
    settings = GenerationSettings(
        model=ModelSettings(max_total_sequence_length=64), tokenizer=TokenizerSettings(characters="0123456789?abcdef")
    )
    vocab = len(build_tokenizer(settings.tokenizer))
    return Subject(
        settings=settings,
        make_worker=installed_worker("bigram", settings),
        teachers=(BigramTeacher(vocab, seed=1), BigramTeacher(vocab, seed=2)),
        limit_s=60.0,
    )
