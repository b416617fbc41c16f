"""Mixtures of experts in decoders: recognized by what they compute, and cut into single layers to be quantized."""
