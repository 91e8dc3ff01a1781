"""Named, versioned, reversible replacements in megatron-core, applied inside the worker."""
