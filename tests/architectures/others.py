"""Encoders, encoder-decoders, speech and vision-language models, and inputs made up for them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tests.architectures.shrink import VOCABULARY
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto

Inputs = Callable[[PreTrainedConfig], dict[str, Tensor]]

LENGTH = 16


@dataclass(frozen=True)
class Other:
    """A model class that is built of a tiny config.

    Attributes:
        model_type: Of its config.
        class_name: In transformers.
        inputs: What its forward pass takes, as text wherever it takes text alone.
        image_inputs: The same with an image; None where there is none to give.
    """

    model_type: str
    class_name: str
    inputs: Inputs
    image_inputs: Inputs | None = None


def text_ids(seed: int = 0, length: int = LENGTH) -> Tensor:
    """Random ids [1, length] that are no special tokens of a tiny config."""
    return torch.randint(16, VOCABULARY - 32, (1, length), generator=torch.Generator().manual_seed(seed))


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _text(_config: PreTrainedConfig) -> dict[str, Tensor]:
    return {"input_ids": text_ids()}


def _text_to_text(_config: PreTrainedConfig) -> dict[str, Tensor]:
    return {"input_ids": text_ids(), "decoder_input_ids": text_ids(1)}


def _mel_to_text(config: PreTrainedConfig) -> dict[str, Tensor]:
    frames = 2 * config.max_source_positions  # halved by a convolution
    return {"input_features": _noise(1, config.num_mel_bins, frames), "decoder_input_ids": text_ids(1)}


def _frames_to_text(config: PreTrainedConfig) -> dict[str, Tensor]:
    frames = _noise(1, 64, config.input_feat_per_channel)
    return {"input_features": frames, "decoder_input_ids": text_ids(1)}


def _wave_to_text(_config: PreTrainedConfig) -> dict[str, Tensor]:
    return {"input_values": _noise(1, 8192), "decoder_input_ids": text_ids(1)}


def _with_image_tokens(config: PreTrainedConfig, count: int) -> Tensor:
    ids = text_ids(length=LENGTH + count)
    ids[:, 4 : 4 + count] = config.image_token_id
    return ids


def _patches(config: PreTrainedConfig) -> int:
    vision = config.vision_config
    return (vision.image_size // vision.patch_size) ** 2


def _image(config: PreTrainedConfig, *lead: int, tokens: int | None = None) -> dict[str, Tensor]:
    size = config.vision_config.image_size
    count = _patches(config) if tokens is None else tokens
    return {"input_ids": _with_image_tokens(config, count), "pixel_values": _noise(*(lead or (1,)), 3, size, size)}


def _pooled_image(config: PreTrainedConfig) -> dict[str, Tensor]:
    inputs = _image(config, tokens=config.mm_tokens_per_image)
    return {**inputs, "token_type_ids": (inputs["input_ids"] == config.image_token_id).long()}


def _tiled_image(config: PreTrainedConfig) -> dict[str, Tensor]:
    return _image(config, 1, 1, tokens=_patches(config) // config.scale_factor**2)


def _grid_image(config: PreTrainedConfig) -> dict[str, Tensor]:
    """Of 4 x 4 patches, of which each square of four becomes one token."""
    vision = config.vision_config
    ids = _with_image_tokens(config, 4)
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == config.image_token_id).int(),
        "pixel_values": _noise(16, 3 * vision.temporal_patch_size * vision.patch_size**2),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def _cross_attended_image(config: PreTrainedConfig) -> dict[str, Tensor]:
    size = config.vision_config.image_size
    return {
        "input_ids": text_ids(),
        "pixel_values": _noise(1, 1, config.vision_config.max_num_tiles, 3, size, size),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, config.vision_config.max_num_tiles, dtype=torch.long),
    }


_NO_ENCODERS = {
    "bart",
    "esm",  # no vocabulary of its own
    "esmc",  # amino acids: 33 ids
    "mbart",
    "mvp",
    "perceiver",  # bytes, and sizes of its own
    "reformer",  # a decoder here
}
_BASE_MODELS = ("albert", "bert", "deberta-v2", "distilbert", "modernbert", "mpnet", "nomic_bert", "roberta")
_TEXT_TO_TEXT = (
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "fsmt", "led", "longt5", "m2m_100", "marian"),
    *("mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet", "switch_transformers"),
    *("t5", "t5gemma", "t5gemma2", "umt5"),
)
_SPEECH_TO_TEXT: dict[str, Inputs] = {
    "moonshine": _wave_to_text,
    "speech_to_text": _frames_to_text,
    "whisper": _mel_to_text,
}
_TEXT_WITH_IMAGE: dict[str, Inputs | None] = {
    "aria": None,
    "aya_vision": None,
    "cohere2_vision": None,
    "deepseek_vl": None,
    "gemma3": _pooled_image,
    "gemma4": None,
    "glm4v": _grid_image,
    "idefics2": None,
    "idefics3": _tiled_image,
    "internvl": None,
    "kimi_k25": None,
    "lfm2_vl": None,
    "llava": _image,
    "llava_next": None,
    "llava_onevision": None,
    "minimax_m3_vl": None,
    "mistral3": None,
    "mllama": _cross_attended_image,
    "ovis2": None,
    "paligemma": _image,
    "qwen2_5_vl": _grid_image,
    "qwen2_vl": _grid_image,
    "qwen3_5": _grid_image,
    "qwen3_5_moe": _grid_image,
    "qwen3_omni_moe_thinker": None,
    "qwen3_vl": _grid_image,
    "qwen3_vl_moe": _grid_image,
    "smolvlm": _tiled_image,
    "video_llava": None,
    "vipllava": _image,
}


def _others() -> tuple[Other, ...]:
    masked = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    base = modeling_auto.MODEL_MAPPING_NAMES
    to_text = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    speech = modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    vision = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return (
        *(Other(name, base[name], _text) for name in _BASE_MODELS),
        *(Other(name, masked[name], _text) for name in masked if name not in _NO_ENCODERS),
        *(Other(name, to_text[name], _text_to_text) for name in _TEXT_TO_TEXT),
        *(Other(name, speech[name], inputs) for name, inputs in _SPEECH_TO_TEXT.items()),
        *(Other(name, vision[name], _text, image) for name, image in _TEXT_WITH_IMAGE.items()),
    )


OTHERS: tuple[Other, ...] = _others()
