"""Makes a model that sees pictures: a LLaVA of 0.3 million random weights over the tiny model's tokenizer.

    python tests/e2e/vision_model.py FOLDER

runs in the environment of vllm_env.py. What the model says of a picture has no meaning, but another picture makes it
say something else. LLaVA, because its picture is all placeholder tokens, which is all that vLLM's generate route can
tell apart, and because it needs no torchvision where vLLM takes transformers' own model code (--model-impl
transformers); Qwen2-VL and its like do, for their videos.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

SOURCE = Path(__file__).parent.parent / "data" / "tiny-model"
IMAGE = "<image>"
PICTURE = 28  # pixels on a side; patches of 14 make four tokens
SIZE = {"height": PICTURE, "width": PICTURE}
TEXT_PARTS = "{%- for p in content %}{{- p.text }}{%- endfor %}"
PARTS = "{%- for p in content %}{%- if p.type == 'image' %}<image>{%- else %}{{- p.text }}{%- endif %}{%- endfor %}"


def make(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(SOURCE / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(IMAGE, special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((SOURCE / "tokenizer_config.json").read_text())
    write(folder / "tokenizer_config.json", settings | {"extra_special_tokens": ["<|im_start|>", IMAGE]})
    template = (SOURCE / "chat_template.jinja").read_text()
    assert TEXT_PARTS in template
    (folder / "chat_template.jinja").write_text(template.replace(TEXT_PARTS, PARTS))
    (folder / "generation_config.json").write_text((SOURCE / "generation_config.json").read_text())
    normal = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_normalize": True, "do_rescale": True}
    resize = {"do_resize": True, "size": {"shortest_edge": PICTURE}, "do_center_crop": True, "crop_size": SIZE}
    write(folder / "preprocessor_config.json", {"image_processor_type": "CLIPImageProcessor", **normal, **resize})
    seen = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    write(folder / "processor_config.json", {"processor_class": "LlavaProcessor", "image_token": IMAGE, **seen})
    weights(tokenizer.token_to_id(IMAGE)).save_pretrained(folder)


def weights(image_token: int) -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=1056,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        projection_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=PICTURE,
        patch_size=14,
    )
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=image_token,
            image_token_id=image_token,
            image_seq_length=4,
            vision_feature_select_strategy="default",
            vision_feature_layer=-2,
            tie_word_embeddings=False,
        )
    ).float()
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            # Far larger than a fresh model's: else every text goes on alike, whatever was shown.
            torch.nn.init.normal_(weight, std=0.3 if "embed" in name or "lm_head" in name else 0.15)
    return model


def write(file: Path, values: object) -> None:
    file.write_text(json.dumps(values, indent=1))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
