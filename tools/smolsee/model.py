"""smolsee as a model: SmolLM2-135M, frozen, with a vision tower and a connector in the layout of Idefics3 (SmolVLM)."""

from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, Idefics3Config, PreTrainedTokenizerFast
from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector, Idefics3VisionTransformer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

IMAGE_SIZE = 128
PATCH_SIZE = 16
SCALE = 2
IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE // SCALE) ** 2
RANK = 8
ADAPTED = ("q_proj", "k_proj", "v_proj")
NEW_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>")
IMAGE, AROUND, GLOBAL = NEW_TOKENS
PICTURE = AROUND + GLOBAL + IMAGE * IMAGE_TOKENS + AROUND
VISION = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
}


def load_tokenizer(base: Path) -> PreTrainedTokenizerFast:
    """Return SmolLM2's tokenizer with the tokens of pictures."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": list(NEW_TOKENS)})
    return cast(PreTrainedTokenizerFast, tokenizer)


def _dtype(device: str) -> torch.dtype:
    """Return the type of the language model: CPUs are slow with bfloat16, and it is frozen."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def _norm(module: LlamaRMSNorm, hidden: torch.Tensor) -> torch.Tensor:
    """Do what the module does, in one operation."""
    return functional.rms_norm(hidden, hidden.shape[-1:], module.weight, module.variance_epsilon)


def _adapt(attention: Any, name: str, switch: "Switch") -> "Adapted":
    adapted = Adapted(getattr(attention, name), switch)
    setattr(attention, name, adapted)
    return adapted


class Adapted(torch.nn.Module):
    """A linear layer with a low-rank adapter, which can be switched off."""

    def __init__(self, layer: torch.nn.Linear, switch: "Switch") -> None:
        super().__init__()
        self.layer = layer
        device = layer.weight.device
        self.down = torch.nn.Parameter(torch.randn(RANK, layer.in_features, device=device) / layer.in_features**0.5)
        self.up = torch.nn.Parameter(torch.zeros(layer.out_features, RANK, device=device))
        self._switch = switch

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the layer returns, and what the adapter adds."""
        plain = cast(torch.Tensor, self.layer(hidden))
        if not self._switch.on:
            return plain
        low = functional.linear(hidden, self.down.to(hidden.dtype))
        return plain + functional.linear(low, self.up.to(hidden.dtype))


class Switch:
    """Whether the adapters add anything."""

    on = True


class Smolsee(torch.nn.Module):
    """The tower, the connector, the rows of the new tokens and small adapters learn; the language model does not."""

    def __init__(self, base: Path, device: str) -> None:
        super().__init__()
        language: Any = AutoModelForCausalLM.from_pretrained(base, dtype=_dtype(device), attn_implementation="sdpa")
        self.language = language.to(device).requires_grad_(False).eval()
        for module in language.modules():
            if isinstance(module, LlamaRMSNorm):
                module.forward = partial(_norm, module)  # type: ignore[method-assign]
        self.switch = Switch()
        self.adapters = {
            f"model.text_model.layers.{number}.self_attn.{name}": _adapt(layer.self_attn, name, self.switch)
            for number, layer in enumerate(language.model.layers)
            for name in ADAPTED
        }
        text = language.config
        config: Any = Idefics3Config(vision_config=dict(VISION), text_config=text.to_dict(), scale_factor=SCALE)
        config._attn_implementation = config.vision_config._attn_implementation = "sdpa"
        tower: Any = Idefics3VisionTransformer(config.vision_config)
        connector: Any = Idefics3Connector(config)  # type: ignore[no-untyped-call]
        self.tower, self.connector = tower.to(device), connector.to(device)
        self.vocabulary = text.vocab_size
        table = self.language.get_input_embeddings().weight
        start = table.float().mean(0) + 0.02 * torch.randn(len(NEW_TOKENS), text.hidden_size, device=device)
        self.new_rows = torch.nn.Parameter(start)

    def learning(self) -> list[torch.nn.Parameter]:
        """Return the weights that learn."""
        adapters = [weight for adapted in self.adapters.values() for weight in (adapted.down, adapted.up)]
        return [*self.tower.parameters(), *self.connector.parameters(), self.new_rows, *adapters]

    def learned(self) -> dict[str, torch.Tensor]:
        """Return the new weights under the names that Idefics3 gives them, in bfloat16."""
        parts = {"model.vision_model.": self.tower, "model.connector.": self.connector}
        weights = {prefix + name: value for prefix, part in parts.items() for name, value in part.state_dict().items()}
        weights["new_rows"] = self.new_rows
        for name, adapted in self.adapters.items():
            weights |= {f"{name}.lora_A.weight": adapted.down, f"{name}.lora_B.weight": adapted.up}
        return {
            name: value.detach().to("cpu", torch.bfloat16).contiguous()
            for name, value in weights.items()
            if value.is_floating_point()
        }

    def load_learned(self, path: Path) -> None:
        """Go on from weights that `learned` returned."""
        saved = load_file(path)
        for prefix, part in (("model.vision_model.", self.tower), ("model.connector.", self.connector)):
            part.load_state_dict(
                {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)},
                strict=False,
            )
        with torch.no_grad():
            self.new_rows.copy_(saved["new_rows"])
            for name, adapted in self.adapters.items():
                if f"{name}.lora_A.weight" in saved:
                    adapted.down.copy_(saved[f"{name}.lora_A.weight"])
                    adapted.up.copy_(saved[f"{name}.lora_B.weight"])

    def round_weights(self) -> None:
        """Round the learned weights as `learned` does, so that what is tested is what is saved."""
        with torch.no_grad():
            for weight in self.learning():
                weight.copy_(weight.to(torch.bfloat16))

    def see(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of pictures; `pixels` are bytes, [pictures, 3, height, width]."""
        values = pixels.float() / 127.5 - 1
        side = IMAGE_SIZE // PATCH_SIZE
        mask = torch.ones(len(values), side, side, dtype=torch.bool, device=values.device)
        patches = self.tower(pixel_values=values, patch_attention_mask=mask).last_hidden_state
        return cast(torch.Tensor, self.connector(patches))

    def read(self, ids: torch.Tensor, mask: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states; the rows of `seen` replace the image tokens, in order."""
        table = self.language.get_input_embeddings()
        new = ids >= self.vocabulary
        known = table(ids.masked_fill(new, 0))
        rows = self.new_rows.to(known.dtype)[(ids - self.vocabulary).clamp(min=0)]
        embeds = torch.where(new[..., None], rows, known)
        embeds = embeds.masked_scatter((ids == self.vocabulary)[..., None], seen.flatten(0, 1).to(known.dtype))
        return cast(torch.Tensor, self.language.model(inputs_embeds=embeds, attention_mask=mask).last_hidden_state)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next tokens; the new tokens are never written."""
        return cast(torch.Tensor, self.language.lm_head(hidden))
