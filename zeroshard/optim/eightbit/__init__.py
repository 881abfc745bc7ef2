"""8-bit optimizer states in blocks of 256.

Source: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization".
"""
