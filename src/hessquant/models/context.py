"""How many positions a model has, by its config."""

from collections.abc import Iterable
from typing import NamedTuple

from transformers import PreTrainedConfig

from hessquant.config import LONGEST_DEFAULT_WINDOW

# transformers' own name first: where a class has another, it gives that under this one too. The rest are those of
# classes that do not, and of code that comes with a model.
_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "max_seq_length",
    "max_seq_len",
    "seq_length",
    "context_length",
    "model_max_length",
)
_OF_ENCODERS = ("max_encoder_position_embeddings", "max_source_positions", "max_text_positions")
_OF_DECODERS = ("max_decoder_position_embeddings", "max_target_positions", "max_text_positions")

# Their position ids begin behind that of padding, in a table of `max_position_embeddings` rows: 514 rows hold 512
# tokens. (OPT, BART and their kind begin at 2 as well, but add 2 rows to the table.)
_BEHIND_PADDING = frozenset(
    {
        "altclip_text_model",
        "bridgetower_text_model",
        "camembert",
        "clap_text_model",
        "data2vec-text",
        "esm",
        "ibert",
        "layoutlmv3",
        "lilt",
        "longformer",
        "luke",
        "markuplm",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
_PADDING = 1  # where a config does not say, and MPNet's whatever it says


class Context(NamedTuple):
    """Positions that a model has; None = no limit, or none that its config says.

    Attributes:
        read: For what it reads.
        written: For what an encoder-decoder writes; as `read` for every other model.
    """

    read: int | None
    written: int | None

    @property
    def least(self) -> int | None:
        """The smaller of both."""
        return min((limit for limit in self if limit is not None), default=None)


def context_of(described: PreTrainedConfig) -> Context:
    """Positions of the part of a model that sees text."""
    if not described.is_encoder_decoder:
        limit = _limit(described.get_text_config(), _NAMES)
        return Context(limit, limit)
    reads, writes = described.get_text_config(encoder=True), described.get_text_config(decoder=True)
    return Context(_limit(reads, (*_OF_ENCODERS, *_NAMES)), _limit(writes, (*_OF_DECODERS, *_NAMES)))


def window_length(asked: int | None, *limits: int | None) -> int:
    """Tokens per window: as asked for, or as many as every model's limit and the default allow.

    >>> window_length(None, 512, None), window_length(None, None), window_length(64, 512)
    (512, 2048, 64)
    """
    known = [limit for limit in limits if limit is not None]
    return asked if asked is not None else min((LONGEST_DEFAULT_WINDOW, *known))


def _limit(config: PreTrainedConfig, names: Iterable[str]) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        # 0 and -1 are how some say that there is no limit.
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value - _unused(config)
    return None


def _unused(config: PreTrainedConfig) -> int:
    """Rows of the position table that no token takes."""
    kind = config.model_type
    if kind not in _BEHIND_PADDING or getattr(config, "position_embedding_type", "absolute") == "rotary":
        return 0
    padding = getattr(config, "pad_token_id", None)
    return 1 + (_PADDING if padding is None or kind == "mpnet" else int(padding))
