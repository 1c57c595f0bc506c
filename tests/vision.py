"""A tiny processor for images, and images for it."""

from pathlib import Path

from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }} {% else %}"
    "{% for c in m['content'] %}{{ '<image>' if c['type'] == 'image' else c['text'] }} {% endfor %}"
    "{% endif %}{% endfor %}"
)


def make_processor(image_token_id: int) -> LlavaProcessor:
    """For pictures of 32 x 32 that make 16 tokens; words w16 to w89 have ids 16 to 89, any other 0."""
    words = {"?": 0} | {f"w{n}": n for n in range(16, 90)} | {"<image>": image_token_id}
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="?", extra_special_tokens={"image_token": "<image>"}
    )
    side = {"height": 32, "width": 32}
    return LlavaProcessor(
        CLIPImageProcessorPil(size=side, crop_size=side),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    )


def draw(path: Path, seed: int) -> None:
    """A picture unlike that of another seed."""
    Image.linear_gradient("L").rotate(37 * seed).resize((48, 40)).convert("RGB").save(path)
