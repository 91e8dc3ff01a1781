"""Number of tokens of a job's tokenizer, by flags, files on this machine and names of public models."""

from pipette_launch.megatron.tokenizers.vocabulary import Vocabulary, read_vocabulary

__all__ = ["Vocabulary", "read_vocabulary"]
