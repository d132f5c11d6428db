"""The bundled model's tokenizer: one character, one token."""

from typing import Any

from comppo.tasks.chain import EOS, PAD, TOKEN_IDS


def make_tokenizer() -> Any:
    """A `PreTrainedTokenizerFast` over `chain.VOCABULARY`: padding on the left, no start token, no chat template.

    Text with any other character is refused when it is encoded: there is no token for unknown characters.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(dict(TOKEN_IDS)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
