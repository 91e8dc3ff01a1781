"""Execute single ranks of a training job with abstract tensors, to count their bytes without a GPU."""
